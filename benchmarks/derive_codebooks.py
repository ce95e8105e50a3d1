"""Derives the `optimal` codebooks of kbitq/codecs/_optimal_levels.py, or checks them (docs/format.md section 3).

Lloyd's iteration under the `mse` rule on blocks of 32 independent N(0,1) values: quantize with the current levels, then
move each level to where the squared error of its elements is least, sum(s * v) / sum(s * s), s being the scale of the
element's block. The two signs are pooled, so the levels stay symmetric. The start is 0.6u + 0.4u|u| on an even grid u.
The iteration ends at its fixed point: when no float32 level moves any more.

    python benchmarks/derive_codebooks.py            # derive all K and say how far the committed constants are
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
from kbitq.codecs import codebooks
from kbitq.format import BLOCK, K_MAX, K_MIN

SEED, FRESH_SEED = 0, 1  # of the samples derived from, and of those that the result is measured on
BLOCKS = 2**16
MAX_ITERATIONS = 1000
TOLERANCE = 1e-6
PER_LINE = 8
CONSTANTS = Path(__file__).resolve().parent.parent / "kbitq" / "codecs" / "_optimal_levels.py"
HEADER = '''"""Positive halves of the `optimal` codebooks, ascending; the negative halves mirror them.

Written by benchmarks/derive_codebooks.py, which also checks that it still derives them. Normative: never edit.
"""

# fmt: off
POSITIVE_HALF: dict[int, tuple[float, ...]] = {
'''


def normal_blocks(seed: int, blocks: int = BLOCKS) -> torch.Tensor:
    """N(0,1) values, float32 ``[blocks, 32]``, from NumPy's legacy generator, whose stream never changes."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((blocks, BLOCK)).astype(np.float32))


def start(k: int) -> np.ndarray:
    u = np.linspace(-1, 1, 2**k)
    return 0.6 * u + 0.4 * u * np.abs(u)


def quantize(w: torch.Tensor, levels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ops.quantize(w, torch.from_numpy(levels), amax=ops.scan(w)[0], scale="mse")


def centroids(w: torch.Tensor, levels: np.ndarray) -> np.ndarray:
    """One step of the iteration: float64 ``[2^k]``, symmetric, normalised. A level that nothing chose stays."""
    packed, absmax, codebook = quantize(w, levels)
    v = (w / codebook[-1]).double().numpy()  # the stored codebook is levels * 2^x, and the last level is 1
    ones, counting = torch.ones(absmax.shape), torch.arange(len(levels), dtype=torch.float32)
    index = ops.dequantize(packed, ones, counting, BLOCK).numpy().astype(np.int64).ravel()
    s = functional.decode_absmax_e4m4(absmax).double().numpy()
    top = np.bincount(index, (s * v).ravel(), len(levels))
    bottom = np.bincount(index, np.broadcast_to(s * s, v.shape).ravel(), len(levels))
    top, bottom = top - top[::-1], bottom + bottom[::-1]
    moved = np.sort(np.divide(top, bottom, out=levels.astype(np.float64), where=bottom > 0))
    return moved / moved[-1]


def derive(k: int, w: torch.Tensor) -> tuple[np.ndarray, int]:
    """Levels, float64 ``[2^k]``, and the number of iterations that they took."""
    exact = start(k)
    for iteration in range(1, MAX_ITERATIONS + 1):
        levels = exact.astype(np.float32)
        exact = centroids(w, levels)
        if np.array_equal(exact.astype(np.float32), levels):
            return exact, iteration
    return exact, MAX_ITERATIONS


def sqnr(w: torch.Tensor, levels: np.ndarray) -> float:
    signal, noise, _ = ops.stats(w, *quantize(w, levels)).sum(0).tolist()
    return 10 * float(np.log10(signal / noise))


def write(derived: dict[int, np.ndarray]) -> None:
    text = HEADER
    for k, levels in derived.items():
        half = [f"{level:.9f}" for level in levels[len(levels) // 2 :]]
        lines = [", ".join(half[i : i + PER_LINE]) for i in range(0, len(half), PER_LINE)]
        text += f"    {k}: (\n" + "".join(f"        {line},\n" for line in lines) + "    ),\n"
    CONSTANTS.write_text(text + "}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--k", type=int, nargs="*", default=list(range(K_MIN, K_MAX + 1)), help="which K (default: all)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit 1 if the committed constants are not reproduced")
    action.add_argument("--write", action="store_true", help="rewrite the constants; needs all K")
    options = parser.parse_args()
    if options.write and options.k != list(range(K_MIN, K_MAX + 1)):
        parser.error("--write needs all K")
    samples, fresh = normal_blocks(SEED), normal_blocks(FRESH_SEED)
    derived, worst = {}, 0.0
    for k in options.k:
        began = time.perf_counter()
        derived[k], iterations = derive(k, samples)
        off = float(np.abs(derived[k] - codebooks.OPTIMAL[k]).max())
        worst = max(worst, off)
        db = sqnr(fresh, derived[k].astype(np.float32))
        seconds = time.perf_counter() - began
        print(
            f"K={k}: {db:.3f} dB on fresh samples, {iterations} iterations, {seconds:.0f} s, constants off by {off:.1e}"
        )
    if options.write:
        write(derived)
    return int(options.check and worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
