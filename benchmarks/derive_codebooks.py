"""Derives the `optimal` codebooks of kbitq/codecs/_optimal_levels.py, or checks them (docs/format.md section 3).

Lloyd's iteration under the `mse` rule on independent N(0,1) values: quantize with the current levels, then move each
level to where the squared error of its elements is least, sum(s * v) / sum(s * s), s being the scale of the element's
block. The two signs are pooled, so the levels stay symmetric. The start is 0.6u + 0.4u|u| on an even grid u (trellis:
0.75u + 0.25u|u|). The iteration ends at its fixed point, when no float32 level moves any more, or after a fixed number
of steps: for the trellis, where a level that moves turns walks over, there is none.

    python benchmarks/derive_codebooks.py            # derive all and say how far the committed constants are
    python benchmarks/derive_codebooks.py --check    # the same, and exit 1 if one is off by more than 1e-6
    python benchmarks/derive_codebooks.py --write    # rewrite the constants (which are normative: only ever once)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kbitq import functional, ops
from kbitq.codecs.base import Request, get_codec
from kbitq.codecs.planes import ABSMAX, CODEBOOK, PLANES, Planes

SEED, FRESH_SEED = 0, 1  # of the samples derived from, and of those that the result is measured on
VALUES = 2**21
MAX_ITERATIONS = {"planes": 1000, "trellis": 60, "trellis/128": 60}
TOLERANCE = 1e-6
PER_LINE = 8
CODECS = ("planes", "trellis", "trellis/128")
CONSTANTS = Path(__file__).resolve().parent.parent / "kbitq" / "codecs" / "_optimal_levels.py"
HEADER = '''"""Positive halves of the `optimal` codebooks, ascending; the negative halves mirror them.

Written by benchmarks/derive_codebooks.py, which also checks that it still derives them. Normative: never edit.
"""

# fmt: off
POSITIVE_HALF: dict[int, tuple[float, ...]] = {
'''
BETWEEN = """}

# Of the codec `trellis`, by the columns that share a scale, then by K.
TRELLIS_POSITIVE_HALF: dict[int, dict[int, tuple[float, ...]]] = {
"""


def normal_blocks(seed: int, codec: Planes) -> torch.Tensor:
    """N(0,1) values, float32 ``[n, cut]``, from NumPy's legacy generator, whose stream never changes."""
    values = np.random.RandomState(seed).standard_normal((VALUES // codec.cut, codec.cut))
    return torch.from_numpy(values.astype(np.float32))


def start(codec: Planes, k: int) -> np.ndarray:
    u, bend = np.linspace(-1, 1, 2 ** (k + codec.extra_bits)), 0.25 if codec.extra_bits else 0.4
    return (1 - bend) * u + bend * u * np.abs(u)


def quantize(codec: Planes, w: torch.Tensor, k: int, levels: np.ndarray) -> dict[str, torch.Tensor]:
    return codec.encode(w, Request(k, ops.scan(w)[0], "mse", torch.from_numpy(levels)))


def centroids(codec: Planes, w: torch.Tensor, k: int, levels: np.ndarray) -> np.ndarray:
    """One step of the iteration: float64, symmetric, normalised. A level that nothing chose stays."""
    parts = quantize(codec, w, k, levels)
    v = (w / parts[CODEBOOK][-1]).double().numpy()  # the stored codebook is levels * 2^x, and the last level is 1
    index = codec.indices(parts, w.shape[1]).numpy().ravel()
    s = functional.decode_absmax_e4m4(parts[ABSMAX]).double().numpy()
    top = np.bincount(index, (s * v).ravel(), len(levels))
    bottom = np.bincount(index, np.broadcast_to(s * s, v.shape).ravel(), len(levels))
    top, bottom = top - top[::-1], bottom + bottom[::-1]
    moved = np.sort(np.divide(top, bottom, out=levels.astype(np.float64), where=bottom > 0))
    return moved / moved[-1]


def derive(codec: Planes, k: int, w: torch.Tensor) -> tuple[np.ndarray, int]:
    """Levels, float64, and the number of iterations that they took."""
    exact = start(codec, k)
    for iteration in range(1, MAX_ITERATIONS[codec.name] + 1):
        levels = exact.astype(np.float32)
        exact = centroids(codec, w, k, levels)
        if np.array_equal(exact.astype(np.float32), levels):
            return exact, iteration
    return exact, MAX_ITERATIONS[codec.name]


def sqnr(codec: Planes, w: torch.Tensor, k: int, levels: np.ndarray) -> float:
    signal, noise, _ = codec.stats(w, quantize(codec, w, k, levels)).sum(0).tolist()
    return 10 * float(np.log10(signal / noise))


def written(levels: np.ndarray, indent: str) -> str:
    half = [f"{level:.9f}" for level in levels[len(levels) // 2 :]]
    lines = [", ".join(half[i : i + PER_LINE]) for i in range(0, len(half), PER_LINE)]
    return "(\n" + "".join(f"{indent}    {line},\n" for line in lines) + f"{indent}),\n"


def write(derived: dict[tuple[str, int], np.ndarray]) -> None:
    """All constants; those of a codec that was not derived now stay."""
    text = HEADER
    for k in PLANES.ks:
        text += f"    {k}: " + written(derived.get((PLANES.name, k), PLANES.normal_levels(k)), "    ")
    text += BETWEEN
    for name in CODECS[1:]:
        codec = get_codec(name)
        text += f"    {codec.cut}: {{\n"
        for k in codec.ks:
            found = derived[name, k] if (name, k) in derived else codec.normal_levels(k)
            text += f"        {k}: " + written(found, "        ")
        text += "    },\n"
    CONSTANTS.write_text(text + "}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", nargs="*", default=list(CODECS), choices=CODECS, help="which codecs (default: all)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit 1 if the committed constants are not reproduced")
    action.add_argument("--write", action="store_true", help="rewrite the constants of these codecs")
    options = parser.parse_args()
    derived, worst = {}, 0.0
    for name in options.codec:
        codec = get_codec(name)
        samples, fresh = (normal_blocks(seed, codec) for seed in (SEED, FRESH_SEED))
        for k in codec.ks:
            began = time.perf_counter()
            derived[name, k], iterations = derive(codec, k, samples)
            off = np.inf if options.write else float(np.abs(derived[name, k] - codec.normal_levels(k)).max())
            worst = max(worst, off)
            db = sqnr(codec, fresh, k, derived[name, k].astype(np.float32))
            seconds = time.perf_counter() - began
            print(
                f"{name} K={k}: {db:.3f} dB on fresh samples, {iterations} iterations, {seconds:.0f} s, "
                f"constants off by {off:.1e}",
                flush=True,
            )
    if options.write:
        write(derived)
    return int(options.check and worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
