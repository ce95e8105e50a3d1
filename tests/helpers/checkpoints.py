"""Makes checkpoints for tests, honest ones and others."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * 0.02
    return torch.from_numpy(values).to(dtype)


def save_random(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A file of float32 tensors, standard normal."""
    draw = np.random.default_rng(0)
    save_file({n: torch.from_numpy(draw.standard_normal(s, dtype=np.float32)) for n, s in shapes.items()}, path)
    return path


def model_tensors() -> dict[str, torch.Tensor]:
    """What a small transformer has: every kind of verdict occurs."""
    return {
        "model.embed_tokens.weight": gaussian(300, 64, seed=1),
        "model.layers.0.input_layernorm.weight": torch.ones(64, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": gaussian(64, 64, seed=2),
        "model.layers.0.self_attn.q_proj.bias": gaussian(64, seed=3),
        "model.layers.0.mlp.down_proj.weight": gaussian(64, 200, seed=4),
        "model.layers.0.mlp.gate.weight": gaussian(80, 64, seed=5),
        "model.layers.0.mlp.experts.gate_up_proj": gaussian(4, 48, 64, seed=6),
        "model.layers.1.conv.weight": gaussian(64, 8, 3, 3, seed=7, dtype=torch.float32),
        "model.layers.1.mlp.up_proj.weight": gaussian(96, 64, seed=8, dtype=torch.float16),
        "model.layers.1.tiny.weight": gaussian(4, 8, seed=9),
        "model.layers.1.empty.weight": torch.empty(0, 64, dtype=torch.bfloat16),
        "model.layers.1.wide.weight": gaussian(32, 160, seed=10, dtype=torch.float64),
        "model.layers.1.fp8.weight": gaussian(64, 128, seed=11).to(torch.float8_e4m3fn),
        "model.position_ids": torch.arange(8),
        "model.mask": torch.tensor([True, False]),
        "model.scale": torch.tensor(2.0),
        "lm_head.weight": gaussian(300, 64, seed=12),
    }


QUANTIZED = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.1.conv.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.wide.weight",
}


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> Path:
    """A Hugging Face style folder."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "rms_norm_eps": 1e-05, "name": "é"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").write_text('{"dim": 64}')
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def raw_file(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def read_header(path: Path) -> tuple[bytes, dict[str, Any], bytes]:
    """The padded header text, the header, and the data of a safetensors file, read by other code than kbitq's."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return raw[8 : 8 + length], json.loads(raw[8 : 8 + length]), raw[8 + length :]


class Interrupting:
    """A progress callback that is Ctrl-C at its ``last`` call, if there is such a one."""

    def __init__(self, last: int | None = None) -> None:
        self.calls, self._last = 0, last

    def __call__(self, progress: object) -> None:
        self.calls += 1
        if self.calls == self._last:
            raise KeyboardInterrupt


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def partials(folder: Path) -> list[str]:
    """Hidden things a run left in a folder."""
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
