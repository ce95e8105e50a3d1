"""The fused linear on the GPU: y = x W^T from weights in tile order (csrc/format/tile_order.h), K = 2..5.

Planes, as a file holds them, are repacked to tiles once; :meth:`Tiles.planes` gives them back bit for bit. How a
product is computed depends on the rows of x: up to 16 by a kernel that streams the weights past them, up to
:func:`fused_rows` by ones that stage x in shared memory, in slices of 64 (256 on Hopper), and beyond that the weights
are decoded into a bounded buffer and multiplied by the library. All of it is deterministic, sums in float32, and may be
captured in a graph.

The workspace is one for each device and stream; all graphs of a device share one, so two graphs with fused linears in
them must not be replayed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kbitq import format as fmt
from kbitq._core import core
from kbitq.ops import codec, panels

FUSED_ROWS, FUSED_ROWS_WIDE, FUSED_ROWS_WIDE_SMALL = 128, 1024, 256
"""Rows of x up to which the fused kernels beat decoding and the library's matmul: without the kernel for wide x, which
takes sm_90a; with it; with it for a weight of less than :data:`SMALL` elements (NVIDIA H200, docs/benchmarks.md)."""

SMALL = 5 << 22

_PANEL_BYTES = 1 << 28  # of the decoded weights at a time
_DTYPES = GROUPED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """A quantized matrix in tile order, on a GPU. Do not write to its tensors: kernels may read them ahead of time.

    Attributes:
        data: int32 ``[ceil(rows / 16), ceil(cols / 256), 128 K + 32]``.
        codebook: float32 ``[G, 2^K]``, a copy of its own; one for each of G equal groups of rows.
        rows: of the matrix.
        cols: of the matrix.
    """

    data: Tensor
    codebook: Tensor
    rows: int
    cols: int

    @property
    def k(self) -> int:
        """Bits of an index."""
        return self.codebook.shape[1].bit_length() - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles and the codebooks."""
        return self.data.nbytes + self.codebook.nbytes

    def rows_of(self, begin: int, end: int) -> Tiles:
        """Rows ``[begin, end)`` as a matrix that shares the memory: whole tiles, and whole groups if several."""
        size = self.rows // self.codebook.shape[0]
        books = self.codebook if self.codebook.shape[0] == 1 else self.codebook[begin // size : end // size]
        part = self.data[begin // core.tile_rows : -(-end // core.tile_rows)]
        return Tiles(part, books, end - begin, self.cols)

    def planes(self) -> tuple[Tensor, Tensor]:
        """``(packed, absmax)`` as they were before :func:`tile`, bit for bit."""
        return torch.ops.kbitq.untile(self.data, self.rows, self.cols)


# --- repacking -------------------------------------------------------------------------------------


_TILE_COLS = 256  # columns of a record
_BITS_OF_WORDS = {core.tile_shape(1, 1, k)[2]: k for k in range(fmt.K_MIN, core.tile_max_bits + 1)}  # of a record


def _tiled_bits(packed: Tensor, absmax: Tensor, cols: int) -> int:
    """K of planes to be tiled. Raises ValueError, which names the argument, where shapes and ``cols`` do not fit."""
    codec.check_dims("packed", packed, 2)
    codec.check_size("cols", cols, codec.cols_limit(absmax))
    k, rest = divmod(packed.shape[1], max(fmt.block_count(cols), 1))
    if isinstance(k, int) and (rest or k not in _BITS_OF_WORDS.values()):
        raise ValueError(f"packed: its {packed.shape[1]} words a row are not those of {cols} columns at a K up to 5")
    return k


def _tile(packed: Tensor, absmax: Tensor, cols: int) -> Tensor:
    k = _tiled_bits(packed, absmax, cols)
    tiles = packed.new_empty(core.tile_shape(packed.shape[0], cols, k))
    core.repack(packed, absmax, tiles, cols, False, torch.get_num_threads(), codec.stream_of(packed))
    return tiles


def _fake_tile(packed: Tensor, absmax: Tensor, cols: int) -> Tensor:
    k = _tiled_bits(packed, absmax, cols)
    return packed.new_empty(core.tile_shape(packed.shape[0], cols, k))


def _untiled_bits(tiles: Tensor, rows: int, cols: int) -> int:
    """K of tiles. Raises ValueError, which names the argument, where they are not those of a matrix of that size."""
    codec.check_dims("tiles", tiles, 3)
    codec.check_size("rows", rows, tiles.shape[0] * core.tile_rows)
    codec.check_size("cols", cols, tiles.shape[1] * _TILE_COLS)
    if tiles.shape[2] not in _BITS_OF_WORDS:
        raise ValueError(f"tiles: records of {tiles.shape[2]} words are of no K")
    return _BITS_OF_WORDS[tiles.shape[2]]


def _untile(tiles: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    bits, blocks = _untiled_bits(tiles, rows, cols), fmt.block_count(cols)
    packed = tiles.new_empty((rows, blocks * bits))
    absmax = tiles.new_empty((rows, blocks), dtype=torch.uint8)
    core.repack(packed, absmax, tiles, cols, True, torch.get_num_threads(), codec.stream_of(tiles))
    return packed, absmax


def _fake_untile(tiles: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    bits, blocks = _untiled_bits(tiles, rows, cols), fmt.block_count(cols)
    packed = tiles.new_empty((rows, blocks * bits))
    return packed, tiles.new_empty((rows, blocks), dtype=torch.uint8)


codec.register("tile(Tensor packed, Tensor absmax, SymInt cols) -> Tensor", _tile, _fake_tile)
codec.register("untile(Tensor tiles, SymInt rows, SymInt cols) -> (Tensor, Tensor)", _untile, _fake_untile)


@cache
def _rows_taken(device: int) -> int:
    return core.tiled_linear_rows(device)


def takes_groups(device: int) -> bool:
    """Whether :func:`grouped_linear` runs on a GPU: one with 227 KB of shared memory a block (Hopper, B200)."""
    return _rows_taken(device) > core.few_rows


def can_tile(packed: Tensor, codebook: Tensor) -> bool:
    """Whether the fused kernels take this matrix: K at most 5, on a GPU of compute capability 8.0 or later that this
    build has code for, and groups of rows, if several, of a multiple of 16 rows."""
    groups, rows = codebook.numel() // codebook.shape[-1], packed.numel() // packed.shape[-1]
    if not packed.is_cuda or _rows_taken(packed.get_device()) == 0 or codebook.shape[-1] > 1 << core.tile_max_bits:
        return False
    return groups == 1 or rows % (groups * core.tile_rows) == 0


def tile(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int) -> Tiles:
    """Repack a quantized matrix; a few milliseconds on a GPU.

    Args:
        packed: int32 ``[rows, nblk * K]``; ``[E, a, nblk * K]`` for a stack, seen as ``E * a`` rows.
        absmax: uint8 ``[rows, nblk]``, or ``[E, a, nblk]``.
        codebook: float32 ``[2^K]``, or ``[G, 2^K]`` with any leading dimensions for G. Of a stack with one, every
            matrix gets a copy.
        cols: elements in a row.

    Raises:
        ValueError: an argument's type, shape or device does not fit, or K is above 5.
    """
    books = codebook.detach().reshape(-1, codebook.shape[-1])
    books = books.repeat(packed.shape[0] if packed.dim() == 3 and books.shape[0] == 1 else 1, 1)
    if packed.is_cuda:
        _workspace(packed.device, capturing=True)  # made here, because it cannot be made while a graph is captured
    words, scales = packed.detach().flatten(0, -2).contiguous(), absmax.detach().flatten(0, -2).contiguous()
    return Tiles(torch.ops.kbitq.tile(words, scales, cols), books, words.shape[0], cols)


# --- multiplying -----------------------------------------------------------------------------------

_T = TypeVar("_T")


def _to_keep(make: Callable[[], _T], device: torch.device) -> _T:
    """``make()``, on a thread of its own and the caller's stream: for memory that outlives the call.

    While torch.compile warms up for CUDA graphs, what this thread allocates comes from the graphs' pool, where nothing
    may stay that is not an output.
    """
    stream = torch.cuda.current_stream(device)

    def run() -> _T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_GRAPHS = -1  # in place of a stream


def _workspace(device: torch.device, capturing: bool | None = None) -> tuple[Tensor, Tensor]:
    """Partial sums and counters, made once for each device and stream, and once for all graphs of a device."""
    if capturing is None:
        capturing = torch.cuda.is_current_stream_capturing()
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, _GRAPHS if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _workspaces:
        _workspaces[key] = _to_keep(partial(_new_workspace, torch.device("cuda", index)), device)
        if capturing:
            torch.cuda.synchronize(device)  # the zeros are there whichever stream comes first
    return _workspaces[key]


def _new_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.empty(core.tiled_workspace_bytes(device.index), dtype=torch.uint8, device=device)
    return sums, torch.zeros(core.tiled_counters, dtype=torch.int32, device=device)


def _by_panels(x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor) -> None:
    def decode(begin: int, end: int, levels: Tensor, weights: Tensor) -> None:
        records = tiles[begin // core.tile_rows : -(-end // core.tile_rows)]
        core.decode_tiles(records, levels, weights, codec.stream_of(x))

    weight = panels.Weight(out.shape[1], x.shape[1], codebook, decode, core.tile_rows)
    panels.multiply(x, weight, bias, out, x.dtype, _PANEL_BYTES)


def _check_product(x: Tensor, tiles: Tensor, rows: int) -> None:
    codec.check_rows("x", x)
    codec.check_dims("tiles", tiles, 3)
    codec.check_size("rows", rows, tiles.shape[0] * core.tile_rows)


def _linear_tiles(x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    _check_product(x, tiles, rows)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((flat.shape[0], rows))
    multiply_into(flat, tiles, codebook, bias, out)
    return out.view(*x.shape[:-1], rows)


def _fake_linear_tiles(x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    _check_product(x, tiles, rows)
    return x.new_empty((*x.shape[:-1], rows))


codec.register(
    "linear_tiles(Tensor x, Tensor tiles, Tensor codebook, Tensor? bias, SymInt rows) -> Tensor",
    _linear_tiles,
    _fake_linear_tiles,
    ("CUDA",),
)


@cache
def _staging_bytes(m: int, rows: int, cols: int, device: int) -> int:
    return core.tiled_staging_bytes(m, rows, cols, device)


@cache
def _has_wide(device: int) -> bool:
    return core.tiled_staging_bytes(FUSED_ROWS_WIDE, core.tile_rows, fmt.BLOCK, device) > 0


def fused_rows(device: int, rows: int, cols: int) -> int:
    """Rows of x up to which the fused kernels are used on a GPU for a weight ``[rows, cols]``."""
    if not _has_wide(device):
        return min(FUSED_ROWS, _rows_taken(device))
    return FUSED_ROWS_WIDE if rows * cols >= SMALL else FUSED_ROWS_WIDE_SMALL


def multiply_into(x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out [M, rows] = x [M, cols] W^T (+ bias)``; x and out contiguous. Float32 is multiplied by decoded weights."""
    device = x.get_device()
    if x.dtype in _DTYPES and x.shape[0] <= fused_rows(device, out.shape[1], x.shape[1]):
        size = _staging_bytes(x.shape[0], out.shape[1], x.shape[1], device)
        staging = x.new_empty(size, dtype=torch.uint8) if size else None
        core.linear_tiles(x, tiles, codebook, bias, out, *_workspace(x.device), None, staging, codec.stream_of(x))
    else:
        _by_panels(x, tiles, codebook, bias, out)


def linear(x: Tensor, weight: Tiles, bias: Tensor | None = None) -> Tensor:
    """y = x W^T (+ bias).

    Args:
        x: bfloat16, float16 or float32 ``[..., cols]``; no gradient flows to it (``torch.ops.kbitq.linear`` has one).
        weight: the matrix, on the device of x.
        bias: ``[rows]`` in the dtype of x.

    Returns:
        ``[..., rows]`` in the dtype of x, from float32 sums. Levels (to 8 rows) or weights (above) are rounded to that
        dtype first.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    return torch.ops.kbitq.linear_tiles(x, weight.data, weight.codebook, bias, weight.rows)


def _grouped(x: Tensor, tiles: Tensor, codebook: Tensor, offsets: Tensor, rows: int) -> Tensor:
    _check_product(x, tiles, rows)
    out = x.new_empty((x.shape[0], rows))
    core.linear_tiles(
        x.contiguous(), tiles, codebook, None, out, *_workspace(x.device), offsets, None, codec.stream_of(x)
    )
    return out


def _fake_grouped(x: Tensor, tiles: Tensor, codebook: Tensor, offsets: Tensor, rows: int) -> Tensor:
    _check_product(x, tiles, rows)
    return x.new_empty((x.shape[0], rows))


codec.register(
    "grouped_linear_tiles(Tensor x, Tensor tiles, Tensor codebook, Tensor offsets, SymInt rows) -> Tensor",
    _grouped,
    _fake_grouped,
    ("CUDA",),
)


def grouped_linear(x: Tensor, weight: Tiles, offsets: Tensor) -> Tensor:
    """Every expert's rows of x times its weights, in one launch.

    Args:
        x: bfloat16 or float16 ``[tokens, cols]``, sorted by expert.
        weight: the experts' matrices ``[E, a, cols]`` seen as ``[E * a, cols]``; a a multiple of 16 if E > 1; one
            codebook for each expert, or a whole number of them for each.
        offsets: int32 ``[E + 1]`` on the device: expert e has rows ``offsets[e] .. offsets[e + 1]`` of x. Never read
            by the host.

    Returns:
        ``[tokens, a]``.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    return torch.ops.kbitq.grouped_linear_tiles(
        x, weight.data, weight.codebook, offsets, weight.rows // (offsets.shape[0] - 1)
    )


# --- tiles of parameters ---------------------------------------------------------------------------

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _identity(*tensors: Tensor) -> tuple[int, ...]:
    """Changes when a tensor's memory does, or is written in place."""
    return tuple(v for t in tensors for v in (t.data_ptr(), 0 if t.is_inference() else t._version))


def tiles_of(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int) -> Tiles:
    """:func:`tile`, remembered for as long as ``packed`` lives and none of the three is changed."""
    identity = _identity(packed, absmax, codebook)
    known = _known.get(packed)
    if known is None or known[0] != identity:
        known = (identity, _to_keep(partial(tile, packed, absmax, codebook, cols), packed.device))
        _known[packed] = known
    return known[1]


def tiles_for(x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor) -> Tiles | None:
    """The tiles to multiply ``x [M, cols]`` by, or None where the planes serve better: many rows, float32, a GPU or a K
    without kernels, or while a graph is captured and the weight has not been used before it."""
    if x.dtype not in _DTYPES or not can_tile(packed, codebook):
        return None
    if x.shape[0] > fused_rows(x.get_device(), packed.shape[0], x.shape[1]):
        return None
    known = _known.get(packed)
    if known is not None and known[0] == _identity(packed, absmax, codebook):
        return known[1]
    return None if torch.cuda.is_current_stream_capturing() else tiles_of(packed, absmax, codebook, x.shape[1])


def stack_tiles(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int) -> Tiles | None:
    """The tiles of a stack ``[E, a, nblk * K]`` for :func:`grouped_linear`; None as :func:`tiles_for`."""
    if not packed.is_cuda or packed.shape[1] % core.tile_rows or not can_tile(packed, codebook):
        return None
    if packed not in _known and torch.cuda.is_current_stream_capturing():
        return None
    return tiles_of(packed, absmax, codebook, cols)


def expert_tiles(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, index: int) -> Tiles | None:
    """The tiles of one expert of a stack, tiled whole and once; None as :func:`tiles_for`."""
    tiles, (count, rows) = stack_tiles(packed, absmax, codebook, cols), packed.shape[:2]
    begin = index % count * rows
    return tiles.rows_of(begin, begin + rows) if tiles is not None else None
