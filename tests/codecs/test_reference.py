"""The reference codec against docs/format.md, spelled out once more where the vectorised code does not read like it."""

import numpy as np
import pytest

from kbitq.codecs import codebooks, reference

F32 = np.float32


def one_block(seed: int = 0, n: int = 32) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(n).astype(F32)


def index_by_definition(v: np.ndarray, levels: np.ndarray, s: np.float32) -> np.ndarray:
    """index = number of j with v > mid[j] * s; z for s = 0."""
    mid = [F32(0.5) * (levels[j] + levels[j + 1]) for j in range(len(levels) - 1)]
    if s == 0:
        return np.full(v.shape, sum(m < 0 for m in mid))
    return np.array([sum(x > m * s for m in mid) for x in v])


@pytest.mark.parametrize("k", range(2, 9))
def test_bisection_counts_thresholds(k):
    levels = codebooks.optimal(k)
    v = one_block(k)
    mid = F32(0.5) * (levels[:-1] + levels[1:])
    v[:4] = [*mid[:3], 0.0]  # exact midpoints go to the lower level
    for s in (F32(1), F32(0.73), F32(0)):
        found = reference.find_index(v[None], levels, np.array([s]))[0]
        assert np.array_equal(found, index_by_definition(v, levels, s))


@pytest.mark.parametrize("levels", [[0, 0, 0, 1], [-1, -1, 1, 1], [0.1, 0.2, 0.4, 1], [-1, -0.5, -0.5, -0.1]])
def test_bisection_with_duplicates_and_one_sided_levels(levels):
    levels = np.array(levels, F32)
    v = np.concatenate([one_block(1, 28), [0, 0.5, -0.5, 1]]).astype(F32)
    for s in (F32(1), F32(2.5), F32(0)):
        assert np.array_equal(
            reference.find_index(v[None], levels, np.array([s]))[0], index_by_definition(v, levels, s)
        )


def test_bit_i_of_word_j_is_bit_j_of_the_index_of_element_i():
    index = np.random.RandomState(0).randint(0, 32, (1, 2, 32))
    words = reference.pack_planes(index, 5)
    assert words.shape == (1, 10) and words.dtype == np.int32
    for b in range(2):
        for j in range(5):
            expected = sum(((int(index[0, b, i]) >> j) & 1) << i for i in range(32))
            assert int(words[0, b * 5 + j]) & 0xFFFFFFFF == expected


@pytest.mark.parametrize("k", range(2, 9))
def test_planes_unpack_to_what_was_packed(k):
    index = np.random.RandomState(k).randint(0, 2**k, (3, 4, 32))
    assert np.array_equal(reference.unpack_planes(reference.pack_planes(index, k), k), index)


def test_tree_is_the_specified_one():
    e = (one_block(3) ** 2) * F32(1e3) + one_block(4) ** 2
    by_hand = list(e)
    for half in (16, 8, 4, 2, 1):
        by_hand = [by_hand[i] + by_hand[i + half] for i in range(half)]
    assert reference.tree_sum(e) == by_hand[0]
    assert reference.tree_sum(e).dtype == F32


@pytest.mark.parametrize(
    "amax, x",
    [
        (0, 0),
        (31, 0),
        (np.nextafter(F32(31), F32(32)), 1),
        (15.5, -1),
        (1.0, -4),
        (3.4e38, 124),
        (1e-30, -100),
        (1e-45, -100),
    ],
)
def test_tensor_exponent(amax, x):
    assert reference.tensor_exponent(amax) == x
    if amax and x > -100:
        assert 15.5 < float(amax) * 2.0**-x <= 31


@pytest.mark.parametrize(
    "x, dtype, top",
    [(0, "F32", 255), (123, "F32", 255), (124, "F32", 0xEF), (124, "BF16", 0xEF), (12, "F16", 0xEF), (11, "F16", 255)],
)
def test_top_byte_is_the_last_that_stays_finite(x, dtype, top):
    assert reference.top_byte(x, dtype) == top


def test_rounding_to_bf16_and_f16():
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], F32)  # to the even neighbour
    assert reference.round_to(ties, "BF16").tolist() == [1, 1 + 2**-6, -1]
    assert reference.round_to(np.array([np.nan, np.inf, 1e-40], F32), "BF16")[1] == np.inf
    assert np.isnan(reference.round_to(np.array([np.nan], F32), "BF16")).all()
    assert reference.round_to(np.array([1 + 2**-11, 65519, 2**-25], F32), "F16").tolist() == [1, 65504, 0]
    with pytest.raises(ValueError, match="dtype"):
        reference.round_to(ties, "F8")


def choose_by_definition(v: np.ndarray, levels: np.ndarray, k: int, top: int, w: np.ndarray) -> int:
    """The mse rule one candidate and one element at a time."""
    nearest = int(reference.encode_e4m4(np.abs(v).max()))
    distances = [-24 + 2 * i for i in range(15)] if k == 2 else list(range(-8, 5))
    best = None
    for byte in sorted({min(max(nearest + d, 0), top) for d in distances}):
        s = reference.decode_e4m4(byte)[()]
        index = index_by_definition(v, levels, s)
        e = np.zeros(32, F32)
        for i, x in enumerate(v):
            t = F32(x - F32(levels[index[i]] * s)) if byte else x
            e[i] = F32(F32(t * t) * w[i])
        error = reference.tree_sum(e)
        if best is None or error < best[0]:
            best = (error, byte)
    return best[1]


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("n", [32, 19])
def test_mse_rule_takes_the_best_candidate(k, n):
    levels = codebooks.optimal(k)
    weight = np.abs(one_block(50, n)) + F32(0.1)
    for seed in range(5):
        v = one_block(seed, n) * F32(5)
        for w in (np.ones(n, F32), reference.prepare_importance(weight)):
            _, absmax, stored = reference.quantize(v[None], k, levels, importance=w)
            x = reference.tensor_exponent(np.abs(v).max())
            assert absmax[0, 0] == choose_by_definition(v * F32(2.0**-x), levels, k, 255, w)
            assert np.array_equal(stored, levels * F32(2.0**x))


def test_importance_is_scaled_and_an_all_zero_block_counts_as_ones():
    assert reference.prepare_importance([0.0, 3.0, 0.75]).tolist() == [0, 1.5, 0.375]
    assert reference.prepare_importance([0.0, 0.0]).tolist() == [0, 0]
    w = np.random.RandomState(1).standard_normal((2, 64)).astype(F32)
    half = np.concatenate([np.zeros(32), np.abs(one_block(9))]).astype(F32)
    plain = reference.quantize(w, 3, codebooks.optimal(3))
    weighted = reference.quantize(w, 3, codebooks.optimal(3), importance=half)
    assert np.array_equal(plain[1][:, 0], weighted[1][:, 0])
    assert np.array_equal(plain[0][:, :3], weighted[0][:, :3])
    for bad in ([-1.0, 1], [np.nan, 1], [np.inf, 1]):
        with pytest.raises(ValueError, match="importance"):
            reference.prepare_importance(bad)


def test_weighting_moves_the_error_where_it_matters_less():
    w = np.random.RandomState(2).standard_normal((64, 32)).astype(F32)
    weight = np.where(np.arange(32) < 4, 100, 1).astype(F32)
    plain = reference.quantize(w, 2, codebooks.optimal(2))
    weighted = reference.quantize(w, 2, codebooks.optimal(2), importance=weight)
    errors = [np.sum((reference.dequantize(*q, 32) - w) ** 2 * weight) for q in (plain, weighted)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 70])
def test_padding_gets_index_z_and_zero_blocks_byte_0(cols):
    w = np.zeros((2, cols), F32)
    w[1] = one_block(8, cols)
    packed, absmax, _ = reference.quantize(w, 3, codebooks.optimal(3))
    index = reference.unpack_planes(packed, 3).reshape(2, -1)
    assert (index[:, cols:] == 3).all() and (index[0] == 3).all()  # 3 of 7 thresholds lie below zero
    assert (absmax[0] == 0).all() and (absmax[1] > 0).all()


@pytest.mark.parametrize("size", [1e-28, 1.0, 1e38])
def test_sqnr_does_not_depend_on_the_magnitude(size):
    w = np.random.RandomState(3).standard_normal((8, 256)).clip(-3, 3).astype(F32)
    levels = codebooks.optimal(4)
    sqnr = [reference.sqnr_db(reference.stats(v, *reference.quantize(v, 4, levels))) for v in (w, w * F32(size))]
    assert abs(sqnr[0] - sqnr[1]) < (0.02 if size != 1e38 else 0.1)  # at the top end no byte may overflow
    assert np.isfinite(reference.dequantize(*reference.quantize(w * F32(size), 4, levels), 256)).all()


def test_stats_are_sums_of_squares_and_the_largest_error():
    w = np.random.RandomState(4).standard_normal((3, 45)).astype(F32)
    q = reference.quantize(w, 3, codebooks.optimal(3))
    rows = reference.stats(w, *q)
    error = w.astype(np.float64) - reference.dequantize(*q, 45).astype(np.float64)
    assert rows.dtype == np.float64
    np.testing.assert_allclose(rows[:, 0], (w.astype(np.float64) ** 2).sum(1), rtol=1e-14)
    np.testing.assert_allclose(rows[:, 1], (error**2).sum(1), rtol=1e-14)
    assert np.array_equal(rows[:, 2], np.abs(error).max(1))
    assert reference.sqnr_db(np.array([[4.0, 0.0, 0.0]])) == np.inf


def test_flat_fp32_keeps_exact_maxima_and_uses_them():
    a = one_block(6, 77) * F32(40)
    levels = codebooks.nf(4)
    packed, absmax = reference.quantize_flat(a, 4, levels, "fp32")
    assert absmax.dtype == F32
    assert absmax.tolist() == [np.abs(a[i : i + 32]).max() for i in (0, 32, 64)]
    index = reference.unpack_planes(packed[None], 4).reshape(-1)[:77]
    expected = [index_by_definition(a[i : i + 32], levels, m) for i, m in zip((0, 32, 64), absmax, strict=True)]
    assert np.array_equal(index, np.concatenate(expected))


def test_wrong_arguments_are_refused():
    w = np.ones((1, 32), F32)
    with pytest.raises(ValueError, match="16 levels"):
        reference.quantize(w, 4, codebooks.nf(3))
    with pytest.raises(ValueError, match="scale"):
        reference.quantize(w, 3, codebooks.nf(3), scale="best")
