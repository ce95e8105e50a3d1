"""GGUF blocks: decoding beside the package gguf, a product of one row beside decoding and multiplying.

    python benchmarks/bench_gguf.py [--cuda] [TYPE ...]

A matrix of 4096 x 4096 (on CUDA 14336 x 4096 in bfloat16); the best of several runs. Decoding is checked, then timed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.gguf_file import BLOCKS, finite_blocks
from kbitq.format.ggml_types import BY_NAME
from kbitq.functional import dequantize_gguf, gguf_linear

_CHECKED_BLOCKS = 4096
_CALLS = 20  # of a graph


def best(work: Callable[[], object], cuda: bool, runs: int = 7) -> float:
    """Seconds of the quickest run; on CUDA of the device alone, by replaying a graph."""
    times = []
    if cuda:
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(runs):
        if cuda:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / (1e3 * _CALLS))
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return min(times)


def package_seconds(kind: str, raw: np.ndarray) -> float | None:
    """What the package gguf takes for a block; None for a type that it does not decode."""
    import gguf

    if kind == "Q8_K":
        return None
    part = raw[:_CHECKED_BLOCKS]
    number = gguf.GGMLQuantizationType[kind]
    want = gguf.quants.dequantize(part, number)
    got = dequantize_gguf(torch.from_numpy(part), kind, want.shape)
    assert np.array_equal(got.numpy(), want), kind
    return best(lambda: gguf.quants.dequantize(part, number), False, 3) / len(part)


def measure(kind: str, cuda: bool) -> None:
    rows, cols = (14336, 4096) if cuda else (4096, 4096)
    dtype, device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
    numbers = finite_blocks(kind, rows * cols // BY_NAME[kind].values)
    raw = torch.from_numpy(numbers).to(device)
    x = torch.randn(1, cols, device=device).to(dtype)
    decode = best(lambda: dequantize_gguf(raw, kind, (rows, cols), dtype), cuda)
    line = f"{kind:8} decode {rows * cols / decode / 1e6:8.0f} M values/s"
    if not cuda and (package := package_seconds(kind, numbers)):
        part = raw[:_CHECKED_BLOCKS]
        shape = (len(part), BY_NAME[kind].values)
        ours = best(lambda: dequantize_gguf(part, kind, shape), False) / len(part)
        line += f" ({package / ours:5.1f} x gguf)"
    product = best(lambda: gguf_linear(x, raw, kind, (rows, cols)), cuda)
    both = best(lambda: x @ dequantize_gguf(raw, kind, (rows, cols), dtype).t(), cuda)
    print(
        f"{line}  linear {product * 1e6:8.1f} us  decode, multiply {both * 1e6:8.1f} us  x {both / product:4.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--cuda", action="store_true")
    told = parser.parse_args()
    for kind in told.types or BLOCKS:
        measure(kind, told.cuda)


if __name__ == "__main__":
    main()
