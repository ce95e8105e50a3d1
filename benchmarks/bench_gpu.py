"""Speed of the CUDA codec beside the card's copy bandwidth and bitsandbytes' NF4, all in one run. Prints Markdown.

Every result is checked against the CPU core before it is timed, every output is poisoned before and compared after.
Inputs are random, and several sets of them are used in turn where one would fit the L2. A time is the median of CUDA
graph replays between events. `limit` is the bytes that must move at the copy bandwidth of the same run.
"""

import argparse
import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import torch

import kbitq
from kbitq import ops
from kbitq._core import core
from kbitq.codecs import codebooks
from kbitq.ops.codec import stream_of

COLUMNS = 4096
CODECS = {"planes": range(2, 9), "trellis": range(1, 5), "trellis/128": range(1, 5)}
"""Codecs by the core's names, and their K."""
REPEATS = 25
WARM_UP_SECONDS = 0.1
POISON = 0x5A


def timed(run: Callable[[], object]) -> float:
    """Median seconds of a run on the device, once it has warmed up: just after memory was taken, the first runs are
    slower by up to a tenth."""
    start = time.monotonic()
    while time.monotonic() - start < WARM_UP_SECONDS:
        run()
        torch.cuda.synchronize()
    seconds = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def measure(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one of the calls, which differ in their buffers only, all captured in one graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return timed(graph.replay) / len(calls)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of torch's copy of 1 GiB (a kernel; in a graph it would be a memcpy node)."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def levels_of(codec: str, k: int) -> torch.Tensor:
    """On the GPU. For the trellis an even grid, bent: its speed does not depend on the levels."""
    if codec == "planes":
        return torch.from_numpy(codebooks.optimal(k)).cuda()
    u = torch.linspace(-1, 1, 2 ** (k + 2))
    return (0.75 * u + 0.25 * u * u.abs()).cuda()


class Buffers:
    """A matrix, what it is quantized to, and what that is decoded to."""

    def __init__(self, values: int, k: int, codec: str = "planes") -> None:
        rows, blocks = max(1, values // COLUMNS), COLUMNS // 32
        self.codec = () if codec == "planes" else (codec,)  # so that builds without other codecs can be measured
        self.levels = levels_of(codec, k)
        self.w = torch.randn(rows, COLUMNS, dtype=torch.bfloat16, device="cuda")
        self.amax, self.status = ops.scan(self.w)
        self.packed = torch.empty(rows, blocks * k, dtype=torch.int32, device="cuda")
        scales = blocks // 4 if codec == "trellis/128" else blocks
        self.absmax = torch.empty(rows, scales, dtype=torch.uint8, device="cuda")
        self.codebook = torch.empty_like(self.levels)
        self.out = torch.empty_like(self.w)

    @property
    def moved(self) -> int:
        return self.w.nbytes + self.packed.nbytes + self.absmax.nbytes

    def scan(self) -> None:
        core.scan(self.w, self.amax, self.status, 1, torch.cuda.current_stream().cuda_stream)

    def quantize(self, scale: str) -> None:
        self.quantize_on(self.w, self.levels, self.amax, (self.packed, self.absmax, self.codebook), scale)

    def quantize_on(
        self, w: torch.Tensor, levels: torch.Tensor, amax: torch.Tensor, parts: Sequence[torch.Tensor], scale: str
    ) -> None:
        core.quantize(w, levels, amax, None, *parts, scale, torch.get_num_threads(), stream_of(w), *self.codec)

    def dequantize(self) -> None:
        self.dequantize_on((self.packed, self.absmax, self.codebook), self.out)

    def dequantize_on(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        core.dequantize(*parts, out, torch.get_num_threads(), stream_of(out), *self.codec)

    def poison(self) -> None:
        for tensor in (self.packed, self.absmax, self.codebook, self.out):
            tensor.view(torch.uint8).fill_(POISON)

    def results(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (self.packed, self.absmax, self.codebook, self.out)]

    def check(self, scale: str) -> list[torch.Tensor]:
        """Quantizes and decodes; stops the program unless the first 2^22 values give the CPU core's bytes."""
        self.poison()
        self.quantize(scale)
        self.dequantize()
        rows = min(len(self.w), (1 << 22) // COLUMNS)
        parts = self.packed[:rows], self.absmax[:rows], self.codebook, self.out[:rows]
        want = [torch.empty_like(part, device="cpu") for part in parts]
        self.quantize_on(self.w[:rows].cpu(), self.levels.cpu(), self.amax.cpu(), want[:3], scale)
        self.dequantize_on(want[:3], want[3])
        got = self.results()
        for name, ours, theirs in zip(("packed", "absmax", "codebook", "out"), got, want, strict=True):
            if not torch.equal(ours[: len(theirs)].cpu(), theirs):
                raise SystemExit(f"error: {name} differs from the CPU core's at {scale}: not timed")
        return got


def sets_of(values: int, k: int, codec: str = "planes") -> list[Buffers]:
    """As many sets of buffers as together exceed the L2 four times."""
    first = Buffers(values, k, codec)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    more = min(256, -(-4 * cache // first.w.nbytes)) - 1
    return [first, *(Buffers(values, k, codec) for _ in range(more))]


class Table:
    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    def head(self, values: int, codec: str) -> None:
        self.values = values
        print(f"\n2^{values.bit_length() - 1} bfloat16 values, {codec}\n")
        print("| operation | K | us | M values/s | GB/s | share of copy | x limit |")
        print("|---|---|---|---|---|---|---|")

    def row(self, name: str, k: int | str, seconds: float, moved: int) -> None:
        share = moved / seconds / self.bandwidth
        speed = f"{self.values / seconds / 1e6:,.0f} | {moved / seconds / 1e9:,.0f}"
        print(f"| {name} | {k} | {seconds * 1e6:,.1f} | {speed} | {share:.2f} | {1 / share:.2f} |", flush=True)


def bench_size(table: Table, values: int, codec: str, ks: list[int]) -> None:
    table.head(values, codec)
    for k in ks:
        sets = sets_of(values, k, codec)
        want = sets[0].check("absmax")
        timed = {
            "dequantize": [s.dequantize for s in sets],
            "quantize absmax": [lambda s=s: s.quantize("absmax") for s in sets],
            "scan + quantize absmax": [lambda s=s: (s.scan(), s.quantize("absmax")) for s in sets],
        }
        for s in sets:
            s.quantize("absmax")
        for name, calls in timed.items():
            if name != "dequantize":
                sets[0].poison()
            table.row(name, k, measure(calls), sets[0].moved)
        sets[0].dequantize()
        compare(sets[0].results(), want)
        want = sets[0].check("mse")
        sets[0].poison()
        table.row("quantize mse", k, measure([lambda s=s: s.quantize("mse") for s in sets]), sets[0].moved)
        sets[0].dequantize()
        compare(sets[0].results(), want)
    if codec == "planes":
        table.row("scan", "-", measure([s.scan for s in sets]), sets[0].w.nbytes)
    del sets, want
    torch.cuda.empty_cache()


def compare(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
        raise SystemExit("error: the timed calls left other bytes than the checked ones")


def bench_bitsandbytes(table: Table, values: int) -> None:
    try:
        import bitsandbytes as bnb
        from bitsandbytes import functional
    except ImportError:
        print("\nbitsandbytes is not installed: no comparison (pip install 'kbitq[bench]')")
        return
    w = torch.randn(values // COLUMNS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(w, torch.nan)
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    functional.dequantize_4bit(packed, state, out=out)
    error = float((w[:64].float() - out[:64].float()).square().mean() / w[:64].float().square().mean())
    if not error < 0.02:
        raise SystemExit(f"error: bitsandbytes' NF4 gives a relative error of {error}: not timed")
    moved = w.nbytes + packed.nbytes + state.absmax.nbytes
    peer = f"bitsandbytes {bnb.__version__} NF4"
    table.row(f"{peer} dequantize", 4, measure([lambda: functional.dequantize_4bit(packed, state, out=out)]), moved)
    quantize = timed(lambda: functional.quantize_4bit(w, blocksize=64, quant_type="nf4"))  # it copies from the host
    table.row(f"{peer} quantize", 4, quantize, moved)


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", default="1,2,3,4,5", help="comma-separated; each codec takes those that it has")
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated")
    parser.add_argument("--log2", default="28,24,20,16", help="sizes: comma-separated powers of two of values")
    options = parser.parse_args()
    if not torch.cuda.is_available() or core.cuda_status():
        raise SystemExit(f"error: no usable GPU: {core.cuda_status() or 'torch sees none'}")

    torch.manual_seed(0)
    ks = [int(k) for k in options.k.split(",")]
    bandwidth = copy_bandwidth()
    print(f"kbitq {kbitq.__version__}, torch {torch.__version__} (CUDA {torch.version.cuda}), {datetime.date.today()}")
    print(f"{torch.cuda.get_device_name()}, driver {driver()}; copy {bandwidth / 1e9:,.0f} GB/s (read + written)")
    table = Table(bandwidth)
    sizes = [1 << int(n) for n in options.log2.split(",")]
    for values in sizes:
        for codec in options.codecs.split(","):
            if of_codec := [k for k in ks if k in CODECS[codec]]:
                bench_size(table, values, codec, of_codec)
        if values == sizes[0]:
            bench_bitsandbytes(table, values)


if __name__ == "__main__":
    main()
