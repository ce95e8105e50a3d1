"""A quantized matrix as its file has it, put together from parts that arrive one by one, and cut for a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kbitq import ops
from kbitq.checkpoint.plan.tensor_parallel import refusal
from kbitq.codecs.base import Coding, constant_dims, get_codec, part_kinds
from kbitq.errors import BuildError, FormatError
from kbitq.integrations.serving import dummy

_MOST_GROUPS = 64  # of rows with constants of their own, in one matrix
_GROUP_ROWS = 16  # a group is a multiple of so many rows, as the kernels of a GPU want it


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix ``[rows, cols]``.

    Attributes:
        codec: how it is coded.
        k: bits of an index.
        rows: of it.
        cols: of it.
        parts: by name, as the codec says; a constant with one dimension more has one for each of equal groups of rows.
    """

    codec: str
    k: int
    rows: int
    cols: int
    parts: Mapping[str, Tensor]

    def columns(self, begin: int, cols: int) -> Matrix:
        """``cols`` columns from ``begin`` on, which is a multiple of the codec's cut."""
        codec, kinds = get_codec(self.codec), part_kinds(self.codec)
        wanted = {part.name: part.shape for part in codec.parts("", (self.rows, cols), self.k)}
        before = {part.name: part.shape for part in codec.parts("", (self.rows, max(begin, codec.cut)), self.k)}
        cut = {
            name: held if kinds[name] else held.narrow(1, before[name][1] if begin else 0, wanted[name][1]).clone()
            for name, held in self.parts.items()
        }
        return replace(self, cols=cols, parts=cut)

    def padded(self, rows: int) -> Matrix:
        """With rows of zero bytes added, whose values nobody looks at."""
        if rows == self.rows:
            return self
        kinds = part_kinds(self.codec)
        more = {
            name: held if kinds[name] else torch.cat([held, held.new_zeros(rows - self.rows, *held.shape[1:])])
            for name, held in self.parts.items()
        }
        return replace(self, rows=rows, parts=more)


def decoded(codec: str, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype) -> Tensor:
    """The values ``[rows, cols]`` that parts stand for, group of rows by group of rows."""
    dims, coder = constant_dims(codec), get_codec(codec)
    several = {name for name, dim in dims.items() if parts[name].dim() > dim}
    groups = max((parts[name].shape[0] for name in several), default=1)
    cut: dict[str, Sequence[Tensor] | Tensor] = {}
    for name, held in parts.items():
        whole = name in dims and name not in several
        cut[name] = [held] * groups if whole else held if name in dims else held.chunk(groups)
    own = [{name: pieces[i] for name, pieces in cut.items()} for i in range(groups)]
    return torch.cat([coder.decode(group, cols, dtype) for group in own])


def waiting(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a parameter is before a tensor arrives for it, on the device where it will lie.

    Raises:
        BuildError: that is a GPU, and this kbitq computes on none.
    """
    made = torch.empty(tuple(shape), dtype=dtype)
    check_device(made.device)
    return made


def check_device(device: torch.device) -> None:
    """Raise BuildError for a GPU where this kbitq computes on none: before loading, and not at the first token."""
    reason = ops.cuda_missing() if device.type == "cuda" else None
    if reason is not None:
        raise BuildError(
            f"the server computes on a GPU, which this kbitq cannot: {reason}", hint="kbitq env shows what was found"
        )


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def matrix_of(where: str, parts: Mapping[str, Tensor], rows: int, cols: int, codecs: Sequence[str]) -> Matrix:
    """The matrix ``[rows, cols]`` that parts stand for: their shapes tell which of the codecs it is, and K.

    Raises:
        FormatError: they are of none of the codecs; the message names the layer, ``where``.
    """
    shapes = {name: tuple(held.shape) for name, held in parts.items()}
    for name in codecs:
        codec = get_codec(name)
        if not part_kinds(name).keys() <= shapes.keys():
            continue
        own = {part: shapes[part] for part in part_kinds(name)}
        try:
            k = codec.k_of(where, own)
        except FormatError:
            continue
        if all(own[part.name] == part.shape for part in codec.parts("", (rows, cols), k)):
            found = {part: parts[part] for part in own}
            codec.check(found, where)
            return Matrix(name, k, rows, cols, found)
    raise FormatError(f"{where}: parts of shapes {shapes} arrived, which are no matrix [{rows}, {cols}] of {codecs}")


def merged(matrices: Sequence[Matrix | Tensor]) -> list[Matrix | Tensor]:
    """Neighbours of one codec and K put one below the other, so that one operator multiplies by them."""
    done: list[Matrix | Tensor] = []
    run: list[Matrix] = []
    for matrix in [*matrices, None]:
        if isinstance(matrix, Matrix) and _fit(run, matrix):
            run.append(matrix)
            continue
        if run:
            done.append(_stacked(run))
        run = [matrix] if isinstance(matrix, Matrix) else []
        if isinstance(matrix, Tensor):
            done.append(matrix)
    return done


def _fit(run: Sequence[Matrix], matrix: Matrix) -> bool:
    if not run or (run[0].codec, run[0].k, run[0].cols) != (matrix.codec, matrix.k, matrix.cols):
        return False
    size = math.gcd(*(m.rows for m in run), matrix.rows)
    return size % _GROUP_ROWS == 0 and sum(m.rows for m in (*run, matrix)) <= size * _MOST_GROUPS


def _stacked(run: Sequence[Matrix]) -> Matrix:
    if len(run) == 1:
        return run[0]
    size, kinds = math.gcd(*(m.rows for m in run)), part_kinds(run[0].codec)
    parts = {}
    for name, constant in kinds.items():
        if constant:
            parts[name] = torch.stack([m.parts[name] for m in run for _ in range(m.rows // size)])
        else:
            parts[name] = torch.cat([m.parts[name] for m in run])
    return replace(run[0], rows=sum(m.rows for m in run), parts=parts)


class Arriving:
    """What has arrived of one matrix, or of this device's rows of it.

    Args:
        where: the layer, for messages.
        rows: of this device.
        cols: of the whole matrix.
        codecs: it is of one of these.
    """

    def __init__(self, where: str, rows: int, cols: int, codecs: Sequence[str]) -> None:
        self.where, self.rows, self.cols, self.codecs = where, rows, cols, codecs
        self.parts: dict[str, Tensor] = {}
        self.dense: Tensor | None = None
        self.share = (0, cols)

    def take(self, part: str | None, tensor: Tensor, device: torch.device) -> None:
        """Keep a copy of a part, or of an ordinary weight (None), of this device's rows; loaders reuse their memory."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
        if part is None:
            self.dense = copy
        else:
            self.parts[part] = copy

    def make_up(self, coding: Coding | None, dtype: torch.dtype, device: torch.device) -> None:
        """Take what means nothing, coded so, or an ordinary weight (None), as if it had arrived."""
        if coding is None:
            self.dense = dummy.dense(self.rows, self.cols, dtype, device)
        else:
            self.parts = dummy.parts_of(coding, self.rows, self.cols, device)

    def cut(self, rank: int, cols: int) -> None:
        """Only columns ``[rank * cols, (rank + 1) * cols)`` are this device's."""
        self.share = (rank * cols, cols)

    def finished(self, dtype: torch.dtype) -> Matrix | Tensor:
        """The matrix, or an ordinary weight in ``dtype``.

        Raises:
            FormatError: parts are missing or do not fit.
            ValueError: the matrix cannot be cut for this device.
        """
        begin, cols = self.share
        if self.dense is not None:
            return self.dense.narrow(1, begin, cols).to(dtype).contiguous()
        if not self.parts:
            raise FormatError(f"{self.where}: the files have no weight of this layer")
        whole = matrix_of(self.where, self.parts, self.rows, self.cols, self.codecs)
        if cols == self.cols:
            return whole
        if sentence := refusal(self.where, (self.rows, self.cols), self.cols // cols, get_codec(whole.codec)):
            raise ValueError(sentence)
        return whole.columns(begin, cols)
