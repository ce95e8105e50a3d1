"""Speed of the CPU codec, beside this machine's copy bandwidth and bitsandbytes' NF4, all in one run.

Every operation is checked against the numpy reference before it is timed. A speed is the best of several runs, since
other work on the machine only ever makes a run slower; the spread is printed with it. Prints Markdown.
"""

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import kbitq
from kbitq import _C, ops
from kbitq.codecs import codebooks, reference

COLUMNS = 4096
PEER_ROWS = 2048


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Table:
    """A Markdown table whose rows are measured and printed one by one.

    Each run of an operation follows a copy of 128 MiB, so that its share of the copy bandwidth holds on a machine whose
    speed changes from second to second.
    """

    def __init__(self, values: int, runs: int) -> None:
        self.values, self.runs = values, runs
        self.source = torch.ones(1 << 25)
        self.target = torch.empty_like(self.source)
        print("| operation | K | M values/s | GB/s | copy GB/s | share of copy | median / best |")
        print("|---|---|---|---|---|---|---|")

    def row(self, name: str, k: int | str, moved: int, call: Callable[[], object]) -> None:
        """Measure ``call``, which reads and writes ``moved`` bytes, and print its row."""
        call()  # touches the pages of its output, wakes the threads
        copies, times = [], []
        for _ in range(self.runs):
            copies.append(seconds(lambda: self.target.copy_(self.source)))
            times.append(seconds(call))
        best, median = min(times), sorted(times)[self.runs // 2]
        copy = 2 * self.source.nbytes / min(copies)
        print(
            f"| {name} | {k} | {self.values / best / 1e6:,.0f} | {moved / best / 1e9:.1f} | {copy / 1e9:.1f} "
            f"| {moved / best / copy:.2f} | {median / best:.2f} |",
            flush=True,
        )


def check(weight: torch.Tensor, k: int, scale: str) -> None:
    """The core and the numpy reference give equal bytes and equal values on the first rows."""
    rows = weight[:8]
    levels, _ = codebooks.levels("optimal", k)
    amax, _ = ops.scan(rows)
    packed, absmax, codebook = ops.quantize(rows, torch.from_numpy(levels), amax=amax, scale=scale)
    expected = reference.quantize(rows.float().numpy(), k, levels, scale=scale, dtype="BF16")
    for name, ours, theirs in zip(("packed", "absmax", "codebook"), (packed, absmax, codebook), expected, strict=True):
        if not np.array_equal(ours.numpy(), theirs):
            raise SystemExit(f"error: {name} differs from the reference at K={k}, {scale}: not timed")
    back = ops.dequantize(packed, absmax, codebook, rows.shape[1], torch.float32)
    if not np.array_equal(back.numpy(), reference.dequantize(*expected, rows.shape[1])):
        raise SystemExit(f"error: dequantize differs from the reference at K={k}: not timed")


def bench_kbitq(table: Table, weight: torch.Tensor, ks: list[int]) -> None:
    """Into outputs that exist, as the converter works; a scan comes before every quantize."""
    amax, _ = ops.scan(weight)
    table.row("scan", "-", weight.nbytes, lambda: ops.scan(weight))
    for k in ks:
        levels = torch.from_numpy(codebooks.levels("optimal", k)[0])
        for scale in ("absmax", "mse"):
            check(weight, k, scale)
            triple = ops.quantize(weight, levels, amax=amax, scale=scale)
            moved = weight.nbytes + sum(t.nbytes for t in triple)
            call = partial(ops.quantize_into, weight, levels, *triple, amax=amax, importance=None, scale=scale)
            table.row(f"quantize {scale}", k, moved, call)
        out = torch.empty_like(weight)
        table.row("dequantize", k, moved, partial(ops.dequantize, *triple, COLUMNS, out.dtype, out=out))


def bench_peers(table: Table, weight: torch.Tensor) -> None:
    """Four bits: kbitq, then bitsandbytes' NF4, each allocating its output (bitsandbytes takes none on the CPU)."""
    for scale in ("absmax", "mse"):
        q = kbitq.quantize(weight, 4, scale=scale)
        moved = weight.nbytes + q.nbytes
        call = partial(kbitq.quantize, weight, 4, scale=scale)
        table.row(f"kbitq.quantize, scan and SQNR included, {scale}", 4, moved, call)
    table.row("kbitq.dequantize", 4, moved, partial(kbitq.dequantize, q))
    try:
        import bitsandbytes as bnb
        from bitsandbytes import functional
    except ImportError:
        print("\nbitsandbytes is not installed: no comparison (pip install 'kbitq[bench]')")
        return
    quantize = partial(functional.quantize_4bit, weight, blocksize=64, quant_type="nf4")
    packed, state = quantize()
    back = functional.dequantize_4bit(packed, state)
    error = float((weight.float() - back.float()).square().mean() / weight.float().square().mean())
    if not error < 0.02:
        raise SystemExit(f"error: bitsandbytes' NF4 gives a relative error of {error}: not timed")
    moved = weight.nbytes + packed.nbytes + state.absmax.nbytes
    table.row(f"bitsandbytes {bnb.__version__} quantize_4bit, NF4", 4, moved, quantize)
    dequantize = partial(functional.dequantize_4bit, packed, state)
    table.row(f"bitsandbytes {bnb.__version__} dequantize_4bit, NF4", 4, moved, dequantize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", default="2,3,4,5", help="comma-separated bit widths")
    parser.add_argument("--values", type=int, default=1 << 26, help="bf16 values in the matrix (128 MiB by default)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    weight = torch.randn(max(8, options.values // COLUMNS), COLUMNS, dtype=torch.bfloat16)
    print(
        f"kbitq {kbitq.__version__} ({_C.simd()}), torch {torch.__version__}; {processor()}, {options.threads} threads"
    )
    print(f"\nThe codec on {weight.numel():,d} bf16 values, into outputs that exist\n")
    bench_kbitq(Table(weight.numel(), options.runs), weight, [int(k) for k in options.k.split(",")])
    layer = weight[:PEER_ROWS].contiguous()
    print(f"\nOne layer of {layer.numel():,d} bf16 values, each call allocating its output\n")
    bench_peers(Table(layer.numel(), options.runs), layer)


if __name__ == "__main__":
    main()
