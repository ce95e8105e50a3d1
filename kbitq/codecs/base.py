"""The seam: everything that depends on how a weight is coded, said once by each codec.

A codec turns a matrix ``[rows, cols]`` into a few tensors, its *parts*, and back. Plans, passes, readers, layers and
reports know parts only as named tensors whose shapes and places the codec tells; what a bit of them means is known to
the codec, to ``kbitq.format`` and to the kernels alone. A new codec is a module in this folder that is named in
:data:`BUILTIN`, or an object that a program gives to :func:`register`.

Nothing here imports torch, and a codec must not need it to say names, shapes and sizes: a plan is made of these.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kbitq.errors import CodecError
from kbitq.format import BLOCK, CODECS, DEFAULT_CODEC, Entry

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from kbitq.ops.tiles import Tiles

BUILTIN = {name: name.partition("/")[0] for name in CODECS}
"""The codecs that come with kbitq, and the modules of this package whose ``CODECS`` have them."""


OUTPUTS = {
    "compressed-tensors": "compressed_tensors",
    "int8": "compressed_tensors",
    "fp8": "compressed_tensors",
    "gptq": "gptq",
    "bnb-nf4": "bnb_nf4",
}
"""Families of other tools' formats that are written, and the modules here whose ``make`` has their codecs."""


Coding = tuple[str, int]
"""A codec and a K."""


@dataclass(frozen=True)
class Part:
    """One of the tensors that stand for a quantized one.

    Attributes:
        name: what follows the source's name and an underscore in a file: ``packed`` for ``layer.weight_packed``.
        dtype: in safetensors' spelling.
        shape: of the whole part.
        constant: one for the whole tensor (a codebook): it is not cut where the matrix is cut, and its bytes are
            reported beside the bits per weight, not in them.
        counted: a constant whose bytes are in the bits per weight all the same.
        turned: the matrix's rows are the columns of this part, so that rows of the matrix are no run of its bytes.
            A codec makes it of a span with the span's rows first, and whoever writes it turns it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    constant: bool = False
    counted: bool = False
    turned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return Entry(self.name, self.dtype, self.shape).nbytes


class SpanLike(Protocol):
    """Part of a matrix: ``rows x cols`` elements, from ``first_element`` on, where block ``first_block`` begins.

    ``row_length``: columns of the whole matrix. ``whole_rows``: whether the span's rows are the matrix's; else they are
    pieces of ``cut`` columns of one row, or its short last piece.
    """

    @property
    def first_element(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def row_length(self) -> int: ...
    @property
    def whole_rows(self) -> bool: ...


@dataclass(frozen=True)
class Request:
    """How a matrix, or a span of one, is to be encoded.

    Attributes:
        k: bits of an index.
        amax: float32 ``[1]``, the largest magnitude of the whole tensor, on any device.
        scale: ``mse`` or ``absmax``.
        levels: normalised levels, float32, from :meth:`Codec.levels` or fitted; None for a codec without levels.
        importance: float32 ``[G, cols]`` as ``ops.prepare_importance`` gives it; G divides the rows.
        shape: of the whole tensor, for a codec whose constants tell it; else empty.
    """

    k: int
    amax: Tensor
    scale: str = "mse"
    levels: Tensor | None = None
    importance: Tensor | None = None
    shape: tuple[int, ...] = ()

    def to(self, device: Any) -> Request:
        """The same with its tensors on a device."""
        levels, weights = (None if t is None else t.to(device) for t in (self.levels, self.importance))
        return Request(self.k, self.amax.to(device), self.scale, levels, weights, self.shape)


class Codec(Protocol):
    """What a codec says. Parts are dictionaries ``part name -> tensor``; matrices are 2-D."""

    name: str
    """As metadata and ``--codec`` spell it."""

    ks: Sequence[int]
    """The bits of an index that it has."""

    cut: int
    """Columns: a row may be cut at multiples of it, into tiles or among devices."""

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """The parts of a tensor ``name`` of this shape, in the order of a file's description; constants last."""
        ...

    def levels(self, spec: Any, k: int) -> tuple[npt.NDArray[np.float32] | None, str]:
        """The levels that ``spec`` names (None if the codec has none), and the kind that metadata gets."""
        ...

    def encode(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of a finite matrix of float32, bfloat16 or float16, on its device. Waits for no GPU."""
        ...

    def encode_into(self, w: Tensor, request: Request, parts: Mapping[str, Tensor]) -> None:
        """The same into the caller's tensors, which lie on the device of ``w`` as does the request."""
        ...

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: dtype, out: Tensor | None = None) -> Tensor:
        """The values ``[rows, cols]`` rounded once to ``dtype``, a 16- or 32-bit float; into ``out`` if given."""
        ...

    def stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """float64 ``[rows, 3]``: sum w^2, sum (w - w')^2 and max |w - w'| of each row (docs/format.md section 3)."""
        ...

    def block_stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """The same for each block of 32, ``[rows * nblk, 3]``. Only asked of a codec whose ``cut`` is not 32."""
        ...

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        """Byte of each part, constants apart, at which the span begins."""
        ...

    def k_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
        """K from the shapes of stored parts. Raises FormatError where there is none such."""
        ...

    def shape_of(self, name: str, k: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The source's shape as far as the stored parts tell it. Raises FormatError where they do not."""
        ...

    def check(self, parts: Mapping[str, Tensor], where: str) -> None:
        """Raise FormatError, which names ``where``, for constants that no reader may use."""
        ...

    def problems(self, parts: Mapping[str, Tensor]) -> list[str]:
        """What is odd about constants that readers still take, each as the end of a sentence about the tensor."""
        ...

    def levels_of(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The levels that, asked for again, give these parts again."""
        ...

    def scale_counts(self, part: str, data: Tensor) -> tuple[int, int, int] | None:
        """Of data of one part: blocks, blocks of zeros, blocks at the largest scale. None if it holds no scales."""
        ...

    def linear(self, x: Tensor, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """``x W^T (+ bias)`` ``[..., rows]`` in the dtype of x, with gradients to x and the bias.

        Constants may have a leading dimension G, one for each of G equal groups of rows.
        """
        ...

    def tiles(self, parts: Mapping[str, Tensor], cols: int) -> Tiles | None:
        """What kbitq.ops.tiled_linear multiplies by, of a matrix or a stack ``[E, a, ...]``; remembered with it.

        Args:
            parts: constants for all of it, or ``[G, ...]`` (of a stack ``[E, G, ...]``): one for each of G groups of
                rows.
            cols: of a matrix.

        Returns:
            None where there is no such kernel: on a CPU, for this codec or K, or while a graph is captured.
        """
        ...

    def tiles_made(self, parts: Mapping[str, Tensor]) -> Tiles | None:
        """Those that :meth:`tiles` made of these very parts and that are still held; None if there are none."""
        ...


class OutputCodec(Codec, Protocol):
    """The codec of a format that other tools load: its parts have that format's names, a folder its config."""

    output: str
    """The format, as ``--format`` spells it."""

    def refusal(self, name: str, shape: Sequence[int]) -> str | None:
        """Why the format cannot hold a tensor, as the end of a sentence about it; None if it can."""
        ...

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """``quantization_config`` of the folder's config.json.

        ``ks``: the K of each quantized module; ``not_converted``: modules left as they are.
        """
        ...

    def of_dtype(self, dtype: str) -> str:
        """The name of the codec for tensors of this dtype, in safetensors' spelling."""
        ...

    @property
    def base(self) -> str:
        """Its name as options spell it: without what depends on a tensor."""
        ...

    def rows_together(self, cols: int) -> int:
        """Rows of so many columns that are coded together: a span begins at a multiple of it. 1: a row may be cut."""
        ...

    @property
    def settles(self) -> bool:
        """Whether :meth:`settle` says a name."""
        ...

    @property
    def takes(self) -> frozenset[str]:
        """What a run may give it: of ``importance``, ``calibration``, ``rules`` and ``budget``."""
        ...

    def settle(self, spans: Iterable[Tensor]) -> str | None:
        """The name of the codec for one tensor, where the sizes of its parts depend on its values; else None.

        ``spans`` are all values of the tensor, ``[rows, cols]`` each, in order; they are read only where they matter.
        """
        ...


_codecs: dict[str, Codec] = {}
_outputs: dict[str, OutputCodec] = {}
_kinds: dict[str, dict[str, bool]] = {}
_constant_dims: dict[str, dict[str, int]] = {}


def register(codec: Codec) -> None:
    """Make a codec known under its name. Raises CodecError if another one has it."""
    if _codecs.setdefault(codec.name, codec) is not codec:
        raise CodecError(f"there is a codec {codec.name!r} already")


def unregister(name: str) -> None:
    """Forget a codec that was registered."""
    _codecs.pop(name, None)
    _kinds.pop(name, None)
    _constant_dims.pop(name, None)


def get_codec(name: str) -> Codec:
    """The codec of this name. Raises CodecError if there is none."""
    if name not in _codecs and name in BUILTIN:
        register(importlib.import_module(f"kbitq.codecs.{BUILTIN[name]}").CODECS[name])
    if name not in _codecs and (output := output_codec(name)) is not None:
        return output
    if name not in _codecs:
        raise CodecError(f"codec {name!r} is not known to this kbitq (it has {', '.join(codec_names())})")
    return _codecs[name]


def output_codec(name: str) -> OutputCodec | None:
    """The codec of this name, if it is one of another tool's format."""
    family = next((f for f in OUTPUTS if name == f or name.startswith(f + "-")), None)
    if family is None:
        return None
    if name not in _outputs:
        _outputs[name] = importlib.import_module(f"kbitq.codecs.{OUTPUTS[family]}").make(name)
    return _outputs[name]


def for_dtype(codec: str, dtype: str) -> str:
    """The codec that tensors of a dtype, in safetensors' spelling, get where a run asks for ``codec``."""
    output = output_codec(codec)
    return codec if output is None or output.base != codec else output.of_dtype(dtype)


def rows_together(codec: str, cols: int) -> int:
    """Rows of so many columns that a codec codes together; 1 where a row may be cut."""
    output = output_codec(codec)
    return 1 if output is None else output.rows_together(cols)


def codec_names() -> tuple[str, ...]:
    """The codecs there are."""
    return (*BUILTIN, *(name for name in _codecs if name not in BUILTIN))


def coding_text(codec: str, k: int) -> str:
    """How messages and reports name a codec and K: ``K=3``, ``trellis K=3``, ``trellis/128 K=3``."""
    return f"K={k}" if codec == DEFAULT_CODEC else f"{codec} K={k}"


def part_name(tensor: str, part: Part | str) -> str:
    """Name in a file of a part of ``tensor``. A part without a name has the tensor's; one that begins with a dot is
    below it, one that begins with a slash takes the place of ``weight``."""
    name = part if isinstance(part, str) else part.name
    if name[:1] == "/":
        return tensor.removesuffix("weight") + name[1:]
    return f"{tensor}_{name}" if name and name[0] != "." else tensor + name


def part_names(codec: str, tensor: str) -> dict[str, str]:
    """Part name -> its name in a file, for all parts of ``tensor``."""
    return {part: part_name(tensor, part) for part in part_kinds(codec)}


def part_kinds(codec: str) -> dict[str, bool]:
    """Part name -> whether it is constant, in the codec's order. The same object each time: leave it as it is."""
    if codec not in _kinds:  # a dictionary, and not functools.cache, which torch.compile warns of
        _kinds[codec] = {part.name: part.constant for part in any_parts(codec)}
    return _kinds[codec]


def constant_dims(codec: str) -> dict[str, int]:
    """Constant part -> its dimensions. One that is held with more has those first: one for each group of rows."""
    if codec not in _constant_dims:
        _constant_dims[codec] = {part.name: len(part.shape) for part in any_parts(codec) if part.constant}
    return _constant_dims[codec]


def any_parts(codec: str) -> tuple[Part, ...]:
    """The parts of some tensor: for their names and kinds, which do not depend on the tensor."""
    known = get_codec(codec)
    return known.parts("", (1, known.cut), known.ks[0])


def coded_entries(codec: str, tensor: str, shape: Sequence[int], k: int) -> list[Entry]:
    """What a file holds of a quantized tensor, without its place."""
    parts = get_codec(codec).parts(tensor, shape, k)
    return [Entry(part_name(tensor, part), part.dtype, part.shape) for part in parts]


def coded_nbytes(codec: str, tensor: str, shape: Sequence[int], k: int) -> int:
    """Bytes of all parts but the constants that do not count: the numerator of "bits per weight"."""
    parts = get_codec(codec).parts(tensor, shape, k)
    return sum(part.nbytes for part in parts if part.counted or not part.constant)


def constant_nbytes(codec: str, tensor: str, shape: Sequence[int], k: int) -> int:
    """Bytes of a tensor's constants (its codebook) beside those of ``coded_nbytes``."""
    parts = get_codec(codec).parts(tensor, shape, k)
    return sum(part.nbytes for part in parts if part.constant and not part.counted)


def span_stats(codec: Codec, w: Tensor, parts: Mapping[str, Tensor], span: SpanLike) -> Tensor:
    """``stats`` of a span: a row of the result for each of its rows, or for each block where a row was cut.

    So a tensor's sums, block after block and row after row, do not depend on where it is cut.
    """
    if span.whole_rows or codec.cut == BLOCK:
        return codec.stats(w, parts)
    return codec.block_stats(w, parts)


def bits_per_weight(codec: str, tensor: str, shape: Sequence[int], k: int) -> float:
    """8 * coded bytes / elements (docs/format.md section 2)."""
    return 8 * coded_nbytes(codec, tensor, shape, k) / math.prod(shape)
