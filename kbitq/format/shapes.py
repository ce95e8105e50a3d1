"""The numbers of the format, and the shapes and names stored for a tensor (docs/format.md sections 1, 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kbitq.errors import FormatError

BLOCK = 32  # elements of one row that share a scale
K_MIN, K_MAX = 2, 8  # of the codec `planes`
TRELLIS_K_MIN, TRELLIS_K_MAX = 1, 4
TRELLIS_EXTRA_BITS = 2  # of an index, that are not stored
SCALE_BLOCKS = (32, 128)  # columns that may share a scale
E4M4_BIAS = 11  # exponent bias of the scale byte
E4M4_MAX = 31.0  # value of byte 0xFF
E4M4_ONE = E4M4_BIAS << 4  # the byte whose value is 1
MIN_EXPONENT = -100  # of the power of two folded into a codebook
MIN_LEVEL = 2.0**-12  # smaller magnitudes of a normalised codebook become 0
WORD_BYTES = 4  # one int32 word holds one bit plane of one block
SCALE_RULES = ("absmax", "mse")
DEFAULT_CODEC = "planes"  # what metadata that names no codec means
CODECS = {DEFAULT_CODEC: BLOCK, "trellis": 32, "trellis/128": 128}  # by name, the columns that share a scale
PACKED_SUFFIX, ABSMAX_SUFFIX, CODEBOOK_SUFFIX = "_packed", "_absmax", "_codebook"
COMPANION_SUFFIXES = (PACKED_SUFFIX, ABSMAX_SUFFIX, CODEBOOK_SUFFIX)


def is_fused_experts(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a stack of expert matrices ``[E, a, b]``: three dimensions and a component ``experts``."""
    return len(shape) == 3 and "experts" in name.split(".")


def matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """The (rows, cols) that a tensor of two or more dimensions is quantized as (section 1)."""
    if len(shape) < 2:
        raise FormatError(f"tensor {name}: shape {list(shape)} is not a matrix, so it has no quantized form")
    if is_fused_experts(name, shape):
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


def block_count(cols: int) -> int:
    """Blocks in a row of ``cols`` elements; the last may be short."""
    return -(-cols // BLOCK)


def packed_shape(name: str, shape: Sequence[int], k: int) -> tuple[int, ...]:
    """Shape of ``N_packed`` (int32).

    Args:
        name: N, which says whether three dimensions are a stack of experts.
        shape: of the source.
        k: words of a block.
    """
    rows, cols = matrix_shape(name, shape)
    lead = (shape[0], shape[1]) if is_fused_experts(name, shape) else (rows,)
    return (*lead, block_count(cols) * k)


def absmax_shape(name: str, shape: Sequence[int], scale_block: int = BLOCK) -> tuple[int, ...]:
    """Shape of ``N_absmax`` (uint8).

    Args:
        name: N, which says whether three dimensions are a stack of experts.
        shape: of the source.
        scale_block: columns that share a scale.
    """
    return (*packed_shape(name, shape, 1)[:-1], -(-matrix_shape(name, shape)[1] // scale_block))


def shape_of_packed(name: str, k: int, packed: Sequence[int]) -> tuple[int, ...]:
    """The source shape that ``N_packed`` alone suggests: that of a matrix, or of fused experts, of whole blocks.

    Args:
        name: N.
        k: words of a block.
        packed: the shape of ``N_packed``.
    """
    return (*packed[:-1], packed[-1] // k * BLOCK)


def companion_names(name: str) -> tuple[str, str, str]:
    """Names of the packed words, the scale bytes and the codebook of tensor ``name``."""
    return name + PACKED_SUFFIX, name + ABSMAX_SUFFIX, name + CODEBOOK_SUFFIX


def k_of_codebook(name: str, shape: Sequence[int], ks: Sequence[int] = range(K_MIN, K_MAX + 1), extra: int = 0) -> int:
    """K from the shape of ``N_codebook``.

    Args:
        name: N, for the error.
        shape: of ``N_codebook``, which is to be ``[2^(K + extra)]``.
        ks: those there are.
        extra: bits of an index that are not stored.

    Raises:
        FormatError: it is no such shape.
    """
    k = shape[0].bit_length() - 1 - extra if len(shape) == 1 else 0
    if k not in ks or tuple(shape) != (1 << (k + extra),):
        power = f"2^(K+{extra})" if extra else "2^K"
        raise FormatError(
            f"tensor {name}: codebook of shape {list(shape)} is not {power} levels with K in {ks[0]}..{ks[-1]}"
        )
    return k


def module_name(name: str) -> str:
    """The module that owns a parameter: the name without ``.weight`` (fused experts keep their whole name)."""
    return name.removesuffix(".weight")


def guard_name(quantized: Mapping[str, Sequence[int]]) -> str | None:
    """Name of a folder's guard tensor: the first (by name) quantized 2-D ``.weight``, given names and source shapes.

    The guard is an empty float32 tensor under the name of a real weight, so that a loader that ignores an unknown
    ``quant_method`` stops with a size mismatch and does not run with random weights.
    """
    return min((n for n, shape in quantized.items() if len(shape) == 2 and n.endswith(".weight")), default=None)


GUARD_DTYPE, GUARD_SHAPE = "F32", (0,)
