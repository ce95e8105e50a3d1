"""Speed of the linear layer from packed weights on the CPU, beside torch's own in bfloat16 and float32, in one run.

Each result is checked against the decoded weight in float64 before it is timed. The layers take turns; a time is the
best of several, since other work on the machine only ever makes a run slower. Prints Markdown.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

import kbitq
from kbitq import _C
from kbitq.ops.linear import linear

TOLERANCE = 4e-3  # relative, for bfloat16 activations


def best(calls: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Least microseconds of each call, taken in turns."""
    least = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(runs):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[i] = min(least[i], (time.perf_counter() - start) * 1e6)
    return least


def speeds(rows: int, cols: int, ks: Sequence[int], batches: Sequence[int], runs: int) -> None:
    """The table of speeds, a line for each K and number of rows of x."""
    print(f"Weight {rows} x {cols}, {torch.get_num_threads()} threads, {_C.simd()}, bfloat16 activations.\n")
    print("| K | rows of x | kbitq us | torch bf16 us | torch f32 us | faster than bf16 | packed GB/s | copy GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    dense = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    half, source = dense.bfloat16(), torch.ones(1 << 25)
    target = torch.empty_like(source)
    for k in ks:
        q = kbitq.quantize(half, k, scale="absmax")
        exact = q.dequantize(torch.float64)
        for m in batches:
            x = torch.randn(m, cols, generator=torch.Generator().manual_seed(m)).bfloat16()
            reference = x.double() @ exact.T
            y = linear(x, q.packed, q.absmax, q.codebook)
            error = ((y.double() - reference).norm() / reference.norm()).item()
            if error > TOLERANCE:
                raise SystemExit(f"error: K={k}, {m} rows: relative error {error:.1e}")
            wide = x.float()
            ours, bf16, f32, copy = best(
                [
                    lambda x=x, q=q: linear(x, q.packed, q.absmax, q.codebook),
                    lambda x=x: torch.nn.functional.linear(x, half),
                    lambda x=wide: torch.nn.functional.linear(x, dense),
                    lambda: target.copy_(source),
                ],
                runs,
            )
            packed = (q.packed.nbytes + q.absmax.nbytes) / ours / 1e3
            bandwidth = 2 * source.nbytes / copy / 1e3
            cells = f"{ours:.0f} | {bf16:.0f} | {f32:.0f} | {bf16 / ours:.2f}x | {packed:.1f} | {bandwidth:.0f}"
            print(f"| {k} | {m} | {cells} |", flush=True)


def overhead(runs: int) -> None:
    """What a call costs before any work: on a weight of 32 x 32."""
    q, x = kbitq.quantize(torch.randn(32, 32), 3), torch.randn(1, 32)
    operation = torch.ops.kbitq.linear
    print("\n| a call with a weight of 32 x 32 | us |\n|---|---|")
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            best([lambda: operation(x, q.packed, q.absmax, q.codebook, None)], 1000)  # warm

            def many() -> None:
                for _ in range(1000):
                    operation(x, q.packed, q.absmax, q.codebook, None)

            (total,) = best([many], max(runs, 5))
        print(f"| torch.ops.kbitq.linear, {mode.__name__} | {total / 1000:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--k", default="2,3,4,5")
    parser.add_argument("--batch", default="1,4,8,32")
    parser.add_argument("--runs", type=int, default=15)
    given = parser.parse_args()
    ks, batches = ([int(v) for v in text.split(",")] for text in (given.k, given.batch))
    with torch.inference_mode():
        speeds(given.rows, given.cols, ks, batches, given.runs)
    overhead(given.runs)


if __name__ == "__main__":
    main()
