"""The fitted codebooks: the levels of an independent plain loop, on any number of threads, and worth their name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import kbitq
from kbitq import ops
from kbitq.codecs import codebooks, fit, reference
from kbitq.format import BLOCK, block_count

# dB over the weights of MiniLM's encoder, at K + 0.25 bits a weight.
MINILM_TARGET = {2: 9.50, 3: 15.73, 4: 22.08, 5: 28.24}  # of the first and the last of the six layers


def fitted_by_loop(w: np.ndarray, k: int, positions: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """docs/format.md section 3, element by element: quantize the whole matrix, sum over the blocks ``positions``."""
    rows, cols = w.shape
    amax = float(np.abs(w).max())
    v = w * np.ldexp(np.float32(1), -reference.tensor_exponent(amax))
    weights = np.ones_like(w) if importance is None else np.repeat(importance, rows // len(importance), axis=0)
    levels = codebooks.optimal(k)
    for _ in range(20):
        packed, absmax, _ = reference.quantize(w, k, levels, importance=importance)
        index = reference.unpack_planes(packed, k).reshape(rows, -1)
        above, below = [0.0] * 2**k, [0.0] * 2**k
        for position in positions:
            row, block = divmod(int(position), block_count(cols))
            here = slice(block * BLOCK, min(cols, (block + 1) * BLOCK))
            s = float(reference.decode_e4m4(absmax[row, block]))
            ones = not weights[row, here].any()
            for c in range(here.start, here.stop):
                weight, level = 1.0 if ones else float(weights[row, c]), index[row, c]
                above[level] += weight * (s * float(v[row, c]))
                below[level] += weight * (s * s)
        moved = [a / b if b > 0 else float(c) for a, b, c in zip(above, below, levels, strict=True)]
        levels = codebooks.normalise(sorted(moved))
    return levels


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Skewed values, so that the fitted levels are not symmetric."""
    values = np.random.RandomState(seed).standard_normal((rows, cols))
    return torch.from_numpy((values + 0.3 * values**2).astype(np.float32) * 3e-3)


def test_positions_are_evenly_spaced(monkeypatch):
    assert fit.sample_positions(5).tolist() == [0, 1, 2, 3, 4]
    assert fit.sample_positions(0).tolist() == []
    blocks = 3 * fit.SAMPLE_BLOCKS + 7
    expected = [i * blocks // fit.SAMPLE_BLOCKS for i in range(fit.SAMPLE_BLOCKS)]
    assert fit.sample_positions(blocks).tolist() == expected


@pytest.mark.parametrize("k, shape", [(2, (4, 70)), (3, (6, 64)), (4, (9, 33)), (6, (5, 128))])
def test_equals_the_plain_loop(engine, k, shape):
    w = matrix(*shape)
    expected = fitted_by_loop(w.numpy(), k, np.arange(shape[0] * block_count(shape[1])))
    got = fit.fit_tensor(w.to(engine), k, ops.scan(w.to(engine))[0]).levels
    assert got.tobytes() == expected.tobytes()
    assert not np.array_equal(got, -got[::-1])


def test_equals_the_plain_loop_with_importance(engine):
    w = matrix(8, 72, seed=3)
    importance = np.random.RandomState(4).exponential(size=(2, 72)).astype(np.float32)
    importance[1, 32:64] = 0  # a block of zeros counts as ones
    importance = reference.prepare_importance(importance)
    expected = fitted_by_loop(w.numpy(), 3, np.arange(8 * 3), importance)
    on_device = torch.from_numpy(importance).to(engine)
    got = fit.fit_tensor(w.to(engine), 3, ops.scan(w.to(engine))[0], on_device).levels
    assert got.tobytes() == expected.tobytes()


def test_a_sample_of_the_blocks_is_enough(monkeypatch):
    monkeypatch.setattr(fit, "SAMPLE_BLOCKS", 7)
    w = matrix(6, 70)
    expected = fitted_by_loop(w.numpy(), 3, fit.sample_positions(18))
    assert fit.fit_tensor(w, 3, ops.scan(w)[0]).levels.tobytes() == expected.tobytes()


def test_the_blocks_are_summed_in_one_order_whatever_the_chunk(monkeypatch):
    w = matrix(6, 70)
    whole = fit.fit_tensor(w, 3, ops.scan(w)[0]).levels
    monkeypatch.setattr(fit, "_CHUNK", 5)
    assert fit.fit_tensor(w, 3, ops.scan(w)[0]).levels.tobytes() == whole.tobytes()
    assert whole.tobytes() == fitted_by_loop(w.numpy(), 3, np.arange(18)).tobytes()


@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_normal_weights_keep_the_optimal_levels_after_one_step(k, monkeypatch):
    counted = []
    quantize = ops.quantize
    monkeypatch.setattr(ops, "quantize", lambda *a, **b: counted.append(1) or quantize(*a, **b))
    w = torch.from_numpy(np.random.RandomState(0).standard_normal((1024, 1024)).astype(np.float32))
    fitted = fit.fit_tensor(w, k, ops.scan(w)[0])
    assert fitted.levels.tobytes() == codebooks.optimal(k).tobytes()
    assert (fitted.gain_db, len(counted)) == (0.0, 1)


def test_the_gain_that_decides_is_that_of_the_first_step(monkeypatch):
    """A threshold just below what the first step removes lets it go on; one just above stops it."""
    w = matrix(32, 64)
    amax, levels = ops.scan(w)[0], codebooks.optimal(3)
    packed, absmax, _ = reference.quantize(w.numpy(), 3, levels)
    index = reference.unpack_planes(packed, 3).reshape(32, 64)
    v = w.double().numpy() * 2.0 ** -reference.tensor_exponent(float(amax))
    s = reference.decode_e4m4(absmax).astype(np.float64).repeat(BLOCK, axis=1)
    noise = ((v - s * levels[index]) ** 2).sum()
    sums = [((s * v)[index == i].sum(), (s * s)[index == i].sum()) for i in range(8)]
    moved = np.array([above / below if below else level for (above, below), level in zip(sums, levels, strict=True)])
    share = 1 - ((v - s * moved[index]) ** 2).sum() / noise
    monkeypatch.setattr(fit, "LEAST_GAIN", share * 0.999)
    assert fit.fit_tensor(w, 3, amax).gain_db > 0
    monkeypatch.setattr(fit, "LEAST_GAIN", share * 1.001)
    assert np.array_equal(fit.fit_tensor(w, 3, amax).levels, levels)


def test_threads_do_not_change_the_levels():
    w, before = matrix(512, 1024).bfloat16(), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(fit.fit_tensor(w, 4, ops.scan(w)[0]).levels.tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_several_tensors_share_a_codebook():
    """Two tensors of different ranges fit the levels of one tensor of both: each has its own power of two."""
    a, b = matrix(8, 64, seed=1), matrix(8, 64, seed=2)
    b = b * float(a.abs().max() / b.abs().max())
    whole = torch.cat([a, b])
    together = fit.fit_tensor(whole, 3, ops.scan(whole)[0])
    far = b * 2.0**20
    parts = fit.matrix_parts(a, ops.scan(a)[0], np.arange(16))
    parts += fit.matrix_parts(far, ops.scan(far)[0], np.arange(16), place=16)
    assert fit.fit(parts, 3).levels.tobytes() == together.levels.tobytes()


@pytest.mark.parametrize("w", [torch.zeros(4, 64), torch.full((4, 64), -2.5)], ids=["zeros", "constant"])
def test_degenerate_tensors_keep_usable_levels(w):
    q = kbitq.quantize(w, 3, codebook="fit")
    assert q.codebook.isfinite().all() and (q.codebook.diff() >= 0).all()
    assert torch.equal(q.dequantize(), w)


def test_quantize_takes_the_name_fit(device):
    w = matrix(64, 256).to(device)
    plain, fitted = kbitq.quantize(w, 3), kbitq.quantize(w, 3, codebook="fit")
    assert fitted.codebook_name == "fit"
    gain = fit.fit_tensor(w, 3, ops.scan(w)[0]).gain_db
    assert fitted.sqnr_db - plain.sqnr_db == pytest.approx(gain, abs=1e-6)
    assert gain > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("k", MINILM_TARGET)
def test_minilm_encoder(minilm: Path, k: int):
    totals = np.zeros(2)
    with safe_open(minilm / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            w = file.get_tensor(name)
            if name.startswith(("encoder.layer.0.", "encoder.layer.5.")) and w.dim() == 2:
                q = kbitq.quantize(w, k, codebook="fit")
                totals += ops.stats(w, **q.matrices()).sum(0)[:2].numpy()
    assert 10 * np.log10(totals[0] / totals[1]) >= MINILM_TARGET[k]
