"""Bits where they help most: one choice for each group of tensors, the least total error that fits a size.

A multiple-choice knapsack. On the lower convex hull of each group's points (size, error), steps taken in order of error
saved per byte solve its linear relaxation (Lagrange's multiplier is the slope of the step that no longer fits), and
that relaxation bounds every choice from below. The choice itself is the hull's, repaired: steps that still fit are
taken, then exchanges (one group down, another up) as long as one helps. The best uniform choice of the size takes part,
so that the result is never worse. Last, all choices that the relaxation leaves open are enumerated, group by group,
as far as they are few enough: then the result is the optimum. Else how far from it it can be is known and returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kbitq.errors import BudgetError

Sizes = npt.NDArray[np.int64]
Errors = npt.NDArray[np.float64]
Choice = npt.NDArray[np.intp]

_MAX_EXCHANGES = 2000
_MAX_STATES = 20_000  # partial choices of one stage of the enumeration
_MAX_ENUMERATED = 200  # groups
_HELPS = 1e-12  # an exchange must lower the error by this share of it: rounding is not an improvement
MOST_BITS = 64  # per weight, of a budget: more than any K takes
AUTO_ERROR = "auto"
ERROR_KINDS = (AUTO_ERROR, "balanced", "outputs", "importance", "relative", "none")


@dataclass(frozen=True)
class Budget:
    """What a run may take, and what counts as error.

    Attributes:
        bpw: bits per weight, packed words and scale bytes over the true elements of all quantized tensors; codebooks
            are not counted. Or None.
        size: bytes of all weight files of the output, whole, as they lie on the disk. Or None.
        error: what is made small. ``relative``: each tensor's squared error relative to its weights, so that every
            tensor counts the same; ``balanced``: that, and a tensor counts as the fourth root of its number of weights;
            ``importance``: ``balanced``, with error and weights weighted by column; ``outputs``: ``balanced``, of the
            outputs of the tensor's layer instead of its weights, by a calibration; ``none``, the plain squared error.
            ``auto``: ``outputs`` with a calibration, else ``balanced``.
        factors: (pattern, factor) pairs: the error of the tensors that a pattern matches counts that much more. The
            first that matches is taken.
        ties: patterns whose tensors take one K, beside those that engines fuse. A regular expression with groups ties
            the tensors for which the groups are equal.
        sample: measure a sample of each big tensor only.
    """

    bpw: float | None = None
    size: int | None = None
    error: str = AUTO_ERROR
    factors: tuple[tuple[str, float], ...] = ()
    ties: tuple[str, ...] = ()
    sample: bool = False

    def __post_init__(self) -> None:
        if (self.bpw is None) == (self.size is None):
            raise BudgetError("a budget is either bits per weight or a size")
        if self.error not in ERROR_KINDS:
            raise BudgetError(f"the error must be {', '.join(ERROR_KINDS)}, not {self.error!r}")
        if self.bpw is not None and not 0 < self.bpw <= MOST_BITS:
            raise BudgetError(f"bits per weight must be above 0 and at most {MOST_BITS}, not {self.bpw}")
        if self.size is not None and self.size < 1:
            raise BudgetError(f"a size must be positive, not {self.size}")
        for pattern, factor in self.factors:
            if not 0 <= factor < np.inf:
                raise BudgetError(f"the weight of '{pattern}' must be a number from 0 up, not {factor}")

    def error_kind(self, *, calibrated: bool) -> str:
        """``error``, with ``auto`` resolved by whether there is a calibration."""
        return self.error if self.error != AUTO_ERROR else "outputs" if calibrated else "balanced"


@dataclass(frozen=True)
class Allocation:
    """What was chosen for each group.

    Attributes:
        choice: intp ``[groups]``, the index of an option.
        size: bytes in all; at most the limit.
        error: weighted squared error in all.
        bound: no choice within the limit has a smaller error than this.
        uniform: the option that, given to every group, has the least error within the limit; None if none fits.
        uniform_error: its error.
    """

    choice: Choice
    size: int
    error: float
    bound: float
    uniform: int | None
    uniform_error: float

    @property
    def gap(self) -> float:
        """How far from the optimum the error can be at most, as a share of it."""
        return (self.error - self.bound) / self.bound if self.bound > 0 else 0.0


@dataclass(frozen=True)
class _Step:
    """From one point of a group's hull to the next: more bytes, less error."""

    group: int
    option: int
    size: int
    gain: float


def allocate(sizes: Sizes, errors: Errors, limit: int) -> Allocation:
    """Choose an option for each group.

    Args:
        sizes: int64 ``[groups, options]``, bytes; does not fall from option to option.
        errors: float64 ``[groups, options]``, not negative; infinite where a group cannot take an option.
        limit: bytes that all may take together.

    Raises:
        BudgetError: not even the smallest options fit.
    """
    choice = _smallest(sizes, errors)
    least = _total(sizes, choice)
    if least > limit:
        raise BudgetError(f"the smallest choice takes {least:,} bytes, more than the {limit:,} there are")
    choice, bound = _relaxed(sizes, errors, limit, choice)
    best = _exchanged(sizes, errors, limit, choice)
    uniform, uniform_error = None, np.inf
    for option, candidate in _uniform(sizes, errors):
        if _total(sizes, candidate) <= limit and (error := _sum(errors, candidate)) < uniform_error:
            uniform, uniform_error = option, error
    if uniform is not None and _sum(errors, best) > uniform_error:
        best = _exchanged(sizes, errors, limit, dict(_uniform(sizes, errors))[uniform])
    optimum = _enumerated(sizes, errors, limit, best)
    if optimum is not None:
        best, bound = optimum, _sum(errors, optimum)
    error = _sum(errors, best)
    assert error <= uniform_error, "a budget must never be worse than the same K for all"
    return Allocation(best, _total(sizes, best), error, min(bound, error), uniform, float(uniform_error))


def curve(sizes: Sizes, errors: Errors) -> list[tuple[int, float]]:
    """The least error against the size, from the smallest choice to the largest: the corners of the relaxation."""
    choice = _smallest(sizes, errors)
    size, error = _total(sizes, choice), _sum(errors, choice)
    points = [(size, error)]
    for step in _steps(sizes, errors):
        size, error = size + step.size, max(error - step.gain, 0.0)
        points.append((size, error))
    return points


def _smallest(sizes: Sizes, errors: Errors) -> Choice:
    """The smallest option that each group can take; of equal sizes the one of least error."""
    possible = np.where(np.isfinite(errors), sizes, np.iinfo(np.int64).max)
    if len(sizes) and (possible.min(axis=1) == np.iinfo(np.int64).max).any():
        raise BudgetError("a group has no option at all")
    least = possible.min(axis=1, keepdims=True) if len(sizes) else possible
    return np.where(possible == least, errors, np.inf).argmin(axis=1) if len(sizes) else np.zeros(0, np.intp)


def _uniform(sizes: Sizes, errors: Errors) -> Iterator[tuple[int, Choice]]:
    """The same option for every group; one that cannot take it takes the largest below, or else its smallest."""
    smallest = _smallest(sizes, errors)
    possible = np.isfinite(errors)
    for option in range(sizes.shape[1]):
        below = np.where(possible[:, : option + 1], np.arange(option + 1), -1).max(axis=1, initial=-1)
        yield option, np.where(below < 0, smallest, below)


def _total(sizes: Sizes, choice: Choice) -> int:
    return int(sizes[np.arange(len(choice)), choice].sum())


def _sum(errors: Errors, choice: Choice) -> float:
    return float(errors[np.arange(len(choice)), choice].sum())


# --- the relaxation --------------------------------------------------------------------------------


def _hull(group: int, sizes: Sequence[int], errors: Sequence[float], start: int) -> list[_Step]:
    """The steps along the lower convex hull of one group's points; they save less and less a byte."""
    points = [start]
    for option in np.argsort(np.asarray(sizes), kind="stable"):
        at = int(option)
        if not np.isfinite(errors[at]) or sizes[at] <= sizes[points[0]] or errors[at] >= errors[points[-1]]:
            continue
        while len(points) > 1 and _slope(sizes, errors, points[-1], at) >= _slope(sizes, errors, *points[-2:]):
            points.pop()
        points.append(at)
    return [
        _Step(group, b, int(sizes[b] - sizes[a]), float(errors[a] - errors[b]))
        for a, b in pairwise(points)
        if sizes[b] > sizes[a]
    ]


def _slope(sizes: Sequence[int], errors: Sequence[float], a: int, b: int) -> float:
    """Error saved per byte from option a to b."""
    return (errors[a] - errors[b]) / (sizes[b] - sizes[a]) if sizes[b] > sizes[a] else np.inf


def _steps(sizes: Sizes, errors: Errors) -> list[_Step]:
    """All groups' steps, the most saving first; within a group they stay in order, since its hull is convex."""
    start = _smallest(sizes, errors)
    steps = [s for g in range(len(sizes)) for s in _hull(g, sizes[g], errors[g], int(start[g]))]
    return sorted(steps, key=lambda s: (-s.gain / s.size, s.group, s.size))


def _relaxed(sizes: Sizes, errors: Errors, limit: int, start: Choice) -> tuple[Choice, float]:
    """The hull's choice, filled up with what fits after the first step that does not; and the relaxation's error."""
    choice, room, bound = start.copy(), limit - _total(sizes, start), _sum(errors, start)
    relaxing, stuck = True, set()
    for step in _steps(sizes, errors):
        fits = step.size <= room
        if relaxing:
            bound -= step.gain * min(1.0, room / step.size)
            relaxing = fits
        if fits and step.group not in stuck:
            choice[step.group], room = step.option, room - step.size
        else:
            stuck.add(step.group)
    return choice, max(bound, 0.0)


# --- repair ----------------------------------------------------------------------------------------


def _exchanged(sizes: Sizes, errors: Errors, limit: int, choice: Choice) -> Choice:
    """Better one at a time: a group moved up into the room that is left, or into what another, moved down, leaves."""
    choice = choice.copy()
    for _ in range(_MAX_EXCHANGES):
        rows = np.arange(len(choice))
        bytes_more = sizes - sizes[rows, choice][:, None]
        gain = errors[rows, choice][:, None] - errors
        moves = _best_exchange(bytes_more, gain, limit - _total(sizes, choice), _HELPS * _sum(errors, choice))
        if not moves:
            break
        for group, option in moves:
            choice[group] = option
    return choice


def _best_exchange(bytes_more: Sizes, gain: Errors, room: int, least: float) -> list[tuple[int, int]]:
    """The one or two moves (group, option) that together fit the room and lower the error most; none if none does."""
    options = gain.shape[1]
    up = np.flatnonzero((gain > 0).ravel())
    if not len(up):
        return []
    up = up[np.argsort(bytes_more.ravel()[up], kind="stable")]
    up_bytes, up_gain = bytes_more.ravel()[up], gain.ravel()[up]
    best_so_far = _running_best(up_gain)
    # Moving down frees bytes; "no move" frees none and is the first candidate.
    down = np.flatnonzero(((bytes_more < 0) & np.isfinite(gain)).ravel())
    freed = np.concatenate(([0], -bytes_more.ravel()[down]))
    lost = np.concatenate(([0.0], -gain.ravel()[down]))
    reach = np.searchsorted(up_bytes, room + freed, side="right") - 1
    partner = np.where(reach >= 0, best_so_far[np.maximum(reach, 0)], -1)
    same = np.concatenate(([False], up[np.maximum(partner[1:], 0)] // options == down // options))
    net = np.where((partner >= 0) & ~same, up_gain[np.maximum(partner, 0)] - lost, -np.inf)
    winner = int(net.argmax())
    if net[winner] <= least:
        return []
    moves = [up[partner[winner]]] + ([down[winner - 1]] if winner else [])
    return [(int(move) // options, int(move) % options) for move in moves]


def _running_best(values: Errors) -> npt.NDArray[np.intp]:
    """For each position, where the largest value up to it stands (the first of equals)."""
    new = values > np.concatenate(([-np.inf], np.maximum.accumulate(values)[:-1]))
    return np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))


# --- enumeration -----------------------------------------------------------------------------------


def _enumerated(sizes: Sizes, errors: Errors, limit: int, best: Choice) -> Choice | None:
    """The optimum, or None where too many choices remain. Partial choices are dropped that another dominates, or that
    even the relaxation of the groups left cannot bring below the best choice known."""
    if not 0 < len(sizes) <= _MAX_ENUMERATED:
        return None
    order = np.argsort(-(sizes.max(axis=1) - sizes.min(axis=1)), kind="stable")
    sizes, errors, target = sizes[order], errors[order], _sum(errors, best) * (1 - _HELPS)
    size, error = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for group in range(len(sizes)):
        rest = np.array(curve(sizes[group + 1 :], errors[group + 1 :]))
        more, worse = size[:, None] + sizes[group], error[:, None] + errors[group]
        room = limit - more
        hopeful = np.isfinite(worse) & (room >= rest[0, 0])
        hopeful &= worse + np.interp(room, rest[:, 0], rest[:, 1]) < target
        parent, option = np.nonzero(hopeful)
        size, error = more[parent, option], worse[parent, option]
        by_size = np.lexsort((error, size))
        front = error[by_size] < np.concatenate(([np.inf], np.minimum.accumulate(error[by_size])[:-1]))
        kept = by_size[front]
        if len(kept) > _MAX_STATES:
            return None
        size, error = size[kept], error[kept]
        trail.append((parent[kept], option[kept]))
        if not len(kept):
            return best
    return _traced(trail, int(error.argmin()), order)


def _traced(trail: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]], state: int, order: Choice) -> Choice:
    """The choice that led to a state of the last stage."""
    choice = np.zeros(len(order), np.intp)
    for group, (parent, option) in zip(reversed(order), reversed(trail), strict=True):
        choice[group] = option[state]
        state = int(parent[state])
    return choice
