"""The fused linear on the GPU: y = x W^T from weights in tile order (csrc/format/tile_order.h).

The words of a file are repacked to tiles once (kbitq.ops.tiles). How a product is computed depends on the rows of x: up
to 16 by a kernel that streams the weights past them, up to :func:`fused_rows` by ones that stage x in shared memory, in
slices of 64 (256 on Hopper), and beyond that the weights are decoded into a bounded buffer and multiplied by the
library. All of it is deterministic, sums in float32, and may be captured in a graph.

The workspace is one for each device and stream; all graphs of a device share one, so two graphs with fused linears in
them must not be replayed at the same time.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kbitq import format as fmt
from kbitq._core import core
from kbitq.ops import codec, panels
from kbitq.ops.tiles import Tiles, has_tiles, tile
from kbitq.ops.workspace import to_keep, workspace

FUSED_ROWS, FUSED_ROWS_WIDE, FUSED_ROWS_WIDE_SMALL = 128, 1024, 256
"""Rows of x up to which the fused kernels beat decoding and the library's matmul: without the kernel for wide x, which
takes sm_90a; with it; with it for a weight of less than :data:`SMALL` elements (NVIDIA H200, docs/benchmarks.md)."""

SMALL = 5 << 22

_PANEL_BYTES = 1 << 28  # of the decoded weights at a time
_DTYPES = GROUPED_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _rows_taken(device: int) -> int:
    return core.tiled_linear_rows(device)


def takes_groups(device: int) -> bool:
    """Whether :func:`grouped_linear` runs on a GPU: one with 227 KB of shared memory a block (Hopper, B200)."""
    return _rows_taken(device) > core.few_rows


def can_tile(packed: Tensor, codebook: Tensor, coding: str = fmt.DEFAULT_CODEC) -> bool:
    """Whether the fused kernels take this matrix: a K that has tiles, on a GPU of compute capability 8.0 or later that
    this build has code for, and groups of rows, if several, of a multiple of 16 rows."""
    groups, rows = codebook.numel() // codebook.shape[-1], packed.numel() // packed.shape[-1]
    if not packed.is_cuda or _rows_taken(packed.get_device()) == 0:
        return False
    if not has_tiles(codec.bits_of(codebook, codec=coding), coding):
        return False
    return groups == 1 or rows % (groups * core.tile_rows) == 0


# --- multiplying -----------------------------------------------------------------------------------


def _by_panels(x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, coding: str) -> None:
    def decode(begin: int, end: int, levels: Tensor, weights: Tensor) -> None:
        records = tiles[begin // core.tile_rows : -(-end // core.tile_rows)]
        core.decode_tiles(records, levels, weights, codec.stream_of(x), coding)

    weight = panels.Weight(out.shape[1], x.shape[1], codebook, decode, core.tile_rows)
    panels.multiply(x, weight, bias, out, x.dtype, _PANEL_BYTES)


def _check_product(x: Tensor, tiles: Tensor, rows: int) -> None:
    codec.check_rows("x", x)
    codec.check_dims("tiles", tiles, 3)
    codec.check_size("rows", rows, tiles.shape[0] * core.tile_rows)


def _linear_tiles(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_product(x, tiles, rows)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((flat.shape[0], rows))
    multiply_into(flat, tiles, codebook, bias, out, coding)
    return out.view(*x.shape[:-1], rows)


def _fake_linear_tiles(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_product(x, tiles, rows)
    return x.new_empty((*x.shape[:-1], rows))


codec.register(
    'linear_tiles(Tensor x, Tensor tiles, Tensor codebook, Tensor? bias, SymInt rows, str codec="planes") -> Tensor',
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


def multiply_into(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, coding: str = fmt.DEFAULT_CODEC
) -> None:
    """``out [M, rows] = x [M, cols] W^T (+ bias)``; x and out contiguous. Float32 is multiplied by decoded weights."""
    device = x.get_device()
    if x.dtype in _DTYPES and x.shape[0] <= fused_rows(device, out.shape[1], x.shape[1]):
        size = _staging_bytes(x.shape[0], out.shape[1], x.shape[1], device)
        staging = x.new_empty(size, dtype=torch.uint8) if size else None
        space, stream = workspace(x.device), codec.stream_of(x)
        core.linear_tiles(x, tiles, codebook, bias, out, *space, None, staging, stream, coding)
    else:
        _by_panels(x, tiles, codebook, bias, out, coding)


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
    return torch.ops.kbitq.linear_tiles(x, weight.data, weight.codebook, bias, weight.rows, weight.codec)


def _grouped(
    x: Tensor, tiles: Tensor, codebook: Tensor, offsets: Tensor, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_product(x, tiles, rows)
    out = x.new_empty((x.shape[0], rows))
    space, stream = workspace(x.device), codec.stream_of(x)
    core.linear_tiles(x.contiguous(), tiles, codebook, None, out, *space, offsets, None, stream, coding)
    return out


def _fake_grouped(
    x: Tensor, tiles: Tensor, codebook: Tensor, offsets: Tensor, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_product(x, tiles, rows)
    return x.new_empty((x.shape[0], rows))


codec.register(
    "grouped_linear_tiles(Tensor x, Tensor tiles, Tensor codebook, Tensor offsets, SymInt rows, "
    'str codec="planes") -> Tensor',
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
        x, weight.data, weight.codebook, offsets, weight.rows // (offsets.shape[0] - 1), weight.codec
    )


# --- tiles of parameters ---------------------------------------------------------------------------

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _identity(*tensors: Tensor) -> tuple[int, ...]:
    """Changes when a tensor's memory does, or is written in place."""
    return tuple(v for t in tensors for v in (t.data_ptr(), 0 if t.is_inference() else t._version))


def tiles_of(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC) -> Tiles:
    """:func:`tile`, remembered for as long as ``packed`` lives and none of the three is changed."""
    identity = _identity(packed, absmax, codebook)
    known = _known.get(packed)
    if known is None or known[0] != identity:
        known = (identity, to_keep(partial(tile, packed, absmax, codebook, cols, coding), packed.device))
        _known[packed] = known
    return known[1]


def tiles_for(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, coding: str = fmt.DEFAULT_CODEC
) -> Tiles | None:
    """The tiles to multiply ``x [M, cols]`` by, or None where the planes serve better: many rows, float32, a GPU or a K
    without kernels, or while a graph is captured and the weight has not been used before it."""
    if x.dtype not in _DTYPES or not can_tile(packed, codebook, coding):
        return None
    if x.shape[0] > fused_rows(x.get_device(), packed.shape[0], x.shape[1]):
        return None
    known = _known.get(packed)
    if known is not None and known[0] == _identity(packed, absmax, codebook):
        return known[1]
    return None if torch.cuda.is_current_stream_capturing() else tiles_of(packed, absmax, codebook, x.shape[1], coding)


def stack_tiles(
    packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC
) -> Tiles | None:
    """The tiles of a stack ``[E, a, nblk * K]`` for :func:`grouped_linear`; None as :func:`tiles_for`."""
    if not packed.is_cuda or packed.shape[1] % core.tile_rows or not can_tile(packed, codebook, coding):
        return None
    if packed not in _known and torch.cuda.is_current_stream_capturing():
        return None
    return tiles_of(packed, absmax, codebook, cols, coding)


def expert_tiles(
    packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, index: int, coding: str = fmt.DEFAULT_CODEC
) -> Tiles | None:
    """The tiles of one expert of a stack, tiled whole and once; None as :func:`tiles_for`."""
    tiles, (count, rows) = stack_tiles(packed, absmax, codebook, cols, coding), packed.shape[:2]
    begin = index % count * rows
    return tiles.rows_of(begin, begin + rows) if tiles is not None else None
