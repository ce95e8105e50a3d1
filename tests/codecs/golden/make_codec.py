"""Wrote codec.safetensors, once, with the numpy reference. Not run by the tests: its bytes are the format's promise.

Running it again must give the same file; a difference means that checkpoints out there would be read otherwise.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kbitq.codecs import codebooks, reference

RULES = (("nf", "absmax"), ("nf", "mse"), ("optimal", "mse"))


def sources() -> dict[str, np.ndarray]:
    """Ordinary weights with a tail, a zero block and an outlier; and magnitudes at both ends of float32."""
    rng = np.random.RandomState(1858)
    plain = rng.standard_normal((4, 75)).astype(np.float32) * np.float32(0.03)
    plain[1, 32:64], plain[2, 5], plain[3, ::2] = 0, 1.5, -0.0
    return {
        "plain": plain,
        "large": (rng.standard_normal((2, 40)).clip(-3, 3) * 1e38).astype(np.float32),
        "small": (rng.standard_normal((2, 40)) * 1e-30).astype(np.float32),
    }


def main() -> None:
    tensors = {"importance": np.random.RandomState(2).exponential(size=75).astype(np.float32)}
    for name, w in sources().items():
        tensors[name] = w
        for k in range(2, 9):
            for codebook, scale in RULES:
                result = reference.quantize(w, k, codebooks.levels(codebook, k)[0], scale=scale)
                for part, value in zip(("packed", "absmax", "codebook"), result, strict=True):
                    tensors[f"{name}.k{k}.{codebook}.{scale}.{part}"] = value
    for k in range(2, 9):
        result = reference.quantize(
            tensors["plain"], k, codebooks.optimal(k), importance=tensors["importance"], dtype="F32"
        )
        for part, value in zip(("packed", "absmax"), result[:2], strict=True):
            tensors[f"plain.k{k}.importance.{part}"] = value
    # Codebooks are levels * 2^x: kept once a source in full for K up to 4, to stay small.
    small = {n: t for n, t in tensors.items() if not (n.endswith("codebook") and t.size > 16)}
    save_file(small, Path(__file__).with_name("codec.safetensors"))


if __name__ == "__main__":
    main()
