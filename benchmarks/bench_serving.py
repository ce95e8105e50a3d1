"""What a server's layer costs over the operators that it calls: microseconds of the host for each call.

    python benchmarks/bench_serving.py                 on a GPU if there is one, else on the CPU

On a GPU the host runs ahead, so the time of a call is that of the Python around the kernels; under CUDA graphs there is
none, and the time shown is that of a replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import kbitq
from kbitq.codecs.base import get_codec
from kbitq.integrations.serving import products
from kbitq.integrations.serving.matrix import Matrix, merged

CALLS, TRIES = 300, 15


def microseconds(call: Callable[[], Any], sync: Callable[[], Any]) -> float:
    """The least mean time of a call that the host sees."""
    times = []
    for _ in range(TRIES):
        sync()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    sync()
    return min(times) * 1e6


def matrix(rows: int, cols: int, k: int, codec: str, device: str) -> Matrix:
    q = kbitq.quantize(torch.randn(rows, cols, device=device), k, codec=codec)
    return Matrix(codec, k, rows, cols, q.parts)


def bare(layer: Any, x: torch.Tensor) -> Callable[[], Any]:
    """The operators of the layer's pieces, with arguments at hand."""
    held, calls = dict(layer._parameters), []
    for piece in layer.kbitq_pieces:
        if isinstance(piece, products.TiledPiece):
            arguments = x, held[piece.data], held[piece.constants], None, piece.rows, piece.codec
            calls.append(lambda a=arguments: torch.ops.kbitq.linear_tiles(*a))
        else:
            parts, codec = {part: held[name] for part, name in piece.names.items()}, get_codec(piece.codec)
            calls.append(lambda p=parts, c=codec: c.linear(x, p, None))
    if len(calls) == 1:
        return calls[0]
    return lambda: torch.cat([call() for call in calls], -1)


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    size, dtype = (4096, torch.bfloat16) if device == "cuda" else (64, torch.float32)
    qkv = size, size // 4, size // 4
    layers = {
        "one matrix": [matrix(size, size, 4, "planes", device)],
        "q/k/v of one K": [matrix(r, size, 4, "planes", device) for r in qkv],
        "q/k/v of two K": [matrix(r, size, k, "planes", device) for r, k in zip(qkv, (4, 3, 3), strict=True)],
        "planes and trellis": [matrix(size, size, 4, "planes", device), matrix(size, size, 3, "trellis", device)],
    }
    print(f"{device}: layer, pieces, operators us, apply us, overhead us" + (", graph us" if device == "cuda" else ""))
    for name, matrices in layers.items():
        layer: Any = torch.nn.Module()
        products.place(layer, matrices)
        x = torch.randn(1, size, device=device, dtype=dtype)
        with torch.inference_mode():
            operators = microseconds(bare(layer, x), sync)
            apply = microseconds(lambda layer=layer, x=x: products.multiply(layer, x, None), sync)
            line = f"{name}, {len(merged(matrices))}, {operators:.1f}, {apply:.1f}, {apply - operators:.1f}"
            if device == "cuda":
                both = [graph_of(call) for call in (bare(layer, x), lambda: products.multiply(layer, x, None))]  # noqa: B023
                line += ", bare " + " and apply ".join(f"{microseconds(g, sync) / 20:.2f}" for g in both)
        print(line)


if __name__ == "__main__":
    main()
