"""The CPU pipeline (bounded memory, journal, synced to the disk) beside load, quantize and save in memory, in pairs.

One process, after all imports, source in the page cache; the plain way is also timed with one fsync at its end, which
makes its output as durable. Prints Markdown.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import kbitq
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run


def plain(source: Path, out: Path, k: int, sync: bool) -> None:
    tensors = {}
    for name, weight in load_file(source).items():
        q = kbitq.quantize(weight, k)
        tensors |= {f"{name}_packed": q.packed, f"{name}_absmax": q.absmax, f"{name}_codebook": q.codebook}
    save_file(tensors, out)
    if sync:
        fd = os.open(out, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def seconds(call: Callable[[], object], out: Path) -> float:
    start = time.perf_counter()
    call()
    taken = time.perf_counter() - start
    out.unlink()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, out = Path(work) / "model.safetensors", Path(work) / "out.safetensors"
        count = max(1, round(options.gigabytes * 1e9 / (4096 * 4096 * 2)))
        weights = {f"w{i}.weight": (torch.randn(4096, 4096) * 0.02).bfloat16() for i in range(count)}
        save_file(weights, source)
        values = sum(w.numel() for w in weights.values())
        del weights
        quantize = QuantizeOptions(k=options.k, device="cpu")
        ways: dict[str, Callable[[], object]] = {
            "load, quantize, save": lambda: plain(source, out, options.k, False),
            "the same, and fsync": lambda: plain(source, out, options.k, True),
            "plan and run": lambda: run(plan_quantize(source, out, quantize)),
        }
        for call in ways.values():
            seconds(call, out)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.pairs):
            for name, call in ways.items():
                taken[name].append(seconds(call, out))
        print(
            f"{values / 1e6:.0f} M values, K={options.k}, {torch.get_num_threads()} threads; kbitq {kbitq.__version__}"
        )
        print("\n| way | s, least | median | most | M values/s | median ratio to the first, in pairs |")
        print("|---|---|---|---|---|---|")
        first = taken["load, quantize, save"]
        for name, times in taken.items():
            ratio = statistics.median(t / f for t, f in zip(times, first, strict=True))
            middle = statistics.median(times)
            cells = [f"{min(times):.2f}", f"{middle:.2f}", f"{max(times):.2f}", f"{values / middle / 1e6:.0f}"]
            print(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
