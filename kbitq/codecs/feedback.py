"""Error feedback: each block is quantized knowing the errors of those before it, for the sake of a layer's outputs.

With H the sum over a calibration text of x x^T of a layer's inputs, what a quantized weight costs its layer is
``tr(E H E^T)``, E = W - W'. The columns go from left to right (GPTQ: Frantar et al. 2022; in blocks, LDLQ: Chee et al.
2023). With U the upper Cholesky factor of the inverse of H (damped), the error of column j, divided by ``U_jj``, is
taken from the columns to its right, each times its ``U_j,:``. Rows do not depend on each other.

* ``planes``: the scales of a block are chosen when it is entered, on what is left of its weights by then, with error
  weights ``1 / U_jj^2``; then its 32 columns are rounded one by one.
* ``trellis``: a block is one decision, with the same error weights; its errors are then solved through its triangle of
  U. Where four blocks share a scale, it is chosen when the first of them is entered.
* integers of other tools' formats: the scale of a group (of a whole row, where each row has one) is chosen when it is
  entered, with the same error weights; then its columns are rounded one by one.

A weight may be stored the other way round, ``[in, out]``: then it is a row that belongs to an input. The rows go from
top to bottom, each is quantized as without feedback (all of its weights count the same), and the error of row i over
``U_ii`` is taken from the rows below it, each times its ``U_i,:``. Here the columns do not depend on each other.

The products run through a GEMM: bytes are equal for one kind of device and one number of threads, not across them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kbitq.codecs.base import Codec, Request
from kbitq.codecs.integer_groups import IntegerGroups
from kbitq.codecs.planes import ABSMAX, CODEBOOK, PACKED, PLANES, Planes
from kbitq.codecs.scales import decode_absmax_e4m4
from kbitq.codecs.trellis import TRELLIS, Trellis
from kbitq.errors import CalibrationError
from kbitq.format import BLOCK, DEFAULT_CODEC
from kbitq.ops.dtypes import TORCH_DTYPES

DAMPING = 0.01  # of the mean of H's diagonal, added to it
MOST_DAMPING = 1.0
TILE_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Elements that a walk over the columns takes at once, by type of device: each tile takes memory, but few are quicker,
above all on a GPU, where a step takes the same time whatever the rows."""


@dataclass(frozen=True)
class Factor:
    """What feedback needs of an H.

    Attributes:
        upper: U, float32 ``[n, n]``, upper triangular; n is the number of inputs.
        dead: bool ``[n]``, inputs that were always 0: their weights become 0.
        damping: that it took, as a share of the mean of H's diagonal.
        transposed: whether the weights are stored ``[in, out]``, so that n are their rows.
        block: columns of a block on the diagonal, outside of which U is 0; None: it is one block.
    """

    upper: Tensor
    dead: Tensor
    damping: float
    transposed: bool = False
    block: int | None = None

    def reach(self, column: int) -> int:
        """The column up to which, not included, an error of this one is taken from others."""
        inputs = len(self.dead)
        return inputs if self.block is None else min(inputs, (column // self.block + 1) * self.block)

    def to(self, device: torch.device | str) -> Factor:
        """The same on a device."""
        return replace(self, upper=self.upper.to(device), dead=self.dead.to(device))


def factorise(h: Tensor, damping: float = DAMPING, *, transposed: bool = False, block: int | None = None) -> Factor:
    """The factor of an H, computed in float64 on its device.

    Args:
        h: ``[n, n]``, symmetric, with no negative eigenvalue but for rounding; what is above its diagonal is not read.
        damping: the first one tried; where H is not positive definite with it, ten times as much, up to 1.
        transposed: whether the weights that it is for are stored ``[in, out]``.
        block: where only blocks of so many columns on the diagonal are not 0; each is then factorised alone.

    Raises:
        CalibrationError: H is not finite, has a negative diagonal, or is not positive definite with any damping.
    """
    diagonal = h.diagonal().double()
    if not bool(torch.isfinite(h).all()) or bool((diagonal < 0).any()):
        raise CalibrationError("the statistics are not finite, or have a negative diagonal")
    dead = diagonal == 0
    mean, step = float(diagonal.mean()) or 1.0, block or len(h)
    parts = [slice(first, min(first + step, len(h))) for first in range(0, len(h), step)]
    while damping <= MOST_DAMPING:
        upper = torch.zeros_like(h) if len(parts) > 1 else None
        for part in parts:
            made = _upper_factor(h[part, part], damping * mean, dead[part])
            if made is None:
                break
            if upper is None:
                return Factor(made, dead, damping, transposed)
            upper[part, part] = made
        else:
            assert upper is not None
            return Factor(upper, dead, damping, transposed, block)
        damping *= 10
    raise CalibrationError("the statistics are not positive definite, whatever is added to their diagonal")


def _upper_factor(h: Tensor, added: float, dead: Tensor) -> Tensor | None:
    """U with U^T U = (H + added)^-1, float32; None where that is not positive definite.

    With J, which turns the order of rows or columns round, J H J = V^T V gives H = R R^T for the upper triangle R =
    J V^T J, and U is the inverse of R: one factor and one triangle to invert, instead of two factors and an inverse.
    """
    turned = h.double().flip(0, 1)  # its upper triangle is the lower one of H
    turned.diagonal().add_(added)
    turned.diagonal()[dead.flip(0)] = 1.0
    v, failed = torch.linalg.cholesky_ex(turned, upper=True)
    if int(failed):
        return None
    turned.zero_().diagonal().fill_(1.0)
    inverse = torch.linalg.solve_triangular(v, turned, upper=True)
    del v, turned  # each is as large as H twice
    return inverse.float().flip(0, 1).T.contiguous()


def encode(codec: Codec, w: Tensor, request: Request, factor: Factor) -> dict[str, Tensor]:
    """The parts of a matrix, quantized with feedback.

    Args:
        codec: ``planes``, ``trellis`` or one of integers.
        w: float32, bfloat16 or float16 ``[rows, cols]``; whole rows, or of a transposed weight whole columns.
        request: on the device of ``w``; its importance is not used.
        factor: of the matrix's H, on the same device.

    Returns:
        The parts as ``codec.encode`` gives them.
    """
    if isinstance(codec, IntegerGroups):
        assert not factor.transposed  # refused in the plan
        return _encode_integers(codec, w.to(torch.float32, copy=True), request, factor)
    assert isinstance(codec, Planes)  # the plan has no H for others
    if factor.transposed and w.is_cuda:
        # One row after the other, a few small launches each: that is work for the CPU.
        made = encode(codec, w.cpu(), request.to(torch.device("cpu")), factor.to("cpu"))
        return {name: part.to(w.device) for name, part in made.items()}
    shapes = codec.parts("", tuple(w.shape), request.k)
    parts = {part.name: torch.empty(part.shape, dtype=TORCH_DTYPES[part.dtype], device=w.device) for part in shapes}
    left = w.to(torch.float32, copy=True)
    (_down if factor.transposed else _across)(codec, left, request, factor, parts)
    return parts


def _across(codec: Planes, left: Tensor, request: Request, factor: Factor, parts: dict[str, Tensor]) -> None:
    """From left to right; ``left`` ``[rows, cols]`` is what is left of the weights, ``parts`` are written.

    A GPU is done with a step before the next is asked for: what does not depend on the errors is made ahead.
    """
    cols = left.shape[1]
    left[:, factor.dead] = 0.0
    of_bytes = decode_absmax_e4m4(torch.arange(256, dtype=torch.uint8, device=left.device))
    step = partial(_columns, of_bytes=of_bytes) if codec.name == DEFAULT_CODEC else _block
    asked = request.to(left.device)
    weights = _error_weights(factor, codec.cut)
    for number, first in enumerate(range(0, cols, codec.cut)):
        here = slice(first, min(first + codec.cut, cols))
        one = replace(asked, importance=weights[number : number + 1, : here.stop - first].contiguous())
        made, errors = step(codec, left[:, here].contiguous(), one, factor.upper[here, here])
        words = -(-(here.stop - first) // BLOCK) * request.k
        parts[PACKED][:, first // BLOCK * request.k :][:, :words] = made[PACKED]
        parts[ABSMAX][:, first // codec.cut] = made[ABSMAX][:, 0]
        parts[CODEBOOK] = made[CODEBOOK]
        if here.stop < (end := factor.reach(here.stop - 1)):
            left[:, here.stop : end].addmm_(errors, factor.upper[here, here.stop : end], alpha=-1)


def _down(codec: Planes, left: Tensor, request: Request, factor: Factor, parts: dict[str, Tensor]) -> None:
    """From top to bottom, for a transposed weight ``[in, out]``."""
    left[factor.dead] = 0.0
    asked, upper = replace(request, importance=None).to(left.device), factor.upper

    def walk(first: int, stop: int) -> None:
        """Rows become their errors: the upper half, then the lower one, so that most products are between few rows."""
        if stop - first == 1:
            row = left[first:stop]
            made = {name: part if name == CODEBOOK else part[first:stop] for name, part in parts.items()}
            codec.encode_into(row, asked, made)
            row.sub_(codec.decode(made, row.shape[1], torch.float32)).div_(upper[first, first])
            return
        middle = (first + stop) // 2
        walk(first, middle)
        left[middle:stop].addmm_(upper[first:middle, middle:stop].T, left[first:middle], alpha=-1)
        walk(middle, stop)

    walk(0, len(left))


def _encode_integers(codec: IntegerGroups, left: Tensor, request: Request, factor: Factor) -> dict[str, Tensor]:
    """The parts of integers; ``left`` is what is left of the weights, and is overwritten."""
    rows, cols = left.shape
    left[:, factor.dead] = 0.0
    codes, scales, width = torch.empty_like(left), [], codec.group or cols
    weights = _error_weights(factor, width)
    for first in range(0, cols, width):
        group = slice(first, first + width)
        asked = replace(request, importance=weights[first // width : first // width + 1, : left[:, group].shape[1]])
        scales.append(codec.scales(left[:, group], asked))
        scale = scales[-1].float().view(rows).contiguous()
        for start in range(first, first + width, BLOCK):
            here = slice(start, min(start + BLOCK, first + width))
            codes[:, here], errors = _integers(left[:, here], scale, request.k, factor.upper[here, here])
            if here.stop < (end := factor.reach(here.stop - 1)):
                left[:, here.stop : end].addmm_(errors, factor.upper[here, here.stop : end], alpha=-1)
    return codec.assemble(codes, torch.cat(scales, 1), request)


def _integers(w: Tensor, scale: Tensor, k: int, triangle: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of integers whose scale is known, rounded one by one: codes, and errors in terms of the triangle."""
    from kbitq import ops

    errors, half = w.contiguous(), 1 << k - 1  # maybe w itself, which nobody reads again
    words = torch.empty((len(w), k), dtype=torch.int32)
    levels = torch.arange(-half, half, dtype=torch.float32)
    ops.feedback_into(errors, triangle.contiguous(), scale, levels, words)
    return PLANES.indices_of(words, w.shape[1]) - half, errors


def _error_weights(factor: Factor, width: int) -> Tensor:
    """``1 / U_jj^2`` of each ``width`` columns in a row, the largest of them 1; zeros behind the last column."""
    weights = factor.upper.diagonal().square().reciprocal()
    rows = torch.nn.functional.pad(weights, (0, -len(weights) % width)).view(-1, width)
    return rows / rows.amax(1, keepdim=True)


def _block(codec: Planes, w: Tensor, request: Request, triangle: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of a trellis that share a scale: it is chosen for all of them, then each block is one decision."""
    made = codec.encode(w, request)
    if w.shape[1] <= BLOCK:
        return made, _solved(w - codec.decode(made, w.shape[1], torch.float32), triangle)
    assert isinstance(codec, Trellis) and request.importance is not None
    left, errors = w.clone(), torch.empty_like(w)
    for first in range(0, w.shape[1], BLOCK):
        here = slice(first, min(first + BLOCK, w.shape[1]))
        asked = replace(request, importance=request.importance[:, here].contiguous())
        block = codec.encode_block(left[:, here].contiguous(), asked, made[ABSMAX])
        values = TRELLIS.decode(block, here.stop - first, torch.float32)
        errors[:, here] = _solved(left[:, here] - values, triangle[here, here])
        left[:, here.stop :].addmm_(errors[:, here], triangle[here, here.stop :], alpha=-1)
        made[PACKED][:, first // BLOCK * request.k :][:, : request.k] = block[PACKED]
    return made, errors


def _solved(errors: Tensor, triangle: Tensor) -> Tensor:
    """Errors ``[rows, n]`` in terms of the triangle's rows."""
    return torch.linalg.solve_triangular(triangle, errors, upper=True, left=False)


def _columns(
    codec: Planes, w: Tensor, request: Request, triangle: Tensor, of_bytes: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """A block whose scales are chosen at once, and whose columns are rounded one by one; ``w`` becomes the errors.

    of_bytes: the value of each scale byte.
    """
    from kbitq import ops

    made = codec.encode(w, request)
    scales = of_bytes[made[ABSMAX][:, 0].long()]
    ops.feedback_into(w, triangle.contiguous(), scales, made[CODEBOOK], made[PACKED])
    return made, w


def proxy_loss(error: Tensor, h: Tensor, *, transposed: bool = False) -> float:
    """``tr(E H E^T)`` in float64, of errors ``[rows, cols]``; ``tr(E^T H E)`` of a transposed weight."""
    e = error.double().T if transposed else error.double()
    return float((e @ h.double() * e).sum())
