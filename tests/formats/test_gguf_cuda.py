"""GGUF blocks on a GPU: the same bits as on the CPU, and products against float64."""

import numpy as np
import pytest
import torch

from helpers.gguf_file import BLOCKS, finite_blocks, random_blocks
from kbitq import functional
from kbitq.format.ggml_types import BY_NAME

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_device")]


@pytest.mark.parametrize("kind", BLOCKS)
def test_same_bits_as_on_the_cpu(kind):
    shape = (8, 12 * BY_NAME[kind].values)
    raw = torch.from_numpy(random_blocks(kind, 96))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        want = functional.dequantize_gguf(raw, kind, shape, dtype)
        got = functional.dequantize_gguf(raw.cuda(), kind, shape, dtype).cpu()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_products(kind, dtype):
    for experts, batch, rows in (((), 1, 37), ((), 11, 5), ((3,), 4, 6), ((), 64, 9)):
        shape = (*experts, rows, 2 * 256)
        raw = torch.from_numpy(finite_blocks(kind, int(np.prod(shape)) // BY_NAME[kind].values)).cuda()
        x = torch.randn(*experts, batch, shape[-1], device="cuda").to(dtype)
        weight = functional.dequantize_gguf(raw, kind, shape).double()
        want, size = x.double() @ weight.mT, x.double().abs() @ weight.abs().mT
        got = functional.gguf_linear(x, raw, kind, shape)
        tolerance = 1e-5 * size if dtype == torch.float32 and batch < 64 else 2.0**-7 * size / 4 + 2.0**-8 * want.abs()
        assert got.dtype == dtype and got.is_cuda
        assert ((got.double() - want).abs() <= tolerance + 1e-30).all()


def test_tensors_that_begin_anywhere():
    raw = torch.from_numpy(finite_blocks("Q4_0", 32)).view(-1)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), raw]).cuda()[1:]
    x = torch.randn(257, device="cuda").to(torch.bfloat16)[1:]
    want = functional.dequantize_gguf(raw, "Q4_0", (4, 256))
    assert functional.dequantize_gguf(odd, "Q4_0", (4, 256)).cpu().equal(want)
    torch.testing.assert_close(
        functional.gguf_linear(x, odd, "Q4_0", (4, 256)).cpu(),
        (want @ x.cpu().float()).bfloat16(),
        rtol=0.02,
        atol=0.02,
    )
