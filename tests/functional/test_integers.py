"""Integers beside float64 and beside torch's own operators; gradients; products of integers."""

import pytest
import torch

from kbitq import functional, quantize
from kbitq.codecs.ranges import OBSERVERS, choose_scale, code_range, find_range

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = [(8, True, True), (8, True, False), (8, False, False), (8, False, True), (4, True, True), (4, False, False)]
PER = ["tensor", "channel", "token", "group"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("bits, signed, symmetric", KINDS)
def test_codes_are_the_nearest(device, dtype, per, bits, signed, symmetric):
    w = normal(6, 4, 32).to(device, dtype) + 0.5
    q = functional.quantize_int(w, bits, per, symmetric, signed, group=16)
    least, most = code_range(bits, signed)
    codes = q.unpacked()
    assert codes.shape == w.shape and codes.dtype == (torch.int8 if signed else torch.uint8)
    assert codes.min() >= least and codes.max() <= most
    assert q.scale.numel() == {"tensor": 1, "channel": 6, "token": 24, "group": 48}[per]
    back = functional.dequantize_int(q, torch.float64)
    half = q.scale.double().repeat_interleave(w.numel() // q.scale.numel()).view(w.shape) / 2
    assert ((back - w.double()).abs() <= half * (1 + 1e-5) + 1e-9).all()
    assert functional.dequantize_int(q).dtype == dtype


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_torch(symmetric):
    w = normal(16, 64)
    q = functional.quantize_int(w, 8, "channel", symmetric)
    zero = torch.zeros(16, dtype=torch.int32) if q.zero is None else q.zero
    theirs = torch.fake_quantize_per_channel_affine(w, q.scale, zero, 0, -128, 127)
    same = functional.dequantize_int(q) == theirs  # torch multiplies by the reciprocal: ties may go another way
    assert same.float().mean() > 0.995 and ((functional.dequantize_int(q) - theirs).abs() <= q.scale[:, None]).all()


def test_halves_of_bytes():
    q = functional.quantize_int(torch.tensor([[-7.0, 1.0, 7.0, -2.0]]), 4)
    assert q.codes.tolist() == [[0x19, 0xE7]] and q.unpacked().tolist() == [[-7, 1, 7, -2]]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_ranges(observer):
    rows = normal(4, 4096)
    rows[:, 7] = 40.0
    low, high = find_range(rows, observer, 4)
    assert torch.equal(high, rows.amax(1)) == (observer == "minmax")
    q = functional.quantize_int(rows, 4, observer=observer)
    error = (functional.dequantize_int(q) - rows).square().sum()
    plain = (functional.dequantize_int(functional.quantize_int(rows, 4)) - rows).square().sum()
    assert observer == "percentile" or error <= plain
    if observer == "percentile":
        assert (high < 6).all() and torch.equal(low, -high)
        uneven = find_range(rows.abs(), "percentile", 8, symmetric=False)
        assert (uneven[0] >= 0).all() and (uneven[1] < 40).all()


def test_zero_has_a_code_and_zeros_have_a_scale(device):
    q = functional.quantize_int(torch.linspace(2, 3, 8, device=device), 8, "tensor", symmetric=False, signed=False)
    assert functional.dequantize_int(q).max().item() == pytest.approx(3) and q.zero.item() == 0
    q = functional.quantize_int(torch.zeros(3, 4, device=device))
    assert (q.scale == 1).all() and not functional.dequantize_int(q).any()


def test_arguments_that_do_not_fit():
    w = torch.ones(4, 6)
    for call in (
        lambda: functional.quantize_int(w, 3),
        lambda: functional.quantize_int(w, per="row"),
        lambda: functional.quantize_int(w, per="group", group=4),
        lambda: functional.quantize_int(torch.ones(4, 5), 4),
        lambda: functional.quantize_int(w.int()),
        lambda: functional.quantize_int(w, observer="best"),
        lambda: functional.fake_quantize(w, 1),
        lambda: functional.fake_quantize(w, per="channel", scale=torch.ones(3)),
        lambda: functional.fake_quantize_kbit(w, 4, "fit"),
        lambda: functional.fake_quantize_kbit(w, 9),
        lambda: functional.linear_w8a8(w, functional.quantize_int(w, 8, symmetric=False)),
        lambda: functional.linear_w8a8(torch.ones(1, 5), functional.quantize_int(w)),
    ):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per, symmetric", [("tensor", True), ("channel", False)])
def test_fake_quantize_is_quantize_and_back(device, dtype, per, symmetric):
    w = normal(8, 32).to(device, dtype).requires_grad_()
    y = functional.fake_quantize(w, 8, per, symmetric)
    assert torch.equal(y, functional.dequantize_int(functional.quantize_int(w, 8, per, symmetric)))
    y.sum().backward()
    assert (w.grad == 1).float().mean() > 0.95  # the end of an affine range may round out of it


def test_the_gradient_is_masked_as_torch_does(device):
    w = (4 * normal(8, 64)).to(device)
    scale = torch.full((8,), 0.02, device=device)
    zero = torch.full((8,), 3, dtype=torch.int32, device=device)
    ours, theirs = w.clone().requires_grad_(), w.clone().requires_grad_()
    functional.fake_quantize(ours, 8, "channel", scale=scale, zero=zero).square().sum().backward()
    torch.fake_quantize_per_channel_affine(theirs, scale, zero, 0, -128, 127).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=0.1, rtol=0)
    assert 0 < (ours.grad == 0).float().mean() < 1


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("scale", ["mse", "absmax"])
def test_fake_kbit_is_quantize_and_back(device, k, scale):
    w = normal(12, 80).to(device).requires_grad_()
    y = functional.fake_quantize_kbit(w, k, scale=scale)
    assert torch.equal(y, quantize(w.detach(), k, scale=scale).dequantize())
    y.sum().backward()
    clipped = w.detach().abs() > y.detach().abs() + 1e-9
    assert set(w.grad.unique().tolist()) <= {0.0, 1.0}
    assert w.grad.mean() > 0.8 and (w.grad[~clipped] == 1).float().mean() > 0.9
    assert k == 8 or scale == "absmax" or (w.grad == 0).any()


def test_fake_quantize_compiles():
    compiled = torch.compile(lambda w: functional.fake_quantize(w, 8, "channel"), backend="eager", fullgraph=True)
    w = normal(4, 16)
    assert torch.equal(compiled(w), functional.fake_quantize(w, 8, "channel"))


@pytest.mark.parametrize("m, cols, rows", [(1, 64, 24), (3, 50, 7), (33, 128, 64)])
def test_products_of_integers_are_exact(device, m, cols, rows):
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (m, cols), dtype=torch.int8, generator=generator)
    b = torch.randint(-128, 128, (rows, cols), dtype=torch.int8, generator=generator)
    got = functional.int8_matmul(a.to(device), b.to(device))
    assert got.dtype == torch.int32 and torch.equal(got.cpu().long(), a.long() @ b.long().T)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_linear_w8a8(device, dtype, per):
    x, w = normal(2, 5, 96, seed=1).to(device, dtype), normal(40, 96).to(device)
    bias = normal(40, seed=2).to(device, dtype)
    q = functional.quantize_int(w, per=per)
    token = functional.quantize_int(x, per="token")
    want = functional.dequantize_int(token, torch.float64) @ functional.dequantize_int(q, torch.float64).T
    got = functional.linear_w8a8(x, q, bias)
    assert got.shape == (2, 5, 40) and got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want + bias.double(), atol=0, rtol=0.02 if dtype != torch.float32 else 1e-4
    )
    dense = x.double() @ w.double().T + bias.double()
    assert (got.double() - dense).norm() < 0.02 * dense.norm()


def test_smoothing_keeps_the_model_and_helps_integers(device):
    norm = torch.nn.LayerNorm(64).to(device)
    layers = [torch.nn.Linear(64, 32, device=device), torch.nn.Linear(64, 16, device=device)]
    x = normal(128, 64, seed=1).to(device)
    with torch.no_grad():
        norm.weight[5] = 60.0  # an outlier of the activations
        before = [layer(norm(x)) for layer in layers]
        inputs = norm(x)

        def error() -> float:
            parts = [
                functional.linear_w8a8(norm(x), functional.quantize_int(layer.weight), layer.bias) - want
                for layer, want in zip(layers, before, strict=True)
            ]
            return float(sum(p.square().sum() for p in parts))

        rough = error()
        scales = functional.smooth_scales(inputs.abs().amax(0), [layer.weight for layer in layers])
        functional.fold_smooth(scales, layers, norm)
        for layer, want in zip(layers, before, strict=True):
            torch.testing.assert_close(layer(norm(x)), want, rtol=1e-3, atol=1e-3)
        assert error() < 0.5 * rough


def test_scales_from_what_calibrate_found():
    class Found:
        tokens = 4

        def diagonal(self) -> torch.Tensor:
            return torch.tensor([16.0, 0.0, 4.0])

    w = torch.tensor([[1.0, 1.0, -4.0], [0.5, 1.0, 0.0]])
    assert functional.smooth_scales(Found(), [w]).tolist() == pytest.approx([2**0.5, 1.0, 0.5])
    with pytest.raises(ValueError, match="alpha"):
        functional.smooth_scales(Found(), [w], alpha=2)
    with pytest.raises(ValueError, match="weights"):
        functional.smooth_scales(Found(), [w.T])
    linear = torch.nn.Linear(3, 3)
    before = linear.weight.clone()
    with pytest.raises(ValueError, match="before"):
        functional.fold_smooth(torch.ones(3), [linear], torch.nn.LayerNorm(4))
    assert torch.equal(linear.weight, before)


def test_a_scale_holds_its_range():
    scale, zero = choose_scale(torch.tensor([-1.0]), torch.tensor([2.0]), 8, symmetric=False)
    assert scale.item() == pytest.approx(3 / 255) and zero.item() == -43


def test_operators_are_well_behaved(device):
    w = normal(4, 64).to(device).requires_grad_()
    scale, zero = torch.full((4, 1), 0.1, device=device), torch.zeros(4, 1, dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.kbitq.fake_integers, (w, scale, zero, -8, 7))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    levels = torch.linspace(-1, 1, 8, device=device)
    torch.library.opcheck(torch.ops.kbitq.fake_bits, (w, levels, "mse"), test_utils=checks)
