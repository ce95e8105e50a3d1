"""Summing x xᵀ of what goes into weights, while a model runs.

Nearly every product of an input with a weight goes through ``torch.nn.functional.linear``, in torch's own layers, in
those that a model brings, and in the loop over fused experts. Weights that are stored ``[in, out]`` go through torch's
products of matrices (``kbitq.calibration.products``). So these functions are watched, and a weight is known by its
address: no architecture is, and an expert is where its matrix begins in the stack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kbitq.calibration.products import PRODUCTS, operands
from kbitq.calibration.triangle import blocks
from kbitq.calibration.weights import Weight
from kbitq.calibration.writer import Gathered
from kbitq.errors import CalibrationError

_ROWS = 2048  # tokens that are multiplied at once; the sums are in this order, whatever the memory
_PANEL = 1024  # columns whose products are summed at once, with those of the columns to their left: H is symmetric
_REMEMBERED = 4  # inputs that a weight may share with one that was used before


class NotSharedError(Exception):
    """Two weights that were given one input at first were given different ones later."""


class Sums:
    """H of one input, in the making: blocks on the diagonal, float32, where the inputs are; their lower triangles."""

    def __init__(self, columns: int, block: int | None) -> None:
        self._parts = blocks(columns, block)
        self.tokens = 0
        self.matrices: list[Tensor] | None = None

    def add(self, x: Tensor) -> None:
        """Add x xᵀ of tokens ``[n, columns]``."""
        if self.matrices is None:
            self.matrices = [torch.zeros(len(part), len(part), device=x.device) for part in self._parts]
        for rows in x.split(_ROWS):
            for part, sums in zip(self._parts, self.matrices, strict=True):
                _add_gram(sums, rows[:, part.start : part.stop])
        self.tokens += len(x)


def _add_gram(sums: Tensor, x: Tensor) -> None:
    """Add the lower triangle of ``x.T @ x``, and a little of what is above it: products and sums in float32."""
    # Products of 16-bit values are exact in the float32 that tensor cores add them in.
    narrow = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    x = x if narrow else x.float()
    for first in range(0, x.shape[1], _PANEL):
        rows, left = slice(first, first + _PANEL), slice(0, first + _PANEL)
        part = sums[rows, left]
        if narrow:
            torch.addmm(part, x[:, rows].T, x[:, left], out_dtype=torch.float32, out=part)
        else:
            part.addmm_(x[:, rows].T, x[:, left])


class _Slot:
    """A matrix, or one expert of a stack: what it shares its input with, and how many tokens it has had.

    ``transposed``: whether it is stored ``[in, out]``; None before anything was multiplied by it.
    """

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.tokens = 0
        self.transposed: bool | None = None


class Collector(TorchFunctionMode):
    """Collects H of weights from every product with them inside its ``with``.

    Args:
        weights: what to look for.
        parameters: those weights themselves, by name; they stay where they are while this is used.
        block: largest columns of an H that is kept whole; of a wider one, blocks of so many columns.
        share: give weights that were given the same tensor one H.
    """

    def __init__(
        self, weights: Sequence[Weight], parameters: Mapping[str, Tensor], block: int | None, *, share: bool = True
    ) -> None:
        super().__init__()
        self._weights, self._block, self._share = weights, block, share
        self._slots = {(w.name, e): _Slot() for w in weights for e in range(w.experts or 1)}
        placed = sorted(((parameters[w.name].data_ptr(), w) for w in weights), key=lambda pair: pair[0])
        self._addresses, self._placed = [at for at, _ in placed], [w for _, w in placed]
        self._recent: list[tuple[Tensor, int, Sums]] = []  # the last input of some sums, and its version then

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            x, weight = operands(func, args, kwargs or {})
            if isinstance(x, Tensor) and isinstance(weight, Tensor):
                self._multiplied(x, weight)
        return func(*args, **(kwargs or {}))

    def gathered(self) -> tuple[list[Gathered], list[str]]:
        """What was collected, and the names in the files of weights that no input came to.

        Raises:
            NotSharedError: weights that share an H were not given the same tokens.
            CalibrationError: an input had values that are not finite.
        """
        found: list[Gathered] = []
        by_sums: dict[tuple[int, bool], dict[str, int | None]] = {}
        unseen: list[str] = []
        for weight in self._weights:
            slots = [self._slots[weight.name, e] for e in range(weight.experts or 1)]
            if not any(slot.tokens for slot in slots):
                unseen += weight.sources
                continue
            transposed = any(slot.transposed for slot in slots)
            columns = weight.shape[-2] if transposed else weight.columns
            sums = [slot.sums or Sums(columns, self._block) for slot in slots]
            if any(slot.tokens != made.tokens for slot, made in zip(slots, sums, strict=True)):
                raise NotSharedError
            key = id(sums[0]), transposed
            if key in by_sums and weight.experts is None:
                by_sums[key].update(weight.sources)
                continue
            names = by_sums[key] = dict(weight.sources)
            tokens, matrices = [made.tokens for made in sums], [made.matrices for made in sums]
            found.append(Gathered(names, columns, self._kept(columns), tokens, matrices, transposed))
        for each in found:
            _check_finite(each)
        return found, unseen

    def _kept(self, columns: int) -> int | None:
        return self._block if self._block is not None and self._block < columns else None

    def _multiplied(self, x: Tensor, weight: Tensor) -> None:
        """An input ``[..., in]`` is multiplied by ``[out, in]``, or ``[E, n, in]`` by a stack ``[E, out, in]``."""
        if weight.dim() == 2:
            self._saw(x, weight)
        elif weight.dim() == x.dim() == 3 and len(x) == len(weight) and self._find(weight[0]) is not None:
            # Every expert is given all tokens, with zeros for those that others were chosen for.
            for tokens, matrix in zip(x, weight, strict=True):
                self._saw(tokens[tokens.any(-1)], matrix)

    def _saw(self, x: Tensor, weight: Tensor) -> None:
        found = self._find(weight)
        if found is None or not x.numel():
            return
        known, transposed = found[:2], found[2]
        slot, may_share = self._slots[known[0].name, known[1]], self._share and known[0].experts is None
        if slot.transposed is None:
            slot.transposed = transposed
        if slot.transposed is not transposed:
            return  # a table that is used the other way round too; its first use counts
        tokens = x.numel() // x.shape[-1]
        added = self._added_to(x) if may_share else []
        if slot.sums is None:
            # Shared from the first input on, or not at all.
            slot.sums = next((sums for sums in added if sums.tokens == tokens), None)
        if slot.sums is None:
            slot.sums = Sums(x.shape[-1], self._kept(x.shape[-1]))
        if not any(sums is slot.sums for sums in added):
            if slot.tokens < slot.sums.tokens:
                raise NotSharedError
            self._add(slot.sums, x)
        slot.tokens += tokens

    def _add(self, sums: Sums, x: Tensor) -> None:
        sums.add(x.detach().reshape(-1, x.shape[-1]))
        others = [known for known in self._recent if known[2] is not sums]
        self._recent = [*others[1 - _REMEMBERED :], (x, x._version, sums)]

    def _added_to(self, x: Tensor) -> list[Sums]:
        """The sums whose last input was this very one. It is held, so its address is still its own."""
        return [sums for other, version, sums in self._recent if version == x._version and _is_same(other, x)]

    def _find(self, weight: Tensor) -> tuple[Weight, int, bool] | None:
        """The weight and its expert that a matrix ``[out, in]`` is by its address, and whether it is stored turned."""
        at = bisect_right(self._addresses, weight.data_ptr()) - 1
        if at < 0:
            return None
        known = self._placed[at]
        expert, within = divmod(weight.data_ptr() - self._addresses[at], weight.numel() * weight.element_size())
        if within or expert >= (known.experts or 1):
            return None
        for transposed, stored in ((False, weight), (True, weight.mT)):
            if stored.is_contiguous() and tuple(stored.shape) == known.shape[-2:]:
                return known, expert, transposed
        return None


@contextmanager
def experts_one_by_one(model: Any, weights: Sequence[Weight]) -> Iterator[None]:
    """Has fused experts multiplied one by one, as they are collected, where a model offers other ways as well."""
    if all(weight.experts is None for weight in weights) or not hasattr(model, "set_experts_implementation"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same values of the same memory, perhaps in other leading dimensions."""
    same = (a.data_ptr(), a.dtype, a.numel(), a.shape[-1]) == (b.data_ptr(), b.dtype, b.numel(), b.shape[-1])
    return same and (a is b or (a.is_contiguous() and b.is_contiguous()))


def _check_finite(found: Gathered) -> None:
    for sums in found.sums:
        for matrix in sums or ():
            if not bool(torch.isfinite(matrix.diagonal()).all()):
                raise CalibrationError(
                    f"what goes into {next(iter(found.tensors))} is not finite, or its squares are not",
                    hint="run it with dtype float32",
                    remedy="dtype32",
                )
