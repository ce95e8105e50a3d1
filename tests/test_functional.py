"""The drop-in functions: calling conventions, exactness against the reference, and what they refuse."""

import numpy as np
import pytest
import torch

from kbitq import functional
from kbitq.codecs import codebooks, reference

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ALL_K = range(2, 9)
SIZES = [1, 31, 32, 33, 64, 1000, 4097]


def normal(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(n).astype(np.float32)).to(dtype)


@pytest.mark.parametrize("k", ALL_K)
def test_codebook(device, k):
    codebook = functional.create_normal_float_codebook(k, device)
    assert codebook.device.type == device and codebook.dtype == torch.float32
    assert np.array_equal(codebook.cpu().numpy(), codebooks.nf(k))


@pytest.mark.parametrize("absmax_format", ["e4m4", "fp32"])
@pytest.mark.parametrize("k", ALL_K)
def test_equals_the_reference_bit_for_bit(engine, k, absmax_format):
    for n in SIZES:
        for name, dtype in DTYPES.items():
            a = normal(n, dtype, seed=n)
            packed, absmax, codebook = functional.quantize_kbit(a.to(engine), k=k, absmax_format=absmax_format)
            want = reference.quantize_flat(a.float().numpy(), k, codebooks.nf(k), absmax_format)
            assert np.array_equal(packed.cpu().numpy(), want[0])
            assert absmax.cpu().numpy().tobytes() == want[1].tobytes()
            decoded = functional.dequantize_kbit(packed, absmax, codebook, k, n, dtype)
            expected = reference.dequantize(want[0][None], want[1][None], codebooks.nf(k), n, name)
            assert decoded.shape == (n,) and decoded.dtype == dtype
            assert np.array_equal(decoded.float().cpu().numpy(), expected[0])


def test_defaults_are_those_users_know(device):
    packed, absmax, codebook = functional.quantize_kbit(normal(100).to(device))
    assert packed.dtype == torch.int32 and packed.shape == (4 * 4,)
    assert absmax.dtype == torch.uint8 and absmax.shape == (4,)
    assert np.array_equal(codebook.cpu().numpy(), codebooks.nf(4))
    assert functional.dequantize_kbit(packed, absmax, codebook, 4, 100).dtype == torch.float16


def test_any_shape_and_stride_is_flattened_in_order(device):
    a = normal(6 * 50).to(device).reshape(6, 5, 10)
    for view in (a, a.transpose(0, 2), a[:, ::2], a[..., 3:7]):
        strided, plain = functional.quantize_kbit(view, 3), functional.quantize_kbit(view.flatten().clone(), 3)
        assert all(torch.equal(x, y) for x, y in zip(strided, plain, strict=True))


def test_fp32_keeps_exact_maxima_and_e4m4_saturates_at_31(device):
    a = torch.cat([normal(32) * 1000, normal(32) * 1e-6, torch.zeros(32)])
    maxima = a.reshape(3, 32).abs().amax(1)
    absmax = functional.quantize_kbit(a.to(device), absmax_format="fp32")[1]
    assert torch.equal(absmax.cpu(), maxima)
    encoded = functional.quantize_kbit(a.to(device))[1]
    assert torch.equal(encoded.cpu(), functional.encode_absmax_e4m4(maxima))
    assert functional.decode_absmax_e4m4(encoded).tolist() == [31.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "levels",
    [
        np.linspace(0.1, 1, 8),
        np.linspace(-1, -0.1, 8),
        [-0.5, -0.5, 0, 0, 0, 0.5, 0.5, 0.5],
        [-3, -1, 0, 1, 2, 4, 8, 16],
        [-1e-30, 0, 1e-30, 0.1, 0.2, 0.3, 0.4, 0.5],
    ],
    ids=["positive", "negative", "duplicates", "beyond one", "tiny"],
)
@pytest.mark.parametrize("absmax_format", ["e4m4", "fp32"])
def test_any_ascending_codebook_is_used_as_given(engine, levels, absmax_format):
    levels = torch.tensor(np.array(levels), dtype=torch.float32, device=engine)
    a = normal(200, seed=3)
    packed, absmax, codebook = functional.quantize_kbit(a.to(engine), 3, levels, absmax_format)
    assert codebook is levels
    want = reference.quantize_flat(a.numpy(), 3, levels.cpu().numpy(), absmax_format)
    assert np.array_equal(packed.cpu().numpy(), want[0])
    assert absmax.cpu().numpy().tobytes() == want[1].tobytes()


def test_float32_absmax_is_not_rounded_on_the_way_back(device):
    codebook = functional.create_normal_float_codebook(2, device)
    packed = torch.tensor([-1, -1], dtype=torch.int32, device=device)  # every index is 3: level 1.0
    absmax = torch.tensor([1.2345679], device=device)
    decoded = functional.dequantize_kbit(packed, absmax, codebook, 2, 32, torch.float32)
    assert torch.equal(decoded, absmax.expand(32))


@pytest.mark.parametrize("n", [1, 32, 50])
def test_out_is_written_in_place(device, n):
    packed, absmax, codebook = functional.quantize_kbit(normal(n).to(device), 4)
    out = torch.full(((n + 31) // 32 * 32 + 7,), 9.0, dtype=torch.bfloat16, device=device)
    result = functional.dequantize_kbit(packed, absmax, codebook, 4, n, torch.bfloat16, out=out)
    assert result.shape == (n,) and result.data_ptr() == out.data_ptr()
    assert torch.equal(result, functional.dequantize_kbit(packed, absmax, codebook, 4, n, torch.bfloat16))
    assert (out[-7:] == 9).all()


def test_out_that_does_not_fit_is_refused():
    packed, absmax, codebook = functional.quantize_kbit(normal(50), 4)
    args = (packed, absmax, codebook, 4, 50, torch.float16)
    with pytest.raises(ValueError, match="does not match"):
        functional.dequantize_kbit(*args, out=torch.empty(64))
    with pytest.raises(ValueError, match="need at least 64"):
        functional.dequantize_kbit(*args, out=torch.empty(63, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        functional.dequantize_kbit(*args, out=torch.empty(128, dtype=torch.float16)[::2])


def test_padded_buffers_are_read_as_far_as_needed(device):
    """The reference implementation pads its outputs; longer buffers are welcome."""
    packed, absmax, codebook = functional.quantize_kbit(normal(100).to(device), 3)
    longer = functional.dequantize_kbit(
        torch.cat([packed, packed[:3]]), torch.cat([absmax, absmax[:1]]), codebook, 3, 100
    )
    assert torch.equal(longer, functional.dequantize_kbit(packed, absmax, codebook, 3, 100))
    with pytest.raises(ValueError, match="12 packed words and 4 scales"):
        functional.dequantize_kbit(packed[:11], absmax, codebook, 3, 100)
    with pytest.raises(ValueError, match="12 packed words and 4 scales"):
        functional.dequantize_kbit(packed, absmax[:3], codebook, 3, 100)


def test_nothing_in_nothing_out(device):
    packed, absmax, codebook = functional.quantize_kbit(torch.empty(0, device=device), 3)
    assert packed.numel() == 0 and absmax.numel() == 0
    assert functional.dequantize_kbit(packed, absmax, codebook, 3, 0).shape == (0,)


def test_wrong_arguments_are_refused():
    a = normal(64)
    packed, absmax, codebook = functional.quantize_kbit(a)
    for k in (1, 9):
        with pytest.raises(ValueError, match=r"2\.\.8"):
            functional.quantize_kbit(a, k)
        with pytest.raises(ValueError, match=r"2\.\.8"):
            functional.create_normal_float_codebook(k)
    for call, complaint in [
        (lambda: functional.quantize_kbit(a.double()), "float16, bfloat16 or float32"),
        (lambda: functional.quantize_kbit(a, absmax_format="fp16"), "absmax_format"),
        (lambda: functional.quantize_kbit(a, 3, codebook), "8 entries"),
        (lambda: functional.quantize_kbit(a, 4, codebook.double()), "float32"),
        (lambda: functional.quantize_kbit(a, 4, codebook.flip(0)), "ascending"),
        (lambda: functional.dequantize_kbit(packed, absmax.half(), codebook, 4, 64), "uint8 .* or float32"),
        (lambda: functional.dequantize_kbit(packed, absmax, codebook, 4, 64, torch.float64), "dtype"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            call()


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_e4m4_scales_cost_little(k):
    a = normal(1 << 16, torch.float16, seed=9)
    codebook = functional.create_normal_float_codebook(k)
    noise = {}
    for absmax_format in ("fp32", "e4m4"):
        packed, absmax, _ = functional.quantize_kbit(a, k, codebook, absmax_format)
        decoded = functional.dequantize_kbit(packed, absmax, codebook, k, a.numel(), torch.float32)
        noise[absmax_format] = (decoded - a.float()).square().mean()
    assert 10 * torch.log10(noise["e4m4"] / noise["fp32"]) < 0.5
