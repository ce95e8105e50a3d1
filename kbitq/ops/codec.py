"""The core's operations as torch custom ops (``torch.ops.kbitq.*``), with fake kernels, for CPU and CUDA tensors.

Matrices are 2-D ``[rows, cols]`` here; how a tensor becomes a matrix is ``kbitq.format``'s business. The ops never
synchronise with a GPU and never look at a value: what is wrong with the numbers comes back in a status tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbitq import format as fmt
from kbitq._core import core

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the core reads and writes; float64 is rounded to float32 first (docs/format.md section 3)."""

STATS_COLUMNS = 3
"""Columns of :func:`stats`: sum w^2, sum (w - w')^2, max |w - w'|."""


def cuda_missing() -> str | None:
    """Why the core cannot compute on a GPU here, or None if it can."""
    if not core.has_cuda:
        return f"kbitq was built without CUDA ({core.cuda_status()})"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def stream_of(tensor: Tensor) -> int:
    """The caller's current CUDA stream on the tensor's device, as an address; 0 on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def check_dims(name: str, tensor: Tensor, *allowed: int) -> None:
    """Raise ValueError, which names the argument, unless ``tensor`` has as many dimensions as is allowed.

    What the core is given is checked there; this is for what has to be read off a shape before.
    """
    if tensor.dim() not in allowed:
        raise ValueError(f"{name}: needs {' or '.join(map(str, allowed))} dimensions, got {tensor.dim()}")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError, which names the argument, unless ``tensor`` is rows ``[..., n]`` that make one matrix."""
    if not tensor.dim() or (tensor.dim() != 2 and tensor.shape[-1] == 0):
        raise ValueError(f"{name}: needs shape [..., features], got {list(tensor.shape)}")


def check_size(name: str, value: int, limit: int) -> None:
    """Raise ValueError, which names the argument, unless ``value`` is from 0 to ``limit``; symbols are let pass."""
    if isinstance(value, int) and not 0 <= value <= limit:
        raise ValueError(f"{name}: must be from 0 to {limit} here, got {value}")


@dataclass(frozen=True)
class Layout:
    """What the shapes of a codec's parts depend on: the K there are, the bits of an index that are not stored, and the
    columns that share a scale."""

    ks: range
    extra_bits: int
    scale_block: int

    def scales(self, cols: int) -> int:
        """Scales of a row."""
        return -(-cols // self.scale_block)


_TRELLIS_KS = range(fmt.TRELLIS_K_MIN, fmt.TRELLIS_K_MAX + 1)
LAYOUTS = {
    name: Layout(range(fmt.K_MIN, fmt.K_MAX + 1), 0, columns)
    if name == fmt.DEFAULT_CODEC
    else Layout(_TRELLIS_KS, fmt.TRELLIS_EXTRA_BITS, columns)
    for name, columns in fmt.CODECS.items()
}
"""Codecs that the core has."""


def layout_of(codec: str) -> Layout:
    """The layout of a codec. Raises ValueError for one that the core does not have."""
    if codec not in LAYOUTS:
        raise ValueError(f"codec: must be one of {', '.join(LAYOUTS)}, got {codec!r}")
    return LAYOUTS[codec]


def bits_of(codebook: Tensor, name: str = "codebook", codec: str = fmt.DEFAULT_CODEC) -> int:
    """K of codebooks ``[..., 2^K]``; of the trellis ``[..., 2^(K + 2)]``.

    Raises ValueError, which names the argument, for another number of levels.
    """
    count, layout = codebook.shape[-1] if codebook.dim() else 0, layout_of(codec)
    k = count.bit_length() - 1 - layout.extra_bits
    if isinstance(count, int) and (k not in layout.ks or count != 1 << (k + layout.extra_bits)):
        power = f"2^(K + {layout.extra_bits})" if layout.extra_bits else "2^K"
        raise ValueError(f"{name}: has {count} levels, needs {power} with K from {layout.ks[0]} to {layout.ks[-1]}")
    return k


def cols_limit(absmax: Tensor, codec: str = fmt.DEFAULT_CODEC) -> int:
    """The most columns that the scales of ``absmax`` can be of; a bound for sizes that come as numbers."""
    check_dims("absmax", absmax, 2)
    return absmax.shape[1] * layout_of(codec).scale_block


library = torch.library.Library("kbitq", "FRAGMENT")
"""All operators of ``torch.ops.kbitq``, also those of other modules."""


def register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: Sequence[str] = ("CPU", "CUDA")
) -> None:
    """Define an op ``kbitq::...``.

    Not by ``torch.library.custom_op``: the first call of an op defined so imports the compiler, which takes seconds.

    Args:
        schema: the op's name, arguments and results, as ``torch.library`` spells them.
        run: makes the results.
        fake: makes results of the right shapes, dtypes and devices without values.
        devices: whose tensors ``run`` takes.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in devices:
        library.impl(name, run, key)
    torch.library.register_fake(f"kbitq::{name}", fake, lib=library)


def _scan(w: Tensor) -> tuple[Tensor, Tensor]:
    amax = torch.empty(1, dtype=torch.float32, device=w.device)
    status = torch.empty(2, dtype=torch.int64, device=w.device)
    core.scan(w.contiguous(), amax, status, torch.get_num_threads(), stream_of(w))
    return amax, status


def _fake_scan(w: Tensor) -> tuple[Tensor, Tensor]:
    return w.new_empty(1, dtype=torch.float32), w.new_empty(2, dtype=torch.int64)


register("scan(Tensor w) -> (Tensor, Tensor)", _scan, _fake_scan)


def scan(w: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of ``w``, and whether all of it is finite.

    Args:
        w: float32, bfloat16 or float16, any shape.

    Returns:
        ``(amax, status)``: ``amax`` float32 ``[1]``, max |w| over the finite elements (0 if there are none); ``status``
        int64 ``[2]``, the number of NaN and infinite elements and the flat index of the first (-1 if none).
    """
    return torch.ops.kbitq.scan(w)


def _outputs(w: Tensor, codebook: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    check_dims("w", w, 2)
    check_dims("levels", codebook, 1)
    rows, cols = w.shape
    packed = w.new_empty((rows, fmt.block_count(cols) * bits_of(codebook, "levels", codec)), dtype=torch.int32)
    return packed, w.new_empty((rows, layout_of(codec).scales(cols)), dtype=torch.uint8)


def _quantize(
    w: Tensor, levels: Tensor, amax: Tensor, importance: Tensor | None, scale: str, codec: str = fmt.DEFAULT_CODEC
) -> tuple[Tensor, Tensor, Tensor]:
    packed, absmax = _outputs(w, levels, codec)
    codebook = torch.empty_like(levels)
    quantize_into(w, levels, packed, absmax, codebook, amax=amax, importance=importance, scale=scale, codec=codec)
    return packed, absmax, codebook


def _fake_quantize(
    w: Tensor, levels: Tensor, amax: Tensor, importance: Tensor | None, scale: str, codec: str = fmt.DEFAULT_CODEC
) -> tuple[Tensor, Tensor, Tensor]:
    packed, absmax = _outputs(w, levels, codec)
    return packed, absmax, torch.empty_like(levels)


register(
    "quantize(Tensor w, Tensor levels, Tensor amax, Tensor? importance, str scale, str codec='planes') "
    "-> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)


def quantize_into(
    w: Tensor,
    levels: Tensor,
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    *,
    amax: Tensor | None,
    importance: Tensor | None = None,
    scale: str = "mse",
    codec: str = fmt.DEFAULT_CODEC,
) -> None:
    """:func:`quantize` into the caller's buffers (row tiles of a checkpoint, CUDA graphs); allocates nothing.

    Args:
        w: as of :func:`quantize`, contiguous.
        levels: as of :func:`quantize`.
        packed: int32 ``[rows, nblk * K]``, written.
        absmax: uint8 ``[rows, scales]``, written; without ``amax`` also float32, which receives the exact maxima.
        codebook: float32 as the levels, written; None without ``amax``.
        amax: as of :func:`quantize`; None leaves out the tensor's power of two, as docs/format.md section 5 says.
        importance: as of :func:`quantize`.
        scale: as of :func:`quantize`; of the trellis also ``"given"``, which takes the bytes that ``absmax`` holds.
        codec: as of :func:`quantize`.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    threads = torch.get_num_threads()
    core.quantize(w, levels, amax, importance, packed, absmax, codebook, scale, threads, stream_of(w), codec)


def quantize(
    w: Tensor,
    levels: Tensor,
    *,
    amax: Tensor,
    importance: Tensor | None = None,
    scale: str = "mse",
    codec: str = fmt.DEFAULT_CODEC,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a finite matrix (docs/format.md).

    Args:
        w: float32, bfloat16 or float16 ``[rows, cols]``, all finite (:func:`scan` tells).
        levels: float32 ``[2^K]`` (trellis: ``[2^(K + 2)]``), ascending, normalised (:mod:`kbitq.codecs.codebooks`), on
            the device of ``w``.
        amax: float32 ``[1]``, max |w| of the whole tensor that ``w`` is a part of.
        importance: float32 ``[G, cols]`` from :func:`prepare_importance`; G divides rows, and row r uses row
            ``r // (rows / G)`` of it.
        scale: ``"mse"`` or ``"absmax"``.
        codec: ``"planes"``, ``"trellis"``, or ``"trellis/128"``, whose scales are for 128 columns each.

    Returns:
        ``(packed, absmax, codebook)``: int32 ``[rows, nblk * K]``, uint8 ``[rows, scales]``, float32 as the levels.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    return torch.ops.kbitq.quantize(w.contiguous(), levels, amax, importance, scale, codec)


def _dequantize(
    packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, dtype: torch.dtype, codec: str = fmt.DEFAULT_CODEC
) -> Tensor:
    check_dims("packed", packed, 2)
    check_size("cols", cols, cols_limit(absmax, codec))
    out = torch.empty((packed.shape[0], cols), dtype=dtype, device=packed.device)
    dequantize_into(packed, absmax, codebook, out, codec)
    return out


def _fake_dequantize(
    packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, dtype: torch.dtype, codec: str = fmt.DEFAULT_CODEC
) -> Tensor:
    check_dims("packed", packed, 2)
    check_size("cols", cols, cols_limit(absmax, codec))
    return packed.new_empty((packed.shape[0], cols), dtype=dtype)


register(
    "dequantize(Tensor packed, Tensor absmax, Tensor codebook, SymInt cols, ScalarType dtype, "
    "str codec='planes') -> Tensor",
    _dequantize,
    _fake_dequantize,
)


def dequantize_into(
    packed: Tensor, absmax: Tensor, codebook: Tensor, out: Tensor, codec: str = fmt.DEFAULT_CODEC
) -> None:
    """:func:`dequantize` into a tensor that there is; allocates nothing.

    Args:
        packed: as of :func:`dequantize`, contiguous.
        absmax: as of :func:`dequantize`, contiguous.
        codebook: as of :func:`dequantize`.
        out: ``[rows, cols]``, contiguous; each element is written once.
        codec: as of :func:`quantize`.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    core.dequantize(packed, absmax, codebook, out, torch.get_num_threads(), stream_of(out), codec)


def dequantize(
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    cols: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    codec: str = fmt.DEFAULT_CODEC,
) -> Tensor:
    """``codebook[index] * decode(absmax)`` in float32, rounded once to ``dtype`` (docs/format.md section 1).

    Args:
        packed: int32 ``[rows, nblk * K]``.
        absmax: uint8 (E4M4) ``[rows, scales]``; of ``planes`` float32 too.
        codebook: float32 ``[2^K]``, of the trellis ``[2^(K + 2)]``.
        cols: elements in a row; ``nblk = ceil(cols / 32)``.
        dtype: float32, bfloat16 or float16.
        out: written instead of a new tensor; contiguous ``[rows, cols]``; its dtype is the one used.
        codec: as in :func:`quantize`.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    if out is not None:
        dequantize_into(packed, absmax, codebook, out, codec)
        return out
    return torch.ops.kbitq.dequantize(packed.contiguous(), absmax.contiguous(), codebook, cols, dtype, codec)


def _stats(w: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, codec: str = fmt.DEFAULT_CODEC) -> Tensor:
    check_dims("w", w, 2)
    out = torch.empty((w.shape[0], STATS_COLUMNS), dtype=torch.float64, device=w.device)
    core.stats(w, packed, absmax, codebook, out, torch.get_num_threads(), stream_of(w), codec)
    return out


def _fake_stats(w: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, codec: str = fmt.DEFAULT_CODEC) -> Tensor:
    check_dims("w", w, 2)
    return w.new_empty((w.shape[0], STATS_COLUMNS), dtype=torch.float64)


register(
    "stats(Tensor w, Tensor packed, Tensor absmax, Tensor codebook, str codec='planes') -> Tensor", _stats, _fake_stats
)


def stats(w: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, codec: str = fmt.DEFAULT_CODEC) -> Tensor:
    """What quantization cost, by row: float64 ``[rows, 3]`` of sum w^2, sum (w - w')^2 and max |w - w'|.

    ``w'`` is the float32 decoded value, before rounding to a dtype; sums in the order of docs/format.md section 3.

    Args:
        w: what was quantized, ``[rows, cols]``.
        packed: as of :func:`dequantize`, contiguous.
        absmax: as of :func:`dequantize`, contiguous.
        codebook: as of :func:`dequantize`.
        codec: as of :func:`quantize`.
    """
    return torch.ops.kbitq.stats(w.contiguous(), packed, absmax, codebook, codec)


def prepare_importance(importance: Tensor) -> Tensor:
    """Importance scaled by the power of two that brings its largest value into [1, 2) (docs/format.md section 3).

    Args:
        importance: ``[cols]`` or ``[E, cols]``, finite and not negative.

    Returns:
        float32 ``[1, cols]`` or ``[E, cols]`` on the same device.

    Raises:
        ValueError: it has a negative or non-finite value, or another rank.
    """
    if importance.dim() not in (1, 2):
        raise ValueError(f"importance: needs 1 or 2 dimensions, got {importance.dim()}")
    values = np.atleast_2d(importance.detach().to("cpu", torch.float32).numpy())
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("importance: every value must be finite and not negative")
    largest = float(values.max(initial=0.0))
    if largest > 0:
        values = np.ldexp(values, 1 - int(np.frexp(largest)[1]))  # rounds once, even where it underflows
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(importance.device)
