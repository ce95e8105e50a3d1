"""The E4M4 scale byte, exhaustively, against the definition: the nearest of 256 values, a tie to the even byte."""

import numpy as np
import pytest
import torch

from kbitq import functional
from kbitq.codecs import reference

BYTES = np.arange(256, dtype=np.uint8)


def value_of(byte: int) -> float:
    """format.md section 2, in plain Python."""
    e, m = byte >> 4, byte & 15
    return 2.0 ** (e - 11) * (1 + m / 16) if e else 2.0**-10 * (m / 16)


VALUES = np.array([value_of(b) for b in range(256)])
MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2


def nearest(values: np.ndarray) -> np.ndarray:
    """By brute force over all 256 distances, in float64 (exact up to 64, and nothing changes above)."""
    distance = np.abs(values.astype(np.float64).clip(max=64).reshape(-1, 1) - VALUES)
    least = distance == distance.min(axis=1, keepdims=True)
    first, last = least.argmax(axis=1), 255 - least[:, ::-1].argmax(axis=1)
    return np.where(first % 2 == 0, first, last).astype(np.uint8)


def encode_core(values: np.ndarray, device: str) -> np.ndarray:
    """The core's own encoder, seen through a quantizer: each value is the absolute maximum of a block of its own."""
    _, absmax, _ = functional.quantize_kbit(torch.from_numpy(np.repeat(values, 32)).to(device), k=2)
    return absmax.cpu().numpy()


def encode_torch(values: np.ndarray, device: str) -> np.ndarray:
    return functional.encode_absmax_e4m4(torch.from_numpy(values).to(device)).cpu().numpy()


def encode_reference(values: np.ndarray, device: str) -> np.ndarray:
    return reference.encode_e4m4(values)


@pytest.fixture(params=[encode_reference, encode_torch, encode_core], ids=["reference", "functional", "core"])
def encode(request, device):
    return lambda values: request.param(np.asarray(values, np.float32), device)


def test_every_byte_decodes_to_its_value(device):
    assert np.array_equal(reference.decode_e4m4(BYTES), VALUES.astype(np.float32))
    decoded = functional.decode_absmax_e4m4(torch.from_numpy(BYTES).to(device))
    assert np.array_equal(decoded.cpu().numpy(), VALUES.astype(np.float32))


def test_every_value_encodes_to_its_byte(encode):
    assert np.array_equal(encode(VALUES), BYTES)


def test_every_midpoint_goes_to_the_even_byte(encode):
    even = BYTES[:-1] + (BYTES[:-1] & 1)
    assert np.array_equal(encode(MIDPOINTS), even)


@pytest.mark.parametrize("towards, side", [(-np.inf, 0), (np.inf, 1)], ids=["below", "above"])
def test_float_neighbours_of_every_midpoint_and_value(encode, towards, side):
    beside = np.nextafter(MIDPOINTS.astype(np.float32), np.float32(towards))
    assert np.array_equal(encode(beside), BYTES[:-1] + side)
    near = np.nextafter(VALUES[1:].astype(np.float32), np.float32(towards))
    assert np.array_equal(encode(near), BYTES[1:])


def test_dense_sweep_past_both_ends(encode):
    """2^-40 to 2^20 in steps of 1/64 of an octave, and linearly through the subnormal bytes and around the top."""
    sweep = np.concatenate(
        [2.0 ** np.arange(-40, 20, 1 / 64), np.linspace(0, 2**-9, 5000), np.linspace(28, 40, 5000)]
    ).astype(np.float32)
    assert np.array_equal(encode(sweep), nearest(sweep))


def test_random_bit_patterns(encode):
    bits = np.random.RandomState(5).randint(0, 0x7F800000, 20_000).astype(np.uint32)
    values = bits.view(np.float32)
    assert np.array_equal(encode(values), nearest(values))


def test_the_core_at_every_simd_level(engine):
    beside = [np.nextafter(MIDPOINTS.astype(np.float32), np.float32(to)) for to in (-np.inf, np.inf)]
    values = np.concatenate([VALUES, MIDPOINTS, *beside, [31.5, 32, 100, 3e38, 1e-45]]).astype(np.float32)
    assert np.array_equal(encode_core(values, engine), nearest(values))


def test_carry_and_saturation(encode):
    """What clamping the mantissa and the exponent apart gets wrong."""
    assert np.array_equal(encode([1.99, 32.0, 100.0, 3e38, 0.0, 1e-45]), encode([2.0, 31.0, 31.0, 31.0, 0.0, 0.0]))


@pytest.mark.parametrize("bias", [0, 7, 11, 15])
def test_other_biases_scale_by_a_power_of_two(bias):
    values = torch.from_numpy(VALUES.astype(np.float32)) * 2.0 ** (11 - bias)
    assert torch.equal(functional.decode_absmax_e4m4(torch.arange(256, dtype=torch.uint8), bias), values)
    assert torch.equal(functional.encode_absmax_e4m4(values, bias), torch.arange(256, dtype=torch.uint8))
    assert np.array_equal(reference.encode_e4m4(values.numpy(), bias), BYTES)


def test_shape_is_kept_and_decoding_refuses_other_dtypes():
    encoded = functional.encode_absmax_e4m4(torch.ones(2, 3, 4, dtype=torch.bfloat16))
    assert encoded.shape == (2, 3, 4) and encoded.dtype == torch.uint8
    assert functional.decode_absmax_e4m4(encoded).shape == (2, 3, 4)
    with pytest.raises(ValueError, match="uint8"):
        functional.decode_absmax_e4m4(torch.ones(3))
