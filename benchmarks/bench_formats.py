"""Sources in other tools' formats: decoding a weight from its file, and the whole command beside a bfloat16 source;
and outputs in such formats.

    python benchmarks/bench_formats.py [--command | --outputs]

M values per second of CPU time with one thread, so that other work on the machine disturbs little; the best of several
runs. Files lie in memory (/dev/shm) where there is such a folder. Decoding is
checked by `make test` and `make test-formats`.
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs import compressed_tensors
from kbitq.codecs.base import Request
from kbitq.ops.code_stream import pack_codes

OUT, COLS, GROUP = 8192, 4096, 128
_TILE_BYTES = 4 << 20
_LAYERS, _SIZE = 4, 4096  # of the whole command
OUTPUTS = (
    ("compressed-tensors-g128", 4), ("compressed-tensors-g32", 4), ("compressed-tensors-channel", 8), ("int8", 8),
    ("fp8", 8), ("fp8-block", 8),
)  # fmt: skip
Made = tuple[str, dict[str, Tensor], dict[str, Any]]


def codes(bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8)


def text(value: str) -> Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def gptq(name: str, bits: int, out: int, cols: int, act_order: bool) -> dict[str, Tensor]:
    index = torch.arange(cols, dtype=torch.int32) // GROUP
    return {
        f"{name}.qweight": pack_codes(codes(bits, out, cols), bits).t().contiguous(),
        f"{name}.qzeros": pack_codes(codes(bits, cols // GROUP, out), bits),
        f"{name}.scales": (torch.rand(cols // GROUP, out) * 0.01).half(),
        f"{name}.g_idx": index[torch.randperm(cols)] if act_order else index,
    }


def nf4(nested: bool) -> dict[str, Tensor]:
    blocks = OUT * COLS // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, COLS]}
    tensors = {"a.weight": codes(8, OUT * COLS // 2, 1), "a.weight.quant_map": torch.linspace(-1, 1, 16)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        tensors |= {
            "a.weight.absmax": codes(8, blocks),
            "a.weight.nested_absmax": torch.rand(blocks // 256),
            "a.weight.nested_quant_map": torch.rand(256),
        }
    else:
        tensors["a.weight.absmax"] = torch.rand(blocks)
    return tensors | {"a.weight.quant_state.bitsandbytes__nf4": text(json.dumps(state))}


def hqq(axis: int) -> dict[str, Tensor]:
    groups = OUT * COLS // 64
    height, width = (groups, 64) if axis == 1 else (64, groups)
    return {
        "a.W_q": codes(8, height // 2, width), "a.packing": text("4bit_u8"), "a.nbits": torch.tensor(4),
        "a.scale": torch.rand(groups).half(), "a.zero": torch.rand(groups).half(),
        "a.shape": torch.tensor([OUT, COLS]), "a.axis": torch.tensor(axis),
    }  # fmt: skip


def made() -> Iterator[Made]:
    """What is decoded: its name, the tensors, the config."""
    for bits, act_order in ((4, False), (4, True), (3, False), (8, False)):
        yield f"GPTQ {bits} bits{', act order' if act_order else ''}", gptq("a", bits, OUT, COLS, act_order), {}
    awq = {"a.qweight": pack_codes(codes(4, COLS, OUT), 4), "a.qzeros": pack_codes(codes(4, COLS // GROUP, OUT), 4)}
    yield "AWQ", awq | {"a.scales": torch.rand(COLS // GROUP, OUT).half()}, {}
    half = torch.rand(COLS // GROUP, OUT).half()
    for version, words, scale, zero in (
        (
            "gemv",
            pack_codes(codes(4, OUT, COLS), 4),
            half.t().contiguous(),
            pack_codes(codes(4, OUT, COLS // GROUP), 4),
        ),
        ("gemv_fast", codes(8, OUT // 4, 2 * COLS).view(torch.int16), half, -half),
    ):
        said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": version}
        yield (
            f"AWQ, {version}",
            {"a.qweight": words, "a.scales": scale, "a.qzeros": zero},
            {"quantization_config": said},
        )
    method = {"quantization_config": {"quant_method": "compressed-tensors"}}
    scale, shape = torch.rand(OUT, COLS // GROUP).bfloat16(), torch.tensor([OUT, COLS])
    words = {"a.weight_packed": pack_codes(codes(4, OUT, COLS), 4), "a.weight_scale": scale, "a.weight_shape": shape}
    yield "compressed-tensors 4 bits", words, method
    whole = {"a.weight": codes(8, OUT, COLS).view(torch.int8), "a.weight_scale": torch.rand(OUT, 1).bfloat16()}
    yield "compressed-tensors int8", whole, method
    fp4 = {"a.weight_packed": codes(8, OUT, COLS // 2), "a.weight_global_scale": torch.rand(1)}
    yield (
        "compressed-tensors NVFP4",
        fp4 | {"a.weight_scale": torch.rand(OUT, COLS // 16).to(torch.float8_e4m3fn)},
        method,
    )
    yield "bitsandbytes NF4", nf4(False), {}
    yield "bitsandbytes NF4, quantized scales", nf4(True), {}
    yield "HQQ 4 bits, axis 1", hqq(1), {}
    yield "HQQ 4 bits, axis 0", hqq(0), {}
    words = {"a.weight": pack_codes(codes(4, OUT, COLS), 4).view(torch.uint32)}
    scales = {name: torch.rand(OUT, COLS // 64).bfloat16() for name in ("a.scales", "a.biases")}
    yield "MLX 4 bits", words | scales, {"quantization": {"bits": 4, "group_size": 64}}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def least(work: Callable[[], object], runs: int = 4) -> tuple[float, float]:
    """Seconds of CPU time and by the clock, of the quickest run each."""
    cpu, wall = [], []
    for _ in range(runs):
        began, clock = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - clock)
    return min(cpu), min(wall)


def decoding(place: Path) -> None:
    torch.set_num_threads(1)
    for name, tensors, config in made():
        checkpoint = open_source(write(place / "m", tensors, config))
        weight = checkpoint.tensors["a.weight"]
        with TileReader(checkpoint, _TILE_BYTES) as reader:
            seconds, _ = least(
                lambda reader=reader, weight=weight: [reader.read(weight, s) for s in reader.spans(weight)]
            )
        print(f"{name:36s} {OUT * COLS / seconds / 1e6:6.0f} M values/s")


def command(place: Path) -> None:
    torch.set_num_threads(2)
    packed: dict[str, Tensor] = {}
    for layer in range(_LAYERS):
        packed |= gptq(f"l{layer}", 4, _SIZE, _SIZE, False)
    plain = {f"l{layer}.weight": (torch.randn(_SIZE, _SIZE) * 0.02).bfloat16() for layer in range(_LAYERS)}
    sources = [write(place / "plain", plain, {}), write(place / "gptq", packed, {})]
    for k in (2, 4):
        times: list[list[tuple[float, float]]] = [[], []]
        for _ in range(3):  # in turns
            for mine, source in zip(times, sources, strict=True):
                options = QuantizeOptions(k=k, force=True)
                mine.append(least(lambda s=source, o=options: run(plan_quantize(s, place / "out", o)), runs=1))
        cpu, wall = (min(t[i] for t in times[0]) / min(t[i] for t in times[1]) for i in (0, 1))
        print(f"K = {k}: GPTQ beside bfloat16, weights a second: {cpu:.2f} of CPU time, {wall:.2f} by the clock")


def outputs() -> None:
    """Quantizing to the formats that are written, scales by their squared error."""
    w = (torch.randn(1024, COLS) * 0.02).bfloat16()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, k in OUTPUTS:
            request = Request(k=k, amax=w.float().abs().max().view(1), shape=tuple(w.shape))
            encode = functools.partial(compressed_tensors.make(name).encode_rows, w, request)
            cpu, wall = (w.numel() / seconds / 1e6 for seconds in least(encode, runs=6))
            print(f"{threads} threads {name:28s} K={k} {wall:6.1f} M values/s by the clock, {cpu:6.1f} of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--command", action="store_true", help="the whole command, too")
    parser.add_argument("--outputs", action="store_true", help="outputs, nothing else")
    given = parser.parse_args()
    if given.outputs:
        outputs()
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        decoding(Path(place))
        if given.command:
            command(Path(place))


if __name__ == "__main__":
    main()
