"""The fused linear on this GPU, beside bf16 cuBLAS, int4 of torch, NF4 of bitsandbytes; experts; a Llama-3-8B shape.

    python benchmarks/bench_gpu_linear.py [--quick] [--only linear,experts,model] [--codec planes,trellis]

Every call is captured once for each of several copies of the weight, together larger than the L2, and the graph is
replayed, back to back: what is timed is the kernels. Each kbitq weight is checked against the dequantized one before
it is used. Activations are bfloat16. Times are microseconds of one call, medians of 5 rounds.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from kbitq._core import core
from kbitq.codecs import codebooks
from kbitq.ops import tiled_linear
from kbitq.ops.tiles import Tiles, tile

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
KS = (2, 3, 4, 5)
CODINGS = {
    "planes": {f"K={k}": ("planes", k) for k in KS},
    "trellis": {f"trellis K={k}": ("trellis", k) for k in (2, 3, 4)},
    "trellis/128": {f"trellis/128 K={k}": ("trellis/128", k) for k in (2, 3, 4)},
}
"""The columns of the tables, by what --codec names: codec and K."""
ROUNDS = 5
BYTES_OF_COPIES = 256 << 20


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls, warmed up and captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_times(graph: torch.cuda.CUDAGraph, rounds: int = ROUNDS) -> list[float]:
    """Milliseconds of one replay, in each of several rounds of replays queued back to back for about 10 ms."""

    def timed(replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / replays

    timed(2)
    replays = max(2, int(10 / timed(3)))
    timed(2 * replays)  # clocks and memory wake up
    return [timed(replays) for _ in range(rounds)]


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, in a graph of all of them."""
    while len(calls) < 12:
        calls = calls + calls
    return statistics.median(replay_times(graph_of(calls))) * 1000 / len(calls)


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_triple(rows: int, cols: int, k: int, groups: int = 1, codec: str = "planes") -> Triple:
    """Random words and scales, levels as for a weight of about 0.02."""
    blocks, width = (cols + 31) // 32, 128 if codec == "trellis/128" else 32
    packed = torch.randint(-(2**31), 2**31, (rows, blocks * k), dtype=torch.int64, device="cuda").int()
    absmax = torch.randint(0xB0, 0xD0, (rows, -(-cols // width)), device="cuda").to(torch.uint8)
    if codec == "planes":
        levels = torch.from_numpy(codebooks.optimal(k)).cuda() * 2**-6
    else:
        levels = torch.linspace(-1, 1, 4 << k, device="cuda") * 2**-6
    return packed, absmax, levels.repeat(groups, 1)


def copies_of(nbytes: int) -> int:
    return max(2, -(-BYTES_OF_COPIES // nbytes))


def check(weight: Tiles, triple: Triple, x: torch.Tensor) -> None:
    packed, absmax, books = triple
    dense = torch.empty(weight.rows, weight.cols)
    core.dequantize(packed.cpu(), absmax.cpu(), books[0].cpu(), dense, torch.get_num_threads(), codec=weight.codec)
    want = x.float() @ dense.cuda().t()
    error = (tiled_linear.linear(x, weight).float() - want).norm() / want.norm()
    if not error < 6e-3:
        raise SystemExit(f"wrong result: error {float(error):.1e} for {list(x.shape)}")


Codings = dict[str, tuple[str, int]]
Multiply = Callable[[torch.Tensor], torch.Tensor]
"""x times one copy of a weight; a way to compute is a list of these, one for each copy."""


def bf16_copies(rows: int, cols: int) -> list[Multiply]:
    count = copies_of(rows * cols * 2)
    weights = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    return [lambda x, w=w: torch.nn.functional.linear(x, w) for w in weights]


def kbitq_copies(rows: int, cols: int, k: int, codec: str = "planes") -> list[Multiply]:
    triple = random_triple(rows, cols, k, 1, codec)
    first = tile(*triple, cols, codec)
    check(first, triple, torch.randn(3, cols, device="cuda", dtype=torch.bfloat16))
    more = [tile(*random_triple(rows, cols, k, 1, codec), cols, codec) for _ in range(copies_of(first.nbytes) - 1)]
    return [lambda x, w=w: tiled_linear.linear(x, w) for w in (first, *more)]


def int4_copies(rows: int, cols: int) -> list[Multiply]:
    """torch's tinygemm, groups of 128."""
    convert, multiply = torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm
    ways = []
    for _ in range(copies_of(rows * cols // 2)):
        packed = convert(torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device="cuda"), 8)
        scales = torch.rand(cols // 128, rows, 2, dtype=torch.bfloat16, device="cuda")
        ways.append(lambda x, p=packed, s=scales: multiply(x, p, 128, s))
    return ways


def nf4_copies(rows: int, cols: int) -> list[Multiply]:
    try:
        import bitsandbytes as bnb
    except ImportError:
        return []
    ways = []
    for _ in range(copies_of(rows * cols // 2)):
        dense = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        packed, state = bnb.functional.quantize_4bit(dense, blocksize=64, quant_type="nf4")
        ways.append(lambda x, p=packed, s=state: bnb.matmul_4bit(x, p.t(), quant_state=s))
    return ways


def table(shapes: tuple[tuple[int, int], ...], batches: tuple[int, ...], codings: Codings) -> None:
    """A table for each shape; the ways to compute are measured one after the other for each batch."""
    for rows, cols in shapes:
        ways = {"bf16": bf16_copies(rows, cols)}
        ways |= {name: kbitq_copies(rows, cols, k, codec) for name, (codec, k) in codings.items()}
        ways |= {"torch int4": int4_copies(rows, cols), "bnb NF4": nf4_copies(rows, cols)}
        ways = {name: copies for name, copies in ways.items() if copies}
        print(f"\n{rows} x {cols}\n| M | " + " | ".join(ways) + " |\n|" + "---|" * (len(ways) + 1))
        for m in batches:
            x, cells, dense = torch.randn(m, cols, device="cuda", dtype=torch.bfloat16), [], 0.0
            for name, copies in ways.items():
                if m > 64 and name in ("torch int4", "bnb NF4"):
                    cells.append("")
                    continue
                time = microseconds([lambda f=f, x=x: f(x) for f in (copies if m <= 256 else copies[:4])])
                dense = time if name == "bf16" else dense
                cells.append(f"{time:.1f}" + ("" if name == "bf16" else f" ({dense / time:.2f}x)"))
            print(f"| {m} | " + " | ".join(cells) + " |", flush=True)


# --- experts ---------------------------------------------------------------------------------------

EXPERTS, EXPERT_ROWS, EXPERT_COLS, TOP_K = 128, 1536, 2048, 8


def experts(codings: Codings) -> None:
    """gate_up_proj of Qwen3-30B-A3B's experts: tokens go to 8 of 128, drawn evenly; bf16 is torch's grouped product."""
    shape = f"{EXPERTS} x [{EXPERT_ROWS}, {EXPERT_COLS}]"
    print(f"\nExperts {shape}, {TOP_K} for each token\n| tokens | bf16 | " + " | ".join(codings) + " |")
    print("|" + "---|" * (len(codings) + 2))
    dense = torch.randn(EXPERTS, EXPERT_ROWS, EXPERT_COLS, device="cuda", dtype=torch.bfloat16)
    packed = [
        tile(*random_triple(EXPERTS * EXPERT_ROWS, EXPERT_COLS, k, EXPERTS, codec), EXPERT_COLS, codec)
        for codec, k in codings.values()
    ]
    for tokens in (1, 8, 64, 512):
        chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=-1).indices.flatten().sort().values
        offsets = torch.searchsorted(chosen, torch.arange(EXPERTS + 1, device="cuda"), out_int32=True)
        x = torch.randn(tokens * TOP_K, EXPERT_COLS, device="cuda", dtype=torch.bfloat16)
        ways: list[Callable[[], object]] = [
            lambda x=x, o=offsets: torch._grouped_mm(x, dense.transpose(1, 2), offs=o[1:]),
            *(lambda x=x, o=offsets, w=w: tiled_linear.grouped_linear(x, w, o) for w in packed),
        ]
        times = [microseconds([way]) for way in ways]
        print(
            f"| {tokens} | {times[0]:.1f} | " + " | ".join(f"{t:.1f} ({times[0] / t:.2f}x)" for t in times[1:]) + " |",
            flush=True,
        )


# --- a model ---------------------------------------------------------------------------------------

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY, POSITIONS = 4096, 14336, 32, 32, 8, 128, 128256, 256


def dense(rows: int, cols: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * cols**-0.5
    return lambda x: torch.nn.functional.linear(x, weight)


def packed(rows: int, cols: int, coding: tuple[str, int], groups: int = 1) -> Multiply:
    codec, k = coding
    weight = tile(*random_triple(rows, cols, k, groups, codec), cols, codec)
    return lambda x: tiled_linear.linear(x, weight)


@torch.compile(dynamic=False)
def add_and_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, torch.nn.functional.rms_norm(total, (HIDDEN,), weight)


@torch.compile(dynamic=False)
def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@torch.compile(dynamic=False)
def remember(cache: torch.Tensor, kv: torch.Tensor) -> None:
    cache[0, :, :, -1], cache[1, :, :, -1] = kv[:, 0], kv[:, 1]


class Layer:
    """A decoder layer at one position of a filled cache; q, k, v and gate, up merged in every variant."""

    def __init__(self, batch: int, coding: tuple[str, int] | None) -> None:
        qkv = (HEADS + 2 * KV_HEADS) * HEAD
        make = (lambda r, c, g=1: packed(r, c, coding, g)) if coding else (lambda r, c, g=1: dense(r, c))
        self.qkv, self.out = make(qkv, HIDDEN, 6), make(HIDDEN, HEADS * HEAD)
        self.gate_up, self.down = make(2 * INNER, HIDDEN, 2), make(HIDDEN, INNER)
        self.cache = torch.randn(2, batch, KV_HEADS, POSITIONS, HEAD, device="cuda", dtype=torch.bfloat16)
        self.norms = torch.ones(2, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what is to be added to it."""
        x, normed = add_and_norm(x, y, self.norms[0])
        q, kv = self.qkv(normed).split((HEADS * HEAD, 2 * KV_HEADS * HEAD), -1)
        remember(self.cache, kv.view(-1, 2, KV_HEADS, HEAD))
        q = q.view(-1, HEADS, 1, HEAD)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, self.cache[0], self.cache[1], enable_gqa=True)
        x, normed = add_and_norm(x, self.out(mixed.reshape(-1, HIDDEN)), self.norms[1])
        return x, self.down(gated(self.gate_up(normed)))


def tokens_per_second(batch: int, coding: tuple[str, int] | None, head: tuple[str, int] | None) -> float:
    layers = [Layer(batch, coding) for _ in range(LAYERS)]
    last = packed(VOCABULARY, HIDDEN, head) if head else dense(VOCABULARY, HIDDEN)
    x = torch.randn(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        stream, y = x, torch.zeros_like(x)
        for layer in layers:
            stream, y = layer(stream, y)
        return last(add_and_norm(stream, y, layers[0].norms[0])[1]).argmax(-1)

    return batch * 1000 / statistics.median(replay_times(graph_of([step])))


def model(batches: tuple[int, ...], codings: Codings) -> None:
    variants = {name: (coding, None) for name, coding in codings.items()}
    variants |= {f"{name}, lm_head too": (coding, coding) for name, coding in codings.items() if coding[1] == 3}
    print(
        "\nLlama-3-8B shape, random weights, 256 positions, tokens/s\n| batch | bf16 | "
        + " | ".join(variants)
        + " |\n|"
        + "---|" * (len(variants) + 2)
    )
    for batch in batches:
        dense_rate = tokens_per_second(batch, None, None)
        rates = [tokens_per_second(batch, coding, head) for coding, head in variants.values()]
        cells = (f"{rate:.0f} ({rate / dense_rate:.2f}x)" for rate in rates)
        print(f"| {batch} | {dense_rate:.0f} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, four batches")
    parser.add_argument("--only", default="linear,experts,model", help="which parts, of linear,experts,model")
    parser.add_argument("--model-batches", default="1,8,32")
    parser.add_argument("--codec", default="planes,trellis", help="which codecs, of planes,trellis,trellis/128")
    options = parser.parse_args()
    codings = {name: coding for codec in options.codec.split(",") for name, coding in CODINGS[codec].items()}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    parts = options.only.split(",")
    if "linear" in parts:
        table(SHAPES[1:2] if options.quick else SHAPES, (1, 8, 16, 64) if options.quick else BATCHES, codings)
    if "experts" in parts:
        experts(codings)
    if "model" in parts:
        model(tuple(map(int, options.model_batches.split(","))), codings)


if __name__ == "__main__":
    main()
