"""Equal bytes from every implementation: the numpy reference, each SIMD level of the CPU, and CUDA."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.parity import DTYPES, SPECIAL, normal, same_bytes, sources, special
from kbitq import functional, ops
from kbitq.codecs import codebooks, reference

ALL_K = range(2, 9)


def check_quantize(w, k, device, *, levels=None, scale="mse", importance=None, dtype="F32", want=None):
    """Quantize on ``device`` and hold it against the reference; returns the reference's triple."""
    levels = codebooks.optimal(k) if levels is None else levels
    if want is None:
        want = reference.quantize(w.float().numpy(), k, levels, scale=scale, importance=importance, dtype=dtype)
    w = w.to(device)
    if importance is not None:
        importance = ops.prepare_importance(torch.from_numpy(importance)).reshape(-1, w.shape[1]).to(device)
    got = ops.quantize(w, torch.from_numpy(levels).to(device), amax=ops.scan(w)[0], importance=importance, scale=scale)
    for name, mine, theirs in zip(
        ("absmax", "packed", "codebook"), (got[1], got[0], got[2]), (want[1], want[0], want[2]), strict=True
    ):
        same_bytes(f"{name} of {tuple(w.shape)} {dtype} K={k} {scale}", mine, theirs)
    return want


def check_decode(w, triple, device, dtype="F32"):
    """Dequantize the reference's triple to every dtype, and its statistics."""
    packed, absmax, codebook = (torch.from_numpy(np.ascontiguousarray(t)).to(device) for t in triple)
    cols = w.shape[1]
    for name, out in DTYPES.items():
        decoded = ops.dequantize(packed, absmax, codebook, cols, out)
        assert decoded.dtype == out
        same_bytes(f"decoded {name}", decoded.float(), reference.dequantize(*triple, cols, name))
    same_bytes("stats", ops.stats(w.to(device), packed, absmax, codebook), reference.stats(w.float().numpy(), *triple))


@cache
def reference_of_shape(rows: int, cols: int, k: int, dtype: str, scale: str):
    """Shared by all implementations under test."""
    w = normal(rows, cols, dtype, seed=cols)
    return w, reference.quantize(w.float().numpy(), k, codebooks.optimal(k), scale=scale, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", ALL_K)
def test_every_row_length(engine, k, dtype):
    """Columns 1 to 100, rows 1 to 3, both scale rules."""
    for cols in range(1, 101):
        scale = "mse" if cols % 2 else "absmax"
        w, want = reference_of_shape(1 + cols % 3, cols, k, dtype, scale)
        check_quantize(w, k, engine, scale=scale, dtype=dtype, want=want)
        check_decode(w, want, engine, dtype)


@pytest.mark.parametrize("scale", ["absmax", "mse"])
@pytest.mark.parametrize("k", ALL_K)
def test_large(engine, k, scale):
    w, want = reference_of_shape(97, 1056, k, "BF16", scale)
    check_quantize(w, k, engine, scale=scale, dtype="BF16", want=want)
    check_decode(w, want, engine, "BF16")


@pytest.mark.parametrize("name", [*SPECIAL, "1e-30", "1e-20", "1e+30", "1e+38"])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_special_values(engine, scale, name):
    w = special(name)
    for k in ALL_K:
        want = check_quantize(w, k, engine, scale=scale)
        check_decode(w, want, engine)
        assert np.isfinite(reference.dequantize(*want, w.shape[1])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_never_decode_to_infinity(engine, dtype):
    w = torch.full((2, 64), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    w[1] = -w[1]
    for scale in ("absmax", "mse"):
        triple = check_quantize(w, 3, engine, scale=scale, dtype=dtype)
        check_decode(w, triple, engine, dtype)
        assert np.isfinite(reference.dequantize(*triple, 64, dtype)).all()


@pytest.mark.parametrize("k", ALL_K)
def test_importance(engine, k):
    """Per column and per expert, with blocks that weigh nothing, and magnitudes far from 1."""
    w = normal(6, 75, "BF16", seed=k)
    weights = np.abs(np.random.RandomState(k).standard_normal((3, 75))).astype(np.float32) ** 3
    weights[1, 32:64] = 0
    weights[2, 64:] = 0
    for importance in (
        weights[1],
        weights,
        weights * np.float32(1e-36),
        weights * np.float32(1e36),
        np.zeros(75, np.float32),
    ):
        check_quantize(w, k, engine, importance=importance, dtype="BF16")


LEVELS = {
    "one-sided": np.linspace(0, 1, 8) ** 2,
    "negative": np.linspace(-1, -0.1, 8),
    "duplicates": [-1, -0.5, -0.5, -0.5, 0, 0, 1, 1],
    "two distinct": [-1, -1, -1, -1, 1, 1, 1, 1],
    "skewed": [-0.2, -0.1, 0.01, 0.05, 0.1, 0.3, 0.6, 1],
    "zero and one": [0, 0, 0, 0, 0, 0, 0, 1],
}


@pytest.mark.parametrize("name", LEVELS)
def test_any_ascending_levels(engine, name):
    w = normal(5, 90, seed=11)
    for scale in ("absmax", "mse"):
        triple = check_quantize(w, 3, engine, levels=codebooks.normalise(LEVELS[name]), scale=scale)
        check_decode(w, triple, engine)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_counts_give_equal_bytes(engine, threads, restore_threads):
    torch.set_num_threads(threads)
    for scale in ("absmax", "mse"):
        w, want = reference_of_shape(211, 333, 4, "F32", scale)
        check_quantize(w, 4, engine, scale=scale, want=want)
        check_decode(w, want, engine)


@pytest.fixture
def flush_denormals():
    """Switches the mode, which numpy's arithmetic in this thread would feel too, on around a call."""

    def during(call, *args, **options):
        assert torch.set_flush_denormal(True)
        try:
            return call(*args, **options)
        finally:
            torch.set_flush_denormal(False)

    return during


def test_flushing_denormals_changes_nothing(engine, flush_denormals):
    """The mode reaches the core's threads unless it is set aside there: as inputs, as errors, and as sums."""
    w = normal(40, 75, seed=7)
    w[:, ::3] *= 1e-39
    importance = np.ones(75, np.float32)
    importance[:64] = 1e-38
    levels = codebooks.optimal(4)
    want = reference.quantize(w.numpy(), 4, levels, importance=importance)
    on_device, prepared = w.to(engine), ops.prepare_importance(torch.from_numpy(importance)).to(engine)
    amax, status = flush_denormals(ops.scan, on_device)
    got = flush_denormals(
        ops.quantize, on_device, torch.from_numpy(levels).to(engine), amax=amax, importance=prepared, scale="mse"
    )
    for name, mine, theirs in zip(("packed", "absmax", "codebook"), got, want, strict=True):
        same_bytes(name, mine, theirs)
    same_bytes("stats", flush_denormals(ops.stats, on_device, *got), reference.stats(w.numpy(), *want))
    assert status.tolist() == [0, -1]


def test_flushing_denormals_changes_no_drop_in_result(engine, flush_denormals):
    """Exact float32 maxima may be denormal, and so may everything decoded from them."""
    a = normal(1, 300, seed=8) * 1e-39
    codebook = torch.from_numpy(codebooks.nf(4)).to(engine)
    packed, absmax, _ = flush_denormals(functional.quantize_kbit, a.to(engine), 4, codebook, "fp32")
    want = reference.quantize_flat(a.numpy(), 4, codebooks.nf(4), "fp32")
    same_bytes("packed", packed, want[0])
    same_bytes("absmax", absmax, want[1])
    decoded = flush_denormals(functional.dequantize_kbit, packed, absmax, codebook, 4, 300, torch.float32)
    expected = reference.dequantize(want[0][None], want[1][None], codebooks.nf(4), 300)
    assert 0 < np.abs(expected).max() < 1.2e-38
    same_bytes("decoded", decoded.reshape(1, -1), expected)


def test_scan_finds_the_largest_and_the_first_that_is_not_finite(engine):
    for dtype in DTYPES.values():
        for cols in (1, 7, 33, 1000):
            w = torch.from_numpy(np.random.RandomState(cols).standard_normal((3, cols))).to(dtype)
            amax, status = ops.scan(w.to(engine))
            assert amax.item() == w.abs().max().item() and status.tolist() == [0, -1]
            w[2, cols // 2], w[2, cols - 1], w[1, 0] = float("nan"), float("-inf"), float("inf")
            bad = torch.nonzero(~torch.isfinite(w).reshape(-1)).reshape(-1)
            amax, status = ops.scan(w.to(engine))
            assert amax.item() == w[torch.isfinite(w)].abs().max().item()
            assert status.tolist() == [len(bad), bad[0].item()]


def test_scan_of_zeros_and_of_nothing_finite(engine):
    assert ops.scan(torch.zeros(2, 40, device=engine))[0].item() == 0
    amax, status = ops.scan(torch.full((2, 40), float("nan"), device=engine))
    assert amax.item() == 0 and status.tolist() == [80, 0]


@st.composite
def cases(draw):
    k = draw(st.integers(2, 8))
    w, dtype, rng = draw(sources(most_cols=70))
    cols = w.shape[1]
    levels = np.sort(rng.uniform(-1, 1, 2**k)) if draw(st.booleans()) else codebooks.optimal(k)
    importance = (rng.uniform(0, 1, cols) * (rng.uniform(0, 1, cols) < 0.7)).astype(np.float32)
    return (
        w,
        k,
        dtype,
        codebooks.normalise(levels),
        draw(st.sampled_from(["absmax", "mse"])),
        draw(st.sampled_from([None, importance])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_property_equal_bytes(engine, case):
    w, k, dtype, levels, scale, importance = case
    importance = importance if scale == "mse" else None
    triple = check_quantize(w, k, engine, levels=levels, scale=scale, importance=importance, dtype=dtype)
    check_decode(w, triple, engine, dtype)
    decoded = reference.dequantize(*triple, w.shape[1], dtype)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_larger_than_the_caches(engine: str, dtype: torch.dtype) -> None:
    """They are written past the caches; in parts they are not."""
    rows, cols = 4096, 4096 if dtype == torch.float32 else 8192
    levels = torch.as_tensor(codebooks.nf(3)).to(engine)
    part = torch.randn(64, cols, generator=torch.Generator().manual_seed(1)).to(engine)
    packed, absmax, codebook = ops.quantize(part, levels, amax=ops.scan(part)[0], scale="absmax")
    expected = ops.dequantize(packed, absmax, codebook, cols, dtype)
    repeat = (rows // 64, 1)
    whole = ops.dequantize(packed.repeat(repeat), absmax.repeat(repeat), codebook, cols, dtype)
    assert whole.numel() * whole.element_size() >= 64 << 20
    assert all(torch.equal(piece, expected) for piece in whole.split(64))
