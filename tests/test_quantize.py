"""kbitq.quantize and kbitq.dequantize: shapes, strides, dtypes, modes of the float unit, and what they refuse."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import kbitq
from kbitq.codecs import codebooks, reference
from kbitq.errors import CodebookError, NonFiniteError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def triple(q) -> list[torch.Tensor]:
    return [q.packed, q.absmax, q.codebook]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(triple(a), triple(b), strict=True))


@pytest.mark.parametrize("k", [2, 3, 8])
def test_matrix_equals_the_reference(engine, k):
    w = normal(5, 77)
    q = kbitq.quantize(w.to(engine), k)
    want = reference.quantize(w.numpy(), k, codebooks.optimal(k))
    for got, expected in zip(triple(q), want, strict=True):
        assert np.array_equal(got.cpu().numpy(), expected)
    assert np.array_equal(kbitq.dequantize(q).cpu().numpy(), reference.dequantize(*want, 77))
    assert q.sqnr_db == pytest.approx(reference.sqnr_db(reference.stats(w.numpy(), *want)), rel=1e-14)


def test_strides_do_not_matter(device):
    w = normal(24, 80).to(device)
    wide = normal(24, 200).to(device)
    for view in (w.t(), w[::3], w[:, 5:50], wide[:, ::2], w[:1].expand(7, 80), w.flip(0)):
        assert same(kbitq.quantize(view, 4), kbitq.quantize(view.clone(memory_format=torch.contiguous_format), 4))
    importance = normal(200).abs().to(device)[::2]
    strided = kbitq.quantize(wide[:, ::2], 3, importance=importance)
    assert same(strided, kbitq.quantize(wide[:, ::2].contiguous(), 3, importance=importance.clone()))


def test_flushing_denormals_changes_nothing():
    w = normal(64, 96)
    w[:, ::3] *= 1e-39
    plain = kbitq.quantize(w, 3), kbitq.quantize(w * 1e-20, 3)
    tiny = w * 1e-20
    assert torch.set_flush_denormal(True)
    try:
        flushed = kbitq.quantize(w, 3), kbitq.quantize(tiny, 3)
        decoded = flushed[0].dequantize()
    finally:
        torch.set_flush_denormal(False)
    assert all(same(a, b) for a, b in zip(plain, flushed, strict=True))
    assert torch.equal(decoded, plain[0].dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_comes_back(device, dtype):
    w = normal(8, 64).to(device, dtype)
    q = kbitq.quantize(w, 5)
    assert q.dtype == dtype and kbitq.dequantize(q).dtype == dtype
    assert same(q, kbitq.quantize(w.float(), 5))
    exact = kbitq.dequantize(q, torch.float32)
    for target in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(kbitq.dequantize(q, target), exact.to(target))
        out = torch.empty(8, 64, dtype=target, device=device)
        assert kbitq.dequantize(q, out=out) is out and torch.equal(out, exact.to(target))


@pytest.mark.parametrize(
    "name, shape, matrix",
    [
        ("conv.weight", (6, 3, 5, 5), (6, 75)),
        ("mlp.experts.gate_up_proj", (3, 4, 70), (12, 70)),
        ("mlp.experts_count.weight", (3, 4, 70), (3, 280)),
        ("linear.weight", (4, 33), (4, 33)),
    ],
)
def test_shapes_become_matrices(device, name, shape, matrix):
    w = normal(*shape).to(device)
    q = kbitq.quantize(w, 3, name=name)
    flat = kbitq.quantize(w.reshape(matrix), 3)
    assert (q.rows, q.cols) == matrix and q.shape == shape
    assert torch.equal(q.packed.reshape(flat.packed.shape), flat.packed)
    assert torch.equal(q.dequantize(), flat.dequantize().reshape(shape))
    assert q.bits_per_weight == pytest.approx(8 * (4 * q.packed.numel() + q.absmax.numel()) / w.numel())


def test_custom_codebook_and_its_name(device):
    q = kbitq.quantize(normal(4, 64).to(device), 2, codebook=torch.tensor([-2.0, -1, 0, 4]))
    assert q.codebook_name == "custom"
    assert (q.codebook / q.codebook[-1]).tolist() == [-0.5, -0.25, 0, 1]
    with pytest.raises(CodebookError, match="takes 8 levels"):
        kbitq.quantize(normal(4, 64), 3, codebook=torch.tensor([-2.0, -1, 0, 4]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_with_count_and_place(device, bad):
    w = normal(4, 50).to(device)
    w[2, 7] = w[3, 1] = bad
    with pytest.raises(NonFiniteError, match=r"attn\.weight: 2 of 200") as caught:
        kbitq.quantize(w, 3, name="attn.weight")
    assert (caught.value.tensor, caught.value.count, caught.value.first) == ("attn.weight", 2, 107)


def test_float64_is_checked_after_rounding_to_float32():
    with pytest.raises(NonFiniteError):
        kbitq.quantize(torch.full((2, 64), 1e300, dtype=torch.float64), 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: kbitq.quantize(w, 1),
        lambda w: kbitq.quantize(w, 9),
        lambda w: kbitq.quantize(w[0], 3),
        lambda w: kbitq.quantize(w[:0], 3),
        lambda w: kbitq.quantize(w.int(), 3),
        lambda w: kbitq.quantize(w, 3, scale="best"),
        lambda w: kbitq.quantize(w, 3, importance=torch.ones(7)),
        lambda w: kbitq.quantize(w, 3, importance=-torch.ones(64)),
        lambda w: kbitq.quantize(w, 3, importance=torch.full((64,), float("nan"))),
        lambda w: kbitq.dequantize(kbitq.quantize(w, 3), out=torch.empty(3, 3)),
        lambda w: kbitq.dequantize(kbitq.quantize(w, 3), torch.int32),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ValueError):
        call(normal(4, 64))


def test_shown_in_one_line():
    q = kbitq.quantize(torch.ones(64, 96), 3)
    assert repr(q) == "QuantizedTensor([64, 96], torch.float32, k=3, mse, optimal, cpu)"


def test_it_is_saved_moved_and_sent_like_a_tensor(tmp_path: Path) -> None:
    w = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
    q = kbitq.quantize(w, 3)
    torch.save({"layer": q}, tmp_path / "q.pt")
    for loaded in (torch.load(tmp_path / "q.pt", weights_only=True)["layer"], pickle.loads(pickle.dumps(q))):
        assert torch.equal(loaded.dequantize(), q.dequantize())
        assert (loaded.shape, loaded.dtype, loaded.k, loaded.sqnr_db) == (q.shape, q.dtype, q.k, q.sqnr_db)
    assert q.device == torch.device("cpu")
    assert torch.equal(q.to("cpu").packed, q.cpu().packed)
    assert q.to("meta").device.type == "meta"
    with pytest.raises(TypeError, match="moves to a device"):
        q.to(torch.float16)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'scales'"):
        _ = q.scales
    copied = copy.deepcopy(q)
    assert copied.packed is not q.packed


@pytest.mark.parametrize("given", [None, [[1.0, 2.0]], "w", 3])
def test_what_is_no_tensor_is_refused_in_a_sentence(given: object) -> None:
    with pytest.raises(TypeError, match=r"tensor: a torch\.Tensor is needed, not"):
        kbitq.quantize(given, 3)  # type: ignore[arg-type]
