"""NF4: the bytes of bitsandbytes 0.50.2 on a CPU, as digests; the linear product beside float64."""

import hashlib

import numpy as np
import pytest
import torch

from helpers.simd import at_level
from kbitq import functional
from kbitq._core import core
from kbitq.codecs.nested_scales import dynamic_map

# dtype, shape, block, nested; digests of codes and scales, and of what they decode to (made by bitsandbytes).
BITSANDBYTES = [
    ("float32", (48, 640), 64, False, "a46ec87e57d91749", "4fa7a12a77375bae"),
    ("float32", (48, 640), 64, True, "01cf86c49ba5b5bc", "503384a1c3c80463"),
    ("float32", (37, 65), 128, True, "f8875caffc43b5ab", "eb423a61388bd790"),
    ("float32", (3, 4097), 4096, False, "716bb34d7d9f3ed4", "b5ef404d8832bb6e"),
    ("bfloat16", (48, 640), 64, False, "722b3bbaeb3ddd39", "6eeba79e1cc6443f"),
    ("bfloat16", (48, 640), 64, True, "2a251331c2de59f9", "63d86e00801d2fca"),
    ("bfloat16", (37, 65), 128, True, "54e99b51cfdba2ca", "36c5299c21609361"),
    ("bfloat16", (3, 4097), 4096, False, "ffb96ef0830364e5", "03ef2582401d59a3"),
    ("float16", (48, 640), 64, False, "5df105aa45323f91", "8a9f58952245584d"),
    ("float16", (48, 640), 64, True, "ad55da33cb121128", "1f9d299c0a234163"),
    ("float16", (37, 65), 128, True, "354128c0df93a70f", "a8e5a0dc02127ae5"),
    ("float16", (3, 4097), 4096, False, "2cfdb06bac5e602b", "fcf4bc00ec459316"),
]


def weights(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    w = torch.from_numpy(np.random.RandomState(7).standard_normal(shape).astype(np.float32) * 0.02)
    w.view(-1)[64:128] = 0
    return w.to(dtype)


def digest(*tensors: torch.Tensor | None) -> str:
    h = hashlib.sha256()
    for t in tensors:
        if t is not None:
            h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


@pytest.fixture(params=core.simd_levels())
def simd(request):
    with at_level(request.param):
        yield request.param


@pytest.mark.parametrize("dtype, shape, block, nested, stored, decoded", BITSANDBYTES)
def test_bytes_are_those_of_bitsandbytes(simd, dtype, shape, block, nested, stored, decoded):
    w = weights(shape, getattr(torch, dtype))
    q = functional.quantize_nf4(w, block, nested)
    assert digest(q.codes, q.absmax, q.nested_absmax, q.nested_offset) == stored
    out = functional.dequantize_nf4(q)
    assert out.shape == w.shape and out.dtype == w.dtype and digest(out) == decoded


def test_the_map_is_that_of_bitsandbytes():
    assert digest(dynamic_map(torch.device("cpu"))) == "e732639a65f497b4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [64, 4096, 4097, 63, 1])
def test_devices_agree(device, dtype, count):
    w = weights((count,) if count != 64 else (2, 32), dtype)
    here, there = functional.quantize_nf4(w, 64), functional.quantize_nf4(w.to(device), 64)
    assert torch.equal(here.codes, there.codes.cpu()) and torch.equal(here.absmax, there.absmax.cpu())
    assert torch.equal(functional.dequantize_nf4(here), functional.dequantize_nf4(there).cpu())


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("batch", [1, 3, 8, 40])
def test_linear_beside_float64(simd, device, dtype, bound, block, batch):
    q = functional.quantize_nf4(weights((77, 768), torch.float32), block).to(device)
    x = torch.randn(batch, 768, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    bias = torch.linspace(-1, 1, 77, device=device).to(dtype)
    want = x.double() @ functional.dequantize_nf4(q, torch.float32).double().T + bias.double()
    got = functional.nf4_linear(x, q, bias)
    assert got.dtype == dtype and (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.skipif(not core.tiles(), reason="the processor has no tile registers (AMX)")
@pytest.mark.parametrize(
    "shape, block", [((77, 768), 64), ((16, 64), 64), ((33, 1024), 128), ((5, 4096), 4096)], ids=str
)
@pytest.mark.parametrize("batch", [3, 8, 16])
def test_tiles_agree_with_vectors(shape, block, batch):
    """The same products, added up in another order; threads share the rows of W."""
    q = functional.quantize_nf4(weights(shape, torch.float32), block)
    x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.linspace(-1, 1, shape[0]).bfloat16()
    try:
        core.allow_tiles(False)
        want = functional.nf4_linear(x, q, bias).double()
    finally:
        core.allow_tiles(True)
    got = functional.nf4_linear(x, q, bias).double()
    assert (got - want).norm() <= 1e-3 * want.norm()


def test_linear_where_blocks_run_on_across_rows(device):
    q = functional.quantize_nf4(weights((48, 100), torch.float32), 64).to(device)
    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(1)).to(device)
    want = x @ functional.dequantize_nf4(q).T
    torch.testing.assert_close(functional.nf4_linear(x, q), want, rtol=1e-4, atol=1e-4)


def test_linear_with_nested_scales(device):
    q = functional.quantize_nf4(weights((16, 128), torch.float32), 64, nested=True).to(device)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(functional.nf4_linear(x, q), functional.nf4_linear(x, q.plain()))


def test_gradients(device):
    q = functional.quantize_nf4(weights((24, 128), torch.float32)).to(device)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    bias = torch.zeros(24, device=device, requires_grad=True)
    functional.nf4_linear(x, q, bias).square().sum().backward()
    dense = x.detach().clone().requires_grad_()
    (dense @ functional.dequantize_nf4(q).T).square().sum().backward()
    torch.testing.assert_close(x.grad, dense.grad, rtol=1e-4, atol=1e-4)
    assert bias.grad is not None and bias.grad.abs().sum() > 0


def test_operators_are_well_behaved(device):
    w, x = weights((8, 128), torch.float32).to(device), torch.ones(2, 128, device=device, requires_grad=True)
    q = functional.quantize_nf4(w)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kbitq.nf4_quantize, (w, 64), test_utils=checks)
    torch.library.opcheck(
        torch.ops.kbitq.nf4_dequantize, (q.codes, q.absmax, 1024, 64, torch.bfloat16), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.kbitq.nf4_linear,
        (x, q.codes, q.absmax, 8, 64),
        test_utils=(*checks, "test_autograd_registration"),
    )


@pytest.mark.parametrize("block", [32, 96, 8192, 0, -64])
def test_blocks_that_there_are_not(block):
    with pytest.raises(ValueError, match="block"):
        functional.quantize_nf4(torch.ones(4096), block)


def test_what_does_not_fit_is_named():
    q = functional.quantize_nf4(torch.ones(8, 64))
    with pytest.raises(ValueError, match="x: a weight"):
        functional.nf4_linear(torch.ones(1, 128), q)
    with pytest.raises(ValueError, match="bias"):
        functional.nf4_linear(torch.ones(1, 64), q, torch.ones(3))
    with pytest.raises(ValueError, match="float64"):
        functional.quantize_nf4(torch.ones(64, dtype=torch.float64))
    with pytest.raises(ValueError, match="matrix"):
        functional.nf4_linear(torch.ones(1, 64), functional.quantize_nf4(torch.ones(64)))
