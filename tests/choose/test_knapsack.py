"""The allocator against brute force, its bound, and its promise never to be worse than the same K for all."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbitq.choose import knapsack as budget
from kbitq.choose.knapsack import allocate, curve
from kbitq.errors import BudgetError


def brute_force(sizes: np.ndarray, errors: np.ndarray, limit: int) -> float:
    """The least error of all choices within the limit."""
    rows = np.arange(len(sizes))
    every = (np.array(c) for c in itertools.product(range(sizes.shape[1]), repeat=len(sizes)))
    return min((errors[rows, c].sum() for c in every if sizes[rows, c].sum() <= limit), default=np.inf)


def like_tensors(groups: int, seed: int, options: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Sizes linear in K, errors that fall about fourfold a bit, as measured ones do."""
    rng = np.random.RandomState(seed)
    blocks = rng.randint(1, 5000, size=(groups, 1))
    k = np.arange(2, 2 + options)
    jitter = np.exp(0.1 * rng.standard_normal((groups, options)))
    return blocks * (4 * k + 1), blocks * np.exp(2 * rng.standard_normal((groups, 1))) * 4.0**-k * jitter


@st.composite
def cases(draw):
    """Anything: errors that do not fall, equal sizes, options that a group cannot take."""
    groups, options = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 30), min_size=options, max_size=options).map(sorted)
    error = st.one_of(st.floats(0, 100), st.just(0.0), st.just(np.inf))
    sizes = np.array([draw(rows) for _ in range(groups)], np.int64)
    errors = np.array([[draw(error) for _ in range(options)] for _ in range(groups)])
    errors[np.arange(groups), [draw(st.integers(0, options - 1)) for _ in range(groups)]] = draw(st.floats(0, 100))
    return sizes, errors, draw(st.integers(0, 30 * groups))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_against_brute_force(case):
    sizes, errors, limit = case
    optimum = brute_force(sizes, errors, limit)
    if not np.isfinite(optimum):
        with pytest.raises(BudgetError):
            allocate(sizes, errors, limit)
        return
    found = allocate(sizes, errors, limit)
    rows = np.arange(len(sizes))
    assert found.size == sizes[rows, found.choice].sum() <= limit
    assert found.error == pytest.approx(errors[rows, found.choice].sum())
    assert found.bound <= optimum * (1 + 1e-9) + 1e-9
    assert found.error >= optimum * (1 - 1e-9)
    uniform = [errors[:, j].sum() for j in range(sizes.shape[1]) if sizes[:, j].sum() <= limit]
    assert found.error <= min(uniform, default=np.inf)


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_on_few_tensors(seed):
    sizes, errors = like_tensors(5, seed, options=5)
    for share in (0.1, 0.3, 0.55, 0.8):
        limit = int(sizes[:, 0].sum() + share * (sizes[:, -1].sum() - sizes[:, 0].sum()))
        found = allocate(sizes, errors, limit)
        assert found.error == pytest.approx(brute_force(sizes, errors, limit), rel=1e-9)
        assert found.gap == 0


@pytest.mark.parametrize("seed", range(5))
def test_without_the_enumeration_it_is_close(seed, monkeypatch):
    sizes, errors = like_tensors(30, seed)
    limit = int(0.6 * sizes[:, 1].sum() + 0.4 * sizes[:, 2].sum())
    optimum = allocate(sizes, errors, limit)
    monkeypatch.setattr(budget, "_MAX_ENUMERATED", 0)
    found = allocate(sizes, errors, limit)
    assert optimum.error <= found.error <= optimum.error * (1 + found.gap)
    assert found.bound <= optimum.error * (1 + 1e-9)
    assert found.gap < 0.02


@pytest.mark.parametrize("seed", range(10))
def test_at_the_size_of_a_uniform_k(seed):
    sizes, errors = like_tensors(40, seed)
    for option in range(sizes.shape[1]):
        found = allocate(sizes, errors, int(sizes[:, option].sum()))
        assert found.uniform == option
        assert found.error <= found.uniform_error == pytest.approx(errors[:, option].sum())
        assert found.gap < 0.02


def test_two_thousand_tensors_take_no_time():
    sizes, errors = like_tensors(2000, 0)
    limit = int(0.5 * sizes[:, 1].sum() + 0.5 * sizes[:, 2].sum())
    started = time.perf_counter()
    found = allocate(sizes, errors, limit)
    assert time.perf_counter() - started < 5
    assert found.gap < 1e-4
    assert limit - found.size < 100


def test_more_room_is_never_worse():
    sizes, errors = like_tensors(30, 3)
    limits = np.linspace(sizes[:, 0].sum(), sizes[:, -1].sum(), 60).astype(int)
    bounds = [allocate(sizes, errors, int(limit)).bound for limit in limits]
    assert bounds == sorted(bounds, reverse=True)


def test_all_or_nothing():
    sizes, errors = like_tensors(5, 1)
    assert (allocate(sizes, errors, int(sizes.sum())).choice == sizes.shape[1] - 1).all()
    assert (allocate(sizes, errors, int(sizes[:, 0].sum())).choice == 0).all()
    with pytest.raises(BudgetError, match="smallest choice takes"):
        allocate(sizes, errors, int(sizes[:, 0].sum()) - 1)


def test_the_curve_falls_from_the_smallest_to_the_largest_choice():
    sizes, errors = like_tensors(12, 2)
    points = curve(sizes, errors)
    assert points[0] == (sizes[:, 0].sum(), pytest.approx(errors[:, 0].sum()))
    assert points[-1] == (sizes[:, -1].sum(), pytest.approx(errors[:, -1].sum()))
    size, error = np.array(points).T
    slopes = np.diff(error) / np.diff(size)
    assert (np.diff(size) > 0).all() and (slopes < 0).all() and (np.diff(slopes) >= -1e-12).all()
