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
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kbitq import format as fmt
from kbitq._core import core
from kbitq.ops import codec, panels
from kbitq.ops.gradients import Products, add_gradients, back_with_gradient, product_with_gradient
from kbitq.ops.tiles import TILE_COLS, Tiles, has_tiles, tile, untiled
from kbitq.ops.workspace import to_keep, workspace

FUSED_ROWS, FUSED_ROWS_WIDE, FUSED_ROWS_WIDE_TRELLIS = 128, 768, 512
"""Rows of x up to which the fused kernels beat decoding and the library's matmul: without the kernel for wide x, which
takes sm_90a, and for a weight of less than :data:`SMALL` elements; with it; with it for a codec other than ``planes``,
whose weights cost more to decode in the kernel (NVIDIA H200, docs/benchmarks.md)."""

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


def _weight(tiles: Tensor, codebook: Tensor, rows: int, cols: int, coding: str) -> panels.Weight:
    def decode(begin: int, end: int, levels: Tensor, weights: Tensor) -> None:
        records = tiles[begin // core.tile_rows : -(-end // core.tile_rows)]
        decode_into(records, levels, weights, coding)

    return panels.Weight(rows, cols, codebook, decode, core.tile_rows)


def decode_into(tiles: Tensor, codebook: Tensor, out: Tensor, coding: str) -> None:
    """Decode a matrix with one codebook into ``out [rows, cols]``, contiguous, of float32, bfloat16 or float16."""
    if out.is_cuda:
        core.decode_tiles(tiles, codebook, out, codec.stream_of(out), coding)
    else:
        rows, cols = out.shape
        codec.dequantize_into(*untiled(tiles, rows, cols, coding), codebook, out, coding)


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


def _linear_tiles_cpu(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    """Tiles are a GPU's order: a CPU puts the planes back each time."""
    _check_product(x, tiles, rows)
    return torch.ops.kbitq.linear(x, *untiled(tiles, rows, x.shape[-1], coding), codebook, bias, coding)


def _fake_linear_tiles(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, rows: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_product(x, tiles, rows)
    return x.new_empty((*x.shape[:-1], rows))


def _check_grad(grad: Tensor, tiles: Tensor, cols: int) -> None:
    codec.check_rows("grad", grad)
    _check_product(grad, tiles, grad.shape[-1])
    codec.check_size("cols", cols, tiles.shape[1] * TILE_COLS)


def _linear_tiles_grad(
    grad: Tensor, tiles: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_grad(grad, tiles, cols)
    flat = grad.reshape(-1, grad.shape[-1])
    out = grad.new_empty((flat.shape[0], cols))
    panels.multiply_transposed(
        flat, _weight(tiles, codebook, flat.shape[1], cols, coding), out, grad.dtype, _PANEL_BYTES
    )
    return out.view(*grad.shape[:-1], cols)


def _fake_linear_tiles_grad(
    grad: Tensor, tiles: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_grad(grad, tiles, cols)
    return grad.new_empty((*grad.shape[:-1], cols))


codec.register(
    'linear_tiles(Tensor x, Tensor tiles, Tensor codebook, Tensor? bias, SymInt rows, str codec="planes") -> Tensor',
    _linear_tiles,
    _fake_linear_tiles,
    ("CUDA",),
)
codec.library.impl("linear_tiles", _linear_tiles_cpu, "CPU")
codec.register(
    'linear_tiles_grad(Tensor grad, Tensor tiles, Tensor codebook, SymInt cols, str codec="planes") -> Tensor',
    _linear_tiles_grad,
    _fake_linear_tiles_grad,
)

_PAIR = Products("linear_tiles", "linear_tiles_grad", takes_rows=True)


def _linear_tiles_autograd(
    keyset: Any,
    x: Tensor,
    tiles: Tensor,
    codebook: Tensor,
    bias: Tensor | None,
    rows: int,
    coding: str = fmt.DEFAULT_CODEC,
) -> Tensor:
    return product_with_gradient(keyset, _PAIR, x, (tiles, codebook), bias, rows, coding)


def _linear_tiles_grad_autograd(
    keyset: Any, grad: Tensor, tiles: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    return back_with_gradient(keyset, _PAIR, grad, (tiles, codebook), cols, coding)


add_gradients(_PAIR, _linear_tiles_autograd, _linear_tiles_grad_autograd)


@cache
def _staging_bytes(m: int, rows: int, cols: int, device: int) -> int:
    return core.tiled_staging_bytes(m, rows, cols, device)


@cache
def _has_wide(device: int) -> bool:
    return core.tiled_staging_bytes(FUSED_ROWS_WIDE, core.tile_rows, fmt.BLOCK, device) > 0


def fused_rows(device: int, rows: int, cols: int, coding: str = fmt.DEFAULT_CODEC) -> int:
    """Rows of x up to which the fused kernels are used on a GPU for a weight ``[rows, cols]``, coded so."""
    if rows * cols < SMALL or not _has_wide(device):
        return min(FUSED_ROWS, _rows_taken(device))
    return FUSED_ROWS_WIDE if coding == fmt.DEFAULT_CODEC else FUSED_ROWS_WIDE_TRELLIS


def multiply_into(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, coding: str = fmt.DEFAULT_CODEC
) -> None:
    """``out [M, rows] = x [M, cols] W^T (+ bias)``; x and out contiguous. Float32 is multiplied by decoded weights."""
    device = x.get_device()
    if x.dtype in _DTYPES and x.shape[0] <= fused_rows(device, out.shape[1], x.shape[1], coding):
        size = _staging_bytes(x.shape[0], out.shape[1], x.shape[1], device)
        staging = x.new_empty(size, dtype=torch.uint8) if size else None
        space, stream = workspace(x.device), codec.stream_of(x)
        core.linear_tiles(x, tiles, codebook, bias, out, *space, None, staging, stream, coding)
    else:
        weight = _weight(tiles, codebook, out.shape[1], x.shape[1], coding)
        panels.multiply(x, weight, bias, out, x.dtype, _PANEL_BYTES)


def linear(x: Tensor, weight: Tiles, bias: Tensor | None = None) -> Tensor:
    """y = x W^T (+ bias).

    Args:
        x: bfloat16, float16 or float32 ``[..., cols]``; gradients flow to it and to the bias.
        weight: the matrix, on the device of x.
        bias: ``[rows]`` in the dtype of x.

    Returns:
        ``[..., rows]`` in the dtype of x, from float32 sums. Levels (to 8 rows) or weights (above) are rounded to that
        dtype first.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    return torch.ops.kbitq.linear_tiles(x, weight.data, weight.codebook, bias, weight.rows, weight.codec)


def _lookup_tiles(
    rows: Tensor, tiles: Tensor, codebook: Tensor, cols: int, dtype: torch.dtype, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_lookup(rows, tiles, codebook, cols)
    out = tiles.new_empty((rows.shape[0], cols), dtype=dtype)
    most = max(_PANEL_BYTES // max(core.tile_rows * cols * dtype.itemsize, 1), 1)
    for some, into in zip(rows.split(most), out.split(most), strict=True):
        decoded = tiles.new_empty((some.shape[0] * core.tile_rows, cols), dtype=dtype)
        decode_into(tiles[some // core.tile_rows], codebook[0], decoded, coding)
        places = torch.arange(some.shape[0], device=some.device) * core.tile_rows + some % core.tile_rows
        torch.index_select(decoded, 0, places, out=into)
    return out


def _check_lookup(rows: Tensor, tiles: Tensor, codebook: Tensor, cols: int) -> None:
    codec.check_dims("rows", rows, 1)
    codec.check_dims("tiles", tiles, 3)
    codec.check_dims("codebook", codebook, 2)
    codec.check_size("cols", cols, tiles.shape[1] * TILE_COLS)


def _fake_lookup_tiles(
    rows: Tensor, tiles: Tensor, codebook: Tensor, cols: int, dtype: torch.dtype, coding: str = fmt.DEFAULT_CODEC
) -> Tensor:
    _check_lookup(rows, tiles, codebook, cols)
    return tiles.new_empty((rows.shape[0], cols), dtype=dtype)


codec.register(
    "lookup_tiles(Tensor rows, Tensor tiles, Tensor codebook, SymInt cols, ScalarType dtype, "
    'str codec="planes") -> Tensor',
    _lookup_tiles,
    _fake_lookup_tiles,
)


def lookup(rows: Tensor, weight: Tiles, dtype: torch.dtype) -> Tensor:
    """Some rows of a matrix, decoded: each with the others of its tile, which are dropped.

    Args:
        rows: int64 ``[n]``, on the matrix' device, each at least 0 and below its rows: not checked, as by ``index``.
        weight: the matrix, with one codebook.
        dtype: float32, bfloat16 or float16.

    Returns:
        ``[n, cols]``, rounded once.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    return torch.ops.kbitq.lookup_tiles(rows, weight.data, weight.codebook, weight.cols, dtype, weight.codec)


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


def tiles_made(packed: Tensor, absmax: Tensor, codebook: Tensor) -> Tiles | None:
    """What :func:`tiles_of` made of these and remembers; None if there is none."""
    known = _known.get(packed)
    return known[1] if known is not None and known[0] == _identity(packed, absmax, codebook) else None


def tiles_for(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, coding: str = fmt.DEFAULT_CODEC
) -> Tiles | None:
    """The tiles to multiply ``x [M, cols]`` by, or None where the planes serve better: many rows, float32, a GPU or a K
    without kernels, or while a graph is captured and the weight has not been used before it."""
    if x.dtype not in _DTYPES or x.shape[0] > fused_rows(x.get_device(), packed.shape[0], x.shape[1], coding):
        return None
    return tiles_where_able(packed, absmax, codebook, x.shape[1], coding)


def tiles_where_able(
    packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC
) -> Tiles | None:
    """:func:`tiles_of` a matrix, or of a stack for :func:`grouped_linear`; None on a GPU or for a K without kernels,
    for matrices of a stack that fill no whole tiles, and while a graph is captured that the weight is new to."""
    whole = packed.dim() == 2 or packed.shape[1] % core.tile_rows == 0
    if not (packed.is_cuda and whole and can_tile(packed, codebook, coding)):
        return None
    if (known := tiles_made(packed, absmax, codebook)) is not None:
        return known
    return None if torch.cuda.is_current_stream_capturing() else tiles_of(packed, absmax, codebook, cols, coding)


def dequantize(weight: Tiles, dtype: torch.dtype) -> Tensor:
    """The values ``[rows, cols]`` of a matrix, as of its planes bit for bit.

    Args:
        weight: the matrix.
        dtype: float32, bfloat16 or float16.
    """
    out = weight.data.new_empty((weight.rows, weight.cols), dtype=dtype)
    groups = zip(out.chunk(weight.codebook.shape[0]), weight.codebook, strict=True)
    for i, (into, levels) in enumerate(groups):
        decode_into(weight.rows_of(i * len(into), (i + 1) * len(into)).data, levels, into, weight.codec)
    return out
