"""What other formats reach on the same weights, measured once with their own quantizers, without calibration data."""

from __future__ import annotations

from dataclasses import dataclass

DB_PER_BIT = 6.0206  # 20 log10(2): the limit for independent normal values gains so much with each bit


@dataclass(frozen=True)
class Known:
    """A format: bits per weight, and SQNR in dB on MiniLM's encoder, on pycode-llama-26m and on N(0,1)."""

    name: str
    bits_per_weight: float
    minilm: float
    pycode: float
    normal: float


OTHERS = (
    Known("IQ2_S", 2.5625, 11.15, 11.52, 11.54),
    Known("Q2_K", 2.625, 10.34, 10.54, 10.56),
    Known("Q3_K", 3.4375, 16.16, 16.40, 16.44),
    Known("IQ3_S", 3.4375, 15.30, 15.58, 15.60),
    Known("IQ4_XS", 4.25, 22.04, 22.28, 22.31),
    Known("MXFP4", 4.25, 18.60, 18.84, 18.78),
    Known("Q4_K", 4.5, 22.66, 22.91, 22.93),
    Known("NVFP4", 4.5, 20.47, 20.21, 20.43),
    Known("Q5_K", 5.5, 28.57, 28.82, 28.85),
    Known("Q6_K", 6.5625, 34.68, 34.99, 35.02),
)

NORMAL_DB = {2: 9.79, 3: 15.93, 4: 22.26, 5: 28.38, 6: 34.3, 7: 40.2, 8: 46.2}
"""SQNR of the optimal codebook with the mse rule on N(0,1), by K (docs/format.md section 3)."""
