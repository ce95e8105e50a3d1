"""The codec ``trellis``: equal bytes from the numpy reference, each SIMD level of the CPU, and CUDA."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.parity import DTYPES, SPECIAL, normal, same_bytes, sources, special
from kbitq import ops
from kbitq._core import core
from kbitq.codecs import codebooks, reference
from kbitq.codecs import trellis_reference as trellis
from kbitq.ops.codec import stream_of

ALL_K = range(1, 5)
SCALE_BLOCKS = (32, 128)
RULES = ("absmax", "mse")


def bent_grid(k: int) -> np.ndarray:
    """2^(k+2) levels, near enough to the ones that pay."""
    u = np.linspace(-1, 1, 2 ** (k + 2))
    return codebooks.normalise(0.75 * u + 0.25 * u * np.abs(u))


@dataclass(frozen=True)
class Trellis:
    """One parametrisation of the codec, as the core is called and as the reference is."""

    k: int
    scale_block: int
    threads: int = 1

    @property
    def name(self) -> str:
        return "trellis" if self.scale_block == 32 else "trellis/128"

    def quantize(self, w, levels, scale, importance=None):
        """The core's triple, from poisoned memory."""
        rows, cols = w.shape
        packed = torch.full((rows, -(-cols // 32) * self.k), 0x5A5A5A5A, dtype=torch.int32, device=w.device)
        absmax = torch.full((rows, -(-cols // self.scale_block)), 0x5A, dtype=torch.uint8, device=w.device)
        levels = torch.from_numpy(levels).to(w.device)
        codebook = torch.full_like(levels, torch.nan)
        amax = ops.scan(w)[0]
        if importance is not None:
            importance = ops.prepare_importance(torch.from_numpy(importance)).reshape(-1, cols).to(w.device)
        core.quantize(
            w, levels, amax, importance, packed, absmax, codebook, scale, self.threads, stream_of(w), self.name
        )
        return packed, absmax, codebook

    def dequantize(self, triple, cols, dtype):
        out = torch.full((len(triple[0]), cols), torch.nan, dtype=dtype, device=triple[0].device)
        core.dequantize(*triple, out, self.threads, stream_of(out), self.name)
        return out

    def stats(self, w, triple):
        out = torch.full((len(w), 3), torch.nan, dtype=torch.float64, device=w.device)
        core.stats(w, *triple, out, self.threads, stream_of(w), self.name)
        return out


def reference_stats(w: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    difference = w.astype(np.float64) - decoded.astype(np.float64)
    squares = (reference.to_blocks(w.astype(np.float64) ** 2), reference.to_blocks(difference**2))
    sums = [np.add.accumulate(reference.tree_sum(s), axis=1)[:, -1] for s in squares]  # blocks left to right
    return np.stack([*sums, np.abs(difference).max(axis=1)], axis=1)


def check_quantize(w, codec, engine, *, levels=None, scale="mse", importance=None, dtype="F32", want=None):
    """Quantize on ``engine`` and hold it against the reference; returns the reference's triple."""
    levels = bent_grid(codec.k) if levels is None else levels
    if want is None:
        options = {"importance": importance, "dtype": dtype, "scale_block": codec.scale_block}
        want = trellis.quantize(w.float().numpy(), codec.k, levels, scale=scale, **options)
    got = codec.quantize(w.to(engine), levels, scale, importance)
    for name, part in (("absmax", 1), ("packed", 0), ("codebook", 2)):
        same_bytes(f"{name} of {tuple(w.shape)} {dtype} {codec} {scale}", got[part], want[part])
    return want


def check_decode(w, triple, codec, engine):
    """Dequantize the reference's triple to every dtype, and its statistics."""
    cols, source = w.shape[1], w.float().numpy()
    on_device = [torch.from_numpy(np.ascontiguousarray(t)).to(engine) for t in triple]
    decoded = {name: trellis.dequantize(*triple, cols, name, codec.scale_block) for name in DTYPES}
    for name, dtype in DTYPES.items():
        got = codec.dequantize(on_device, cols, dtype)
        same_bytes(f"decoded {name} {codec} {tuple(w.shape)}", got.float(), decoded[name])
    same_bytes(f"stats {codec}", codec.stats(w.to(engine), on_device), reference_stats(source, decoded["F32"]))
    return decoded


@cache
def reference_of_shape(rows: int, cols: int, codec: Trellis, dtype: str, scale: str):
    """Shared by all implementations under test."""
    w = normal(rows, cols, dtype, seed=cols)
    options = {"scale": scale, "dtype": dtype, "scale_block": codec.scale_block}
    return w, trellis.quantize(w.float().numpy(), codec.k, bent_grid(codec.k), **options)


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("k", ALL_K)
def test_row_lengths(engine, k, scale_block):
    """Short last blocks, short last scales, one to three rows, all element types, both rules."""
    codec = Trellis(k, scale_block)
    for n, cols in enumerate([1, 2, 7, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 200, 256, 300, 416, 513]):
        dtype, scale = list(DTYPES)[n % 3], RULES[n % 2]
        w, want = reference_of_shape(1 + n % 3, cols, codec, dtype, scale)
        check_quantize(w, codec, engine, scale=scale, dtype=dtype, want=want)
        check_decode(w, want, codec, engine)


@pytest.mark.slow
@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("k", ALL_K)
def test_large(engine, k, scale_block):
    codec = Trellis(k, scale_block)
    for cols in (544, 512):  # 17 blocks, and 16: the last scale of 128 is short, or none is
        w, want = reference_of_shape(37, cols, codec, "BF16", "mse")
        check_quantize(w, codec, engine, dtype="BF16", want=want)
        check_decode(w, want, codec, engine)


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
def test_matrices_of_nothing(engine, scale_block):
    codec = Trellis(3, scale_block)
    for shape in ((0, 64), (3, 0)):
        w = torch.empty(shape, device=engine)
        triple = codec.quantize(w, bent_grid(3), "mse")
        same_bytes("codebook", triple[2], bent_grid(3).astype(np.float32))
        assert codec.dequantize(triple, shape[1], torch.float32).shape == shape
        assert codec.stats(w, triple).cpu().eq(0).all()


@pytest.mark.parametrize("name", [*SPECIAL, "1e-30", "1e+30", "1e+38"])
@pytest.mark.parametrize("scale", RULES)
def test_special_values(engine, scale, name):
    w = torch.cat([special(name), special(name)], dim=1)  # two scales of 128
    for k in ALL_K:
        for scale_block in SCALE_BLOCKS:
            codec = Trellis(k, scale_block)
            want = check_quantize(w, codec, engine, scale=scale)
            assert np.isfinite(check_decode(w, want, codec, engine)["F32"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_never_decode_to_infinity(engine, dtype):
    w = torch.full((2, 160), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    w[1] = -w[1]
    for scale in RULES:
        codec = Trellis(3, 32)
        triple = check_quantize(w, codec, engine, scale=scale, dtype=dtype)
        assert np.isfinite(check_decode(w, triple, codec, engine)[dtype]).all()


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("k", ALL_K)
def test_ties_of_walks(engine, k, scale_block):
    """Equal elements, elements that repeat, and levels that repeat: many walks of the same error, and one rule."""
    equal = torch.tensor([[1.0], [-1.0], [0.5], [1e-3]]).expand(4, 160)
    repeats = torch.tensor([1.0, -1.0, 0.5, 0.0]).repeat(4, 40)
    repeats[1], repeats[2], repeats[3, 64:] = repeats[1].roll(1), repeats[2].roll(2), 0
    codec = Trellis(k, scale_block)
    for w in (equal.contiguous(), repeats):
        for levels in (bent_grid(k), np.round(bent_grid(k) * 2) / 2, np.repeat([-1, 1], 2 ** (k + 1))):
            levels = codebooks.normalise(levels)
            for scale in RULES:
                check_quantize(w, codec, engine, levels=levels, scale=scale)


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("k", ALL_K)
def test_importance(engine, k, scale_block):
    """Per column and per expert, with blocks that weigh nothing, and magnitudes far from 1; under both rules."""
    w = normal(6, 203, "BF16", seed=k)
    weights = np.abs(np.random.RandomState(k).standard_normal((3, 203))).astype(np.float32) ** 3
    weights[1, 32:64] = 0
    weights[2, 64:] = 0
    codec = Trellis(k, scale_block)
    for n, importance in enumerate(
        (weights[1], weights, weights * np.float32(1e-36), weights * np.float32(1e36), np.zeros(203, np.float32))
    ):
        check_quantize(w, codec, engine, importance=importance, dtype="BF16", scale=RULES[(n + k) % 2])
    whole = weights[:, :192].copy()
    check_quantize(w[:, :192].contiguous(), codec, engine, importance=whole, dtype="BF16")


@pytest.mark.parametrize("scale", RULES)
@pytest.mark.parametrize("name", ["one-sided", "negative", "duplicates", "skewed", "zero and one"])
def test_any_ascending_levels(engine, name, scale):
    w = normal(5, 190, seed=11)
    for k in ALL_K:
        n = 2 ** (k + 2)
        levels = {
            "one-sided": np.linspace(0, 1, n) ** 2,
            "negative": np.linspace(-1, -0.1, n),
            "duplicates": np.sort(np.round(bent_grid(k), 1)),
            "skewed": np.sort(np.random.RandomState(k).uniform(-0.2, 1, n)),
            "zero and one": np.arange(n) == n - 1,
        }[name]
        codec = Trellis(k, SCALE_BLOCKS[k % 2])
        triple = check_quantize(w, codec, engine, levels=codebooks.normalise(levels), scale=scale)
        check_decode(w, triple, codec, engine)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts_give_equal_bytes(engine, threads):
    for scale_block in SCALE_BLOCKS:
        w, want = reference_of_shape(53, 333, Trellis(2, scale_block), "F32", "mse")
        codec = Trellis(2, scale_block, threads)
        check_quantize(w, codec, engine, want=want)
        check_decode(w, want, codec, engine)


def test_flushing_denormals_changes_nothing(engine):
    """The mode reaches the core's threads unless it is set aside there: as inputs, as errors, and as sums."""
    w = normal(8, 75, seed=7)
    w[:, ::3] *= 1e-39
    importance = np.ones(75, np.float32)
    importance[:64] = 1e-38
    codec = Trellis(3, 32)
    want = trellis.quantize(w.numpy(), 3, bent_grid(3), importance=importance)
    expected = reference_stats(w.numpy(), trellis.dequantize(*want, 75))
    on_device = w.to(engine)
    assert torch.set_flush_denormal(True)
    try:
        got = codec.quantize(on_device, bent_grid(3), "mse", importance)
        rows = codec.stats(on_device, got)
    finally:
        torch.set_flush_denormal(False)
    for name, mine, theirs in zip(
        ("packed", "absmax", "codebook", "stats"), (*got, rows), (*want, expected), strict=True
    ):
        same_bytes(name, mine, theirs)


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("k", ALL_K)
def test_any_words_decode(engine, k, scale_block):
    """Every path is a walk, so any words are valid; every scale byte is."""
    rng = np.random.RandomState(k)
    codec = Trellis(k, scale_block)
    for rows, cols in ((3, 1024), (4, 1056), (5, 77), (70, 4096), (1, 8192)):
        packed = rng.randint(-(2**31), 2**31, (rows, -(-cols // 32) * k), dtype=np.int64).astype(np.int32)
        absmax = rng.randint(0, 256, (rows, -(-cols // scale_block))).astype(np.uint8)
        codebook = np.sort(rng.standard_normal(2 ** (k + 2))).astype(np.float32)
        check_decode(normal(rows, cols, "BF16", seed=rows), (packed, absmax, codebook), codec, engine)


@st.composite
def cases(draw):
    k, scale_block = draw(st.sampled_from(list(ALL_K))), draw(st.sampled_from(SCALE_BLOCKS))
    w, dtype, rng = draw(sources(most_cols=300))
    cols = w.shape[1]
    levels = np.sort(rng.uniform(-1, 1, 2 ** (k + 2))) if draw(st.booleans()) else bent_grid(k)
    importance = (rng.uniform(0, 1, cols) * (rng.uniform(0, 1, cols) < 0.7)).astype(np.float32)
    return (
        w,
        Trellis(k, scale_block, draw(st.sampled_from([1, 2, 3]))),
        dtype,
        codebooks.normalise(levels),
        draw(st.sampled_from(RULES)),
        draw(st.sampled_from([None, importance])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_property_equal_bytes(engine, case):
    w, codec, dtype, levels, scale, importance = case
    triple = check_quantize(w, codec, engine, levels=levels, scale=scale, importance=importance, dtype=dtype)
    assert np.isfinite(check_decode(w, triple, codec, engine)[dtype]).all()


@pytest.mark.cuda
def test_more_strips_than_warps(cuda_device):
    """CUDA against the CPU, on matrices of which each warp of the GPU takes several strips."""
    for rows, cols, dtype in ((1500, 4096, "BF16"), (4097, 1000, "F32")):
        w = normal(rows, cols, dtype, seed=rows)
        for scale_block in SCALE_BLOCKS:
            codec = Trellis(3, scale_block, threads=torch.get_num_threads())
            want = codec.quantize(w, bent_grid(3), "mse")
            got = codec.quantize(w.to(cuda_device), bent_grid(3), "mse")
            for name, mine, theirs in zip(("packed", "absmax", "codebook"), got, want, strict=True):
                same_bytes(name, mine, theirs.numpy())
            for dtype_out in DTYPES.values():
                decoded = codec.dequantize(want, cols, dtype_out)
                assert torch.equal(codec.dequantize(got, cols, dtype_out).cpu(), decoded)
