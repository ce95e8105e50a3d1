"""GGUF blocks: bit for bit what the package gguf decodes, by every instruction set; products against float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.gguf_file import BLOCKS, digest, finite_blocks, random_blocks
from helpers.simd import at_level
from kbitq import functional
from kbitq._core import core
from kbitq.format.ggml_types import BY_NAME

DIGESTS = json.loads((Path(__file__).parent / "data" / "gguf_blocks.json").read_text())
LEVELS = core.simd_levels()
KIND = "Q4_K"


def shape_of(kind, blocks, rows=1):
    return rows, blocks // rows * BY_NAME[kind].values


def decoded(kind, raw, dtype=torch.float32):
    return functional.dequantize_gguf(torch.from_numpy(raw), kind, shape_of(kind, len(raw)), dtype)


@pytest.fixture(params=LEVELS)
def level(request):
    with at_level(request.param):
        yield request.param


@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_what_the_package_decodes(kind, level):
    """The digests were made by tests/formats/make_gguf_digests.py with gguf and ggml."""
    assert digest(decoded(kind, random_blocks(kind, 96)).numpy()) == DIGESTS[kind]


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k != "Q8_K"])
def test_equals_the_installed_package(kind):
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(kind, 64, seed=1)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    got = decoded(kind, raw).numpy().reshape(want.shape)
    assert digest(got) == digest(want)
    assert np.array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "IQ3_S"])
def test_other_dtypes_are_rounded_once(kind, dtype, level):
    raw = finite_blocks(kind, 64)
    assert torch.equal(decoded(kind, raw, dtype), decoded(kind, raw).to(dtype))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types(kind):
    values = torch.randn(3, 8).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    raw = values.view(torch.uint8)
    assert torch.equal(functional.dequantize_gguf(raw, kind, (3, 8)), values.float())
    x = torch.randn(2, 8)
    torch.testing.assert_close(functional.gguf_linear(x, raw, kind, (3, 8)), x @ values.float().t())


def product(kind, rows, batch, dtype=torch.float32, experts=()):
    """x, the raw weight, its shape, and x W^T in float64."""
    blocks = 3 if BY_NAME[kind].values < 256 else 2
    shape = (*experts, rows, blocks * BY_NAME[kind].values)
    raw = torch.from_numpy(finite_blocks(kind, int(np.prod(shape[:-1])) * blocks))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(*experts, batch, shape[-1], generator=generator).to(dtype)
    weight = functional.dequantize_gguf(raw, kind, shape).double()
    return x, raw, shape, x.double() @ weight.mT, x.double().abs() @ weight.abs().mT


@pytest.mark.parametrize("kind", BLOCKS)
def test_product_of_every_type(kind, level):
    for batch in (1, 5):
        x, raw, shape, want, size = product(kind, 7, batch)
        got = functional.gguf_linear(x, raw, kind, shape)
        assert got.dtype == torch.float32 and got.shape == (batch, 7)
        assert ((got.double() - want).abs() <= 4e-6 * size + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 4, 40])
def test_product_in_half_precision(batch, dtype):
    x, raw, shape, want, size = product(KIND, 9, batch, dtype)
    got = functional.gguf_linear(x, raw, KIND, shape)
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-5 * size).all()


@pytest.mark.parametrize("batch", [1, 3, 33])
def test_product_with_experts(batch):
    x, raw, shape, want, size = product("Q5_K", 6, batch, experts=(4,))
    got = functional.gguf_linear(x, raw, "Q5_K", shape)
    assert got.shape == (4, batch, 6)
    assert ((got.double() - want).abs() <= 4e-6 * size).all()


def test_product_takes_any_leading_sizes_and_none():
    x, raw, shape, want, _ = product(KIND, 5, 6)
    got = functional.gguf_linear(x.view(2, 3, -1), raw, KIND, shape)
    torch.testing.assert_close(got.view(6, 5).double(), want, rtol=1e-4, atol=1e-4)
    assert functional.gguf_linear(x[0], raw, KIND, shape).shape == (5,)
    assert functional.gguf_linear(x[:0], raw, KIND, shape).shape == (0, 5)


@pytest.mark.parametrize("batch", [2, 20])
def test_product_has_a_gradient(batch):
    x, raw, shape, *_ = product(KIND, 5, batch)
    x.requires_grad_()
    functional.gguf_linear(x, raw, KIND, shape).square().sum().backward()
    weight = functional.dequantize_gguf(raw, KIND, shape)
    want = torch.autograd.grad((x @ weight.t()).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-3)


def test_operators_follow_the_rules_of_torch():
    x, raw, shape, *_ = product(KIND, 5, 2)
    torch.library.opcheck(torch.ops.kbitq.dequantize_gguf, (raw, KIND, list(shape), torch.bfloat16))
    torch.library.opcheck(torch.ops.kbitq.gguf_linear, (x, raw, KIND, list(shape)))


def test_nothing_to_decode():
    assert functional.dequantize_gguf(torch.empty(0, dtype=torch.uint8), KIND, (0, 256)).shape == (0, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Q9_Z"}, "type: 'Q9_Z' is not"),
        ({"type": "I8"}, "type: 'I8' is not"),
        ({"shape": (2, 255)}, "no whole blocks of Q4_K"),
        ({"shape": (3, 256)}, r"raw: has 288 bytes; \[3, 256\] in Q4_K takes 432"),
        ({"shape": ()}, "shape: "),
        ({"raw": torch.zeros(288, dtype=torch.int8)}, "raw: is torch.int8"),
        ({"dtype": torch.float64}, "dtype: is torch.float64"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"raw": torch.zeros(288, dtype=torch.uint8), "type": KIND, "shape": (2, 256), "dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        functional.dequantize_gguf(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 512)}, "x: has 512 features, the weight 256"),
        ({"x": torch.zeros(1, 256, dtype=torch.float64)}, "x: is torch.float64"),
        ({"shape": (1, 2, 256)}, "no stack of experts"),
        ({"raw": torch.zeros(100, dtype=torch.uint8)}, "raw: has 100 bytes"),
    ],
)
def test_wrong_factors_are_named(change, message):
    arguments = {"x": torch.zeros(1, 256), "raw": torch.zeros(288, dtype=torch.uint8), "type": KIND, "shape": (2, 256)}
    with pytest.raises(ValueError, match=message):
        functional.gguf_linear(**arguments | change)
