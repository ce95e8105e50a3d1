"""Scale bytes in E4M4: unsigned, 4 bits of exponent, 4 of mantissa (docs/format.md section 2)."""

from __future__ import annotations

import torch

from kbitq.format import E4M4_BIAS


def encode_absmax_e4m4(absmax: torch.Tensor, bias: int = E4M4_BIAS) -> torch.Tensor:
    """The E4M4 byte nearest to each non-negative value, a tie to the even byte, saturating at 0xFF.

    ``absmax`` is a floating-point tensor of any shape (float64 is rounded to float32 first). Returns uint8 of the same
    shape, on the same device. With the default bias the largest value is 31.0 and the smallest above zero 2^-14.
    """
    value = absmax.detach().to(torch.float32).contiguous()
    table = _e4m4_values(bias, value.device)
    midpoints = 0.5 * (table[:-1] + table[1:])
    below = torch.bucketize(value, midpoints)  # midpoints < value
    tie = midpoints[below.clamp(max=midpoints.numel() - 1)] == value
    return (below + (tie & (below % 2 == 1))).to(torch.uint8)


def decode_absmax_e4m4(encoded: torch.Tensor, bias: int = E4M4_BIAS) -> torch.Tensor:
    """The values of E4M4 bytes: float32 of the shape and device of ``encoded`` (uint8; ValueError otherwise)."""
    if encoded.dtype != torch.uint8:
        raise ValueError(f"encoded must be uint8, not {encoded.dtype}")
    return _e4m4_values(bias, encoded.device)[encoded.long()]


def _e4m4_values(bias: int, device: torch.device) -> torch.Tensor:
    """All 256 values, float32, built on the device from bits: a normal byte is a shifted float32."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    normal = ((byte << 19) + ((127 - E4M4_BIAS) << 23)).view(torch.float32)
    subnormal = byte * 2.0 ** (-3 - E4M4_BIAS)
    return torch.where(byte < 16, subnormal, normal) * 2.0 ** (E4M4_BIAS - bias)
