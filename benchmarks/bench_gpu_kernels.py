"""Times of every CUDA kernel, to compare two builds on one card: whether a change costs anything.

    python benchmarks/bench_gpu_kernels.py --save new1.jsonl          # in turn with the other build, some times each
    python benchmarks/bench_gpu_kernels.py --compare old*.jsonl with new*.jsonl

A line of a file is a case and its microseconds: of one call, the median of graph replays over buffers that together
exceed the L2. Nothing is checked here: bench_gpu.py, bench_gpu_linear.py and the tests do that. The comparison takes
the median of the files of a build. It prints new / old by kernel, and the cases in which the new build is slower by
more than 2 %.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bench_gpu as codec
import bench_gpu_linear as linear
import torch

from kbitq._core import core
from kbitq.ops import tiled_linear
from kbitq.ops.tiles import Tiles

LIMIT = 1.02
SIZES = (1 << 28, 1 << 24)
FEW, ALL = (1, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
SHAPES = {(14336, 4096): ALL, (4096, 14336): FEW, (28672, 8192): (1, 16), (4096, 4096): (*FEW, 24, 32, 64)}
TOKENS = (1, 8, 64, 512)
KS = {"planes": linear.KS, "trellis": (1, 2, 3, 4)}
Case = tuple[str, str, float]
"""A kernel, what it is run on, microseconds."""


def stats(buffers: codec.Buffers) -> Callable[[], object]:
    """Into memory that is there already, as a graph wants it."""
    out = torch.empty(len(buffers.w), 3, dtype=torch.float64, device="cuda")
    inputs = buffers.w, buffers.packed, buffers.absmax, buffers.codebook
    return lambda: core.stats(*inputs, out, 1, torch.cuda.current_stream().cuda_stream, *buffers.codec)


def codec_cases(name: str, ks: Sequence[int]) -> Iterator[Case]:
    """Of a codec; the names of the kernels begin with its own, unless that is planes."""
    prefix = "" if name == "planes" else f"{name} "
    for values in SIZES:
        for k in ks:
            sets = codec.sets_of(values, k, name)
            for s in sets:
                s.quantize("absmax")
            calls = {
                "dequantize": [s.dequantize for s in sets],
                "stats": [stats(s) for s in sets],
                "quantize absmax": [lambda s=s: s.quantize("absmax") for s in sets],
                "quantize mse": [lambda s=s: s.quantize("mse") for s in sets],
            }
            if k == ks[0] and name == "planes":
                calls["scan"] = [s.scan for s in sets]
            for kernel, each in calls.items():
                yield prefix + kernel, f"2^{values.bit_length() - 1} K={k}", 1e6 * codec.measure(each)
            del sets, calls
            torch.cuda.empty_cache()


def linear_cases() -> Iterator[Case]:
    for (rows, cols), batches in SHAPES.items():
        for k in linear.KS:
            copies = linear.kbitq_copies(rows, cols, k)
            for m in batches:
                x = torch.randn(m, cols, device="cuda", dtype=torch.bfloat16)
                yield kernel_for(m, rows, cols), f"{rows}x{cols} M={m} K={k}", time_of(copies, x)


def time_of(copies: list[linear.Multiply], x: torch.Tensor) -> float:
    return linear.microseconds([lambda multiply=multiply: multiply(x) for multiply in copies])


def kernel_for(m: int, rows: int, cols: int) -> str:
    """The way that the linear layer takes (csrc/ops/linear/tiled.h)."""
    if m <= core.few_rows:
        return "few"
    if m > tiled_linear.fused_rows(0, rows, cols):
        return "decode"
    return "sm90" if core.tiled_staging_bytes(m, rows, cols, 0) else "many"


def expert_cases() -> Iterator[Case]:
    count, rows, cols = linear.EXPERTS, linear.EXPERT_ROWS, linear.EXPERT_COLS
    for k in linear.KS:
        weight = tiled_linear.tile(*linear.random_triple(count * rows, cols, k, count), cols)
        for tokens in TOKENS:
            torch.manual_seed(tokens)  # the same experts in every run
            chosen = torch.rand(tokens, count, device="cuda").topk(linear.TOP_K, dim=-1).indices.flatten().sort().values
            offsets = torch.searchsorted(chosen, torch.arange(count + 1, device="cuda"), out_int32=True)
            x = torch.randn(tokens * linear.TOP_K, cols, device="cuda", dtype=torch.bfloat16)
            yield "experts", f"tokens={tokens} K={k}", time_experts(weight, offsets, x)


def time_experts(weight: Tiles, offsets: torch.Tensor, x: torch.Tensor) -> float:
    return linear.microseconds([lambda: tiled_linear.grouped_linear(x, weight, offsets)])


def save(path: Path, codecs: Sequence[str]) -> None:
    torch.manual_seed(0)
    with path.open("w") as file:
        for cases in (*(codec_cases(name, KS[name]) for name in codecs), linear_cases(), expert_cases()):
            for case in cases:
                file.write(json.dumps(case) + "\n")


def medians(paths: list[str]) -> dict[tuple[str, str], float]:
    times = defaultdict(list)
    for path in paths:
        for line in Path(path).read_text().splitlines():
            kernel, what, us = json.loads(line)
            times[kernel, what].append(us)
    return {case: statistics.median(each) for case, each in times.items()}


def compare(old: dict[tuple[str, str], float], new: dict[tuple[str, str], float]) -> None:
    ratios = defaultdict(list)
    for (kernel, what), us in new.items():
        if (kernel, what) in old:
            ratios[kernel].append((us / old[kernel, what], what))
    print("| kernel | cases | new / old, geometric mean | least | most |\n|---|---|---|---|---|")
    for kernel, each in sorted(ratios.items()):
        mean = statistics.geometric_mean(ratio for ratio, _ in each)
        (least, _), (most, what) = min(each), max(each)
        print(f"| {kernel} | {len(each)} | {mean:.3f} | {least:.3f} | {most:.3f} ({what}) |")
    slower = [(round(r, 3), kernel, what) for kernel, each in ratios.items() for r, what in each if r > LIMIT]
    print(f"\nSlower by more than {LIMIT - 1:.0%}: {sorted(slower, reverse=True) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE", help="measure this build")
    parser.add_argument("--codecs", default=",".join(KS), help="comma-separated; what an older build lacks is left out")
    parser.add_argument("--compare", nargs="+", metavar="FILE", help="files of the old build, 'with', files of the new")
    options = parser.parse_args()
    if options.save:
        save(options.save, options.codecs.split(","))
    if options.compare:
        cut = options.compare.index("with")
        compare(medians(options.compare[:cut]), medians(options.compare[cut + 1 :]))


if __name__ == "__main__":
    main()
