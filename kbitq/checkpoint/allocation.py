"""``choose``: measures every tensor in every codec and K that may be chosen, and spends a budget on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kbitq.checkpoint.passes.devices import resolve_device
from kbitq.checkpoint.passes.measure import Measured, measure
from kbitq.checkpoint.passes.output_errors import FeedbackMeter
from kbitq.checkpoint.passes.tile_codec import TileCodec
from kbitq.checkpoint.plan.choice import Choice
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.planner import check_worthwhile
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose import knapsack as allocator
from kbitq.choose.knapsack import Allocation, Budget
from kbitq.choose.selection import REGEX_PREFIX, Rule, shrinks
from kbitq.choose.tensor_names import merged_experts, tie_of
from kbitq.codecs.base import Coding, bits_per_weight, coded_nbytes, constant_nbytes, for_dtype, get_codec, output_codec
from kbitq.errors import BudgetError, SelectionError
from kbitq.format import element_count
from kbitq.quantized import sqnr_db

COUNT_POWER = 0.25
"""A tensor's error counts as this power of its number of weights, unless it is ``relative`` (docs/quality.md)."""
_FITTINGS = 8  # attempts to hit a file size: the header's length depends on the choice, by a few bytes
_CURVE_POINTS = 24
_SOME_SHAPE = (1, 4096)  # of whole blocks, to order codings by their bits a weight


def choose(plan: Plan, progress: Callable[[Progress], None] | None = None) -> Plan:
    """Measure the tensors of a plan and give each its K (and codec), so that the least error fits the plan's budget.

    A plan without a budget comes back as it is. The result does not depend on the device or on the memory allowed.

    Raises:
        BudgetError: even the smallest K take more than the budget.
        SelectionError: a pattern of the budget matches nothing, or too little is finite.
        NonFiniteError, CheckpointError, BuildError: as in ``run``.
    """
    budget = plan.options.budget
    if budget is None or plan.choice is not None:
        return plan
    check_budget(plan, budget)
    return spend(plan, budget, measure_all(plan, progress))


def spend(plan: Plan, budget: Budget, results: Mapping[str, Measured | str]) -> Plan:
    """The plan with its budget spent, from what ``measure_tensor`` said of every tensor to be quantized.

    Raises BudgetError and SelectionError as ``choose``.
    """
    plan = plan.with_kept({name: reason for name, reason in results.items() if isinstance(reason, str)})
    check_worthwhile(plan.source, plan.tensors, plan.options)
    measured = {name: found for name, found in results.items() if isinstance(found, Measured)}
    return _Spending(plan, budget, measured).result()


def check_budget(plan: Plan, budget: Budget) -> None:
    """Raise SelectionError or BudgetError for a budget that does not fit the plan's tensors or options."""
    names = [t.name for t in plan.tensors]
    for option, patterns in (("weight", [p for p, _ in budget.factors]), ("tie", budget.ties)):
        for pattern in patterns:
            if not any(map(Rule(pattern).matches, names)):
                raise SelectionError(f"{option} '{pattern}' matches no tensor", argument=option)
    if budget.error == "importance" and plan.importance is None:
        raise BudgetError(
            "errors weighted by importance need an importance file", hint="give importance", remedy="importance"
        )
    if budget.error == "outputs" and plan.statistics is None:
        raise BudgetError(
            "errors of the outputs need the statistics of a calibration",
            hint="give calibration",
            remedy="calibration",
        )


def measure_all(plan: Plan, progress: Callable[[Progress], None] | None = None) -> dict[str, Measured | str]:
    """What ``measure_tensor`` says of each tensor to be quantized, by name; how large the budget is does not matter."""
    chosen = [t for t in plan.tensors if t.quantized]
    meter = ProgressMeter(progress, sum(t.bytes_in for t in chosen))
    found: dict[str, Measured | str] = {}
    with TileReader(plan.checkpoint, tile_bytes(plan.options.max_memory)) as reader:
        codec = TileCodec(reader, resolve_device(plan.device))
        feedback = feedback_meter(plan, codec)
        for tensor in chosen:
            found[tensor.name] = measure_tensor(plan, codec, tensor, feedback)
            meter.add(tensor.bytes_in, tensor.name)
        reader.check_unchanged()
    return found


def measure_tensor(
    plan: Plan, codec: TileCodec, tensor: TensorPlan, feedback: FeedbackMeter | None = None
) -> Measured | str:
    """Measure a tensor in all that a budget may give it, as ``measure`` does; the reader's tiles must be those of
    ``tile_bytes(max_memory)``. ``feedback``: from ``feedback_meter``, for tensors that share an H."""
    pinned = tensor.pinned and tensor.k is not None
    feedback = feedback or feedback_meter(plan, codec)
    return measure(plan, codec, tensor, [_coding(tensor)] if pinned else codings_of(plan), feedback)


def feedback_meter(plan: Plan, codec: TileCodec) -> FeedbackMeter | None:
    """What measures errors of outputs; None where the budget is not spent by these."""
    return FeedbackMeter(plan, codec.reader, codec.device) if plan.error_kind == "outputs" else None


def codings_of(plan: Plan) -> tuple[Coding, ...]:
    """What a budget chooses from, the smallest first: every K of each codec of the plan's options."""
    codings = [(codec, k) for codec in plan.options.codecs for k in get_codec(codec).ks]
    bits = {coding: bits_per_weight(coding[0], "", _SOME_SHAPE, coding[1]) for coding in codings}
    return tuple(sorted(codings, key=lambda coding: bits[coding]))


def bits_range(plan: Plan) -> tuple[float, float]:
    """Bits per weight of the quantized tensors at the smallest of ``codings_of`` and at the largest."""
    codings, free = codings_of(plan), [t.name for t in plan.tensors if t.quantized and not t.pinned]
    least, most = (
        _bits(plan.with_codings(dict.fromkeys(free, coding)).tensors) for coding in (codings[0], codings[-1])
    )
    return least, most


def _coding(tensor: TensorPlan) -> Coding:
    """As budgets name it: without the dtype of a tensor."""
    output = output_codec(tensor.codec)
    return tensor.codec if output is None else output.base, tensor.k or 0


class _Spending:
    """One budget on one plan: the tables of sizes and errors by group and coding, and what is chosen from them."""

    def __init__(self, plan: Plan, budget: Budget, measured: Mapping[str, Measured]) -> None:
        self.plan, self.budget, self.measured = plan, budget, measured
        self.codings = codings_of(plan)
        self.tensors = [t for t in plan.tensors if t.quantized]
        self.kind = plan.error_kind
        self.weights: Counter[str] = Counter()  # by tensor, all experts of a layer as one
        for tensor in self.tensors:
            self.weights[merged_experts(tensor.name)] += element_count(tensor.shape)
        free = [t for t in self.tensors if not t.pinned]
        self.groups = tied(free, budget.ties)
        members = list(self.groups.values())
        count = len(self.codings)
        self.sizes = np.array([[sum(self._size(t, c) for t in g) for c in self.codings] for g in members], np.int64)
        self.errors = np.array([[sum(self._error(t, c) for t in g) for c in self.codings] for g in members])
        self.sizes, self.errors = self.sizes.reshape(-1, count), self.errors.reshape(-1, count)
        self.pinned = [t for t in self.tensors if t.pinned]

    def result(self) -> Plan:
        """The plan with the choice made."""
        limit = self._limit()
        for _ in range(_FITTINGS):
            allocation = self._allocate(limit)
            chosen = self.plan.with_codings(self._chosen(allocation))
            over = sum(s.nbytes for s in chosen.shards) - self.budget.size if self.budget.size is not None else 0
            if over <= 0:
                return self._described(chosen, allocation)
            limit -= over
        raise BudgetError(f"no choice of K makes files of {self.budget.size:,} bytes or less")

    def _allocate(self, limit: int) -> Allocation:
        try:
            return allocator.allocate(self.sizes, self.errors, limit)
        except BudgetError as error:
            least = self.plan.with_codings(self._smallest())
            raise BudgetError(
                f"{self._wanted()} cannot be reached: at the smallest K the quantized tensors take "
                f"{_bits(least.tensors):.4g} bits per weight, the weight files {sum(s.nbytes for s in least.shards):,} "
                "bytes",
                hint="quantize more (keep_embeddings=False, include), or allow more",
                remedy="more",
            ) from error

    def _wanted(self) -> str:
        return f"{self.budget.bpw:g} bits per weight" if self.budget.bpw is not None else f"{self.budget.size:,} bytes"

    def _limit(self) -> int:
        """Bytes for the tensors whose K is free."""
        if self.budget.bpw is not None:
            weights = sum(element_count(t.shape) for t in self.tensors)
            return int(self.budget.bpw * weights / 8) - sum(self._size(t, _coding(t)) for t in self.pinned)
        assert self.budget.size is not None
        smallest = self.plan.with_codings(self._smallest())
        mine = sum(self._size(t, _coding(t)) for t in smallest.tensors if t.quantized and not t.pinned)
        return self.budget.size - sum(s.nbytes for s in smallest.shards) + mine

    def _smallest(self) -> dict[str, Coding]:
        return {t.name: self.codings[0] for t in self.tensors if not t.pinned}

    def _size(self, tensor: TensorPlan, coding: Coding) -> int:
        """Bytes that count: with the codebook where the file's size is what matters."""
        codec, k = for_dtype(coding[0], tensor.dtype), coding[1]
        books = constant_nbytes(codec, tensor.name, tensor.shape, k) if self.budget.size is not None else 0
        return coded_nbytes(codec, tensor.name, tensor.shape, k) + books

    def _error(self, tensor: TensorPlan, coding: Coding) -> float:
        """The error that counts; infinite where the tensor would not shrink."""
        codec, k = for_dtype(coding[0], tensor.dtype), coding[1]
        if coding != self.codings[0] and not shrinks(tensor.name, tensor.shape, tensor.dtype, k, codec):
            return np.inf
        found = self.measured[tensor.name]
        error = found.noise[coding] if self.kind == "none" else found.relative[coding] * self._count(tensor)
        return error * next((f for p, f in self.budget.factors if Rule(p).matches(tensor.name)), 1.0)

    def _count(self, tensor: TensorPlan) -> float:
        """How much a tensor's relative error counts, by its size. All experts of a layer count together as one tensor,
        stored in one piece or one by one."""
        whole = self.weights[merged_experts(tensor.name)]
        largest = max(self.weights.values())  # counts as 1: sums stay within float64 whatever the user's factors are
        counts = 1.0 if self.kind == "relative" else (whole / largest) ** COUNT_POWER
        return float(element_count(tensor.shape) / whole * counts)

    def _chosen(self, allocation: Allocation) -> dict[str, Coding]:
        chosen = zip(self.groups.values(), allocation.choice, strict=True)
        return {t.name: self.codings[int(option)] for group, option in chosen for t in group}

    def _described(self, chosen: Plan, allocation: Allocation) -> Plan:
        """The chosen plan, with what can be said of it. Errors are those of the tensors whose K was free."""
        now = [t for t in chosen.tensors if t.quantized]
        noise = sum(self.measured[t.name].noise[_coding(t)] for t in now)
        weights = sum(element_count(t.shape) for t in now)
        fixed = sum(self._size(t, _coding(t)) for t in self.pinned)
        points = allocator.curve(self.sizes, self.errors)
        step = max(1, len(points) // _CURVE_POINTS)
        curve = [(8 * (size + fixed) / weights, error) for size, error in [*points[:-1:step], points[-1]]]
        choice = Choice(
            self.budget,
            self.kind,
            _bits(now),
            sum(s.nbytes for s in chosen.shards),
            sqnr_db(sum(self.measured[t.name].signal for t in now), noise),
            allocation.error,
            allocation.bound,
            None if allocation.uniform is None else self.codings[allocation.uniform],
            None if allocation.uniform is None else allocation.uniform_error,
            curve,
            {key: [t.name for t in group] for key, group in self.groups.items() if len(group) > 1},
            self._feedback_share(now),
        )
        return chosen.with_codings({}, choice)

    def _feedback_share(self, now: Sequence[TensorPlan]) -> tuple[float, float] | None:
        if self.kind != "outputs":
            return None
        known = [t for t in now if self.measured[t.name].elements]
        of_known = sum(element_count(t.shape) for t in known)
        share = of_known / max(1, sum(element_count(t.shape) for t in now))
        return share, sum(self.measured[t.name].elements for t in known) / max(1, of_known)


def _bits(tensors: Iterable[TensorPlan]) -> float:
    """Bits per weight of the quantized tensors."""
    chosen = [t for t in tensors if t.k is not None]
    size = sum(coded_nbytes(t.codec, t.name, t.shape, t.k) for t in chosen if t.k is not None)
    return 8 * size / max(1, sum(element_count(t.shape) for t in chosen))


def tied(tensors: Sequence[TensorPlan], patterns: Sequence[str]) -> dict[str, list[TensorPlan]]:
    """Tensors by what they must share a K with. Groups that a pattern of the user's touches are joined by it."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for tensor in tensors:
        key = tie_of(tensor.name)
        for pattern in patterns:
            if (shared := _shared_key(pattern, tensor.name)) is not None:
                parent[root(shared)] = root(key)
    groups: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        groups.setdefault(root(tie_of(tensor.name)), []).append(tensor)
    return groups


def _shared_key(pattern: str, name: str) -> str | None:
    """What the tensors that a pattern ties have in common: the pattern, and the groups of a regular expression."""
    if not Rule(pattern).matches(name):
        return None
    captured: tuple[Any, ...] = ()
    if pattern.startswith(REGEX_PREFIX) and (found := Rule(pattern).search(name)) is not None:
        captured = found.groups()
    return f"tie {pattern} {captured}"
