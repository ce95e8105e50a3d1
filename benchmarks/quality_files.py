"""Checkpoints of other tools' formats, for benchmarks/quality.py, made of a model by the formats' own packages.

kbitq then decodes them as it decodes any such source, so that what is measured is the file. The packages are those of
tests/formats/packages.txt; each of them is imported where it is needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
"""float32 ``[rows, cols]`` by the name of the weight."""


@dataclass
class Stored:
    """What a format stores of a model's weights.

    Attributes:
        tensors: of the file.
        config: what config.json says beside the model's own.
        metadata: of the file.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)


Store = Callable[[str, Weights], Stored]
"""The label of a point and the weights to what is stored of them."""
Make = Callable[[Path, Path, str], None]
"""Makes a checkpoint: the folder of the model, the folder to write, the label."""


def hqq(label: str, weights: Weights) -> Stored:
    """``K bits, groups of N``: HQQ's defaults, its optimizer and float16 among them, groups along the rows."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    bits, group = numbers(label)
    tensors = {}
    for name, weight in weights.items():
        told = BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
        layer = HQQLinear(_linear(weight), told, compute_dtype=torch.float16, device="cpu", del_orig=False)
        stem = name.removesuffix("weight")
        tensors |= {stem + key: value.detach().contiguous() for key, value in layer.state_dict().items()}
    return Stored(tensors, {"quantization_config": {"quant_method": "hqq"}})


def mlx(label: str, weights: Weights) -> Stored:
    """``K bits, groups of N`` (affine), or the name of a mode."""
    import mlx.core as mx
    import numpy as np

    mode = label.lower() if label.isalnum() else "affine"
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}.get(mode) or numbers(label)
    tensors = {}
    for name, weight in weights.items():
        half = mx.array(weight.numpy()).astype(mx.bfloat16)
        for part, array in zip(
            ("weight", "scales", "biases"), mx.quantize(half, group_size=group, bits=bits, mode=mode), strict=False
        ):
            bfloat16 = array.dtype == mx.bfloat16
            found = torch.from_numpy(np.array(array.view(mx.uint16) if bfloat16 else array))
            tensors[name.removesuffix("weight") + part] = found.view(torch.bfloat16) if bfloat16 else found
    return Stored(tensors, {"quantization": {"bits": bits, "group_size": group, "mode": mode}})


def torchao(label: str, weights: Weights) -> Stored:
    """``K bits in bytes, groups of N``, ``int8`` or ``float8``, weights alone."""
    from torchao import quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    configs = {"int8": ao.Int8WeightOnlyConfig, "float8": ao.Float8WeightOnlyConfig}
    if label in configs:
        config = configs[label](version=2)
    else:
        bits, group = numbers(label)
        config = ao.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{bits}"), granularity=ao.PerGroup(group), version=2
        )
    quantized = {}
    for name, weight in weights.items():
        model = nn.Sequential(_linear(weight.bfloat16()))
        ao.quantize_(model, config)
        quantized[name] = model[0].weight.data
    tensors, metadata = flatten_tensor_state_dict(quantized)
    return Stored(tensors, {"quantization_config": {"quant_method": "torchao"}}, metadata)


def modelopt(label: str, weights: Weights) -> Stored:
    """``NVFP4``."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    tensors = {}
    for name, weight in weights.items():
        packed, scale, factor = NVFP4QTensor.quantize(weight.bfloat16(), 16)
        tensors |= {name: packed._quantized_data, f"{name}_scale": scale, f"{name}_scale_2": factor.float().reshape(())}
    return Stored(tensors, {"quantization_config": {"quant_method": "modelopt", "quant_algo": label}})


def bitsandbytes(label: str, weights: Weights) -> Stored:
    """``FP4`` with blocks of 64, ``FP4 double`` with quantized scales, or ``int8`` with a scale for each row."""
    import bitsandbytes.functional as bnb

    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if label == "int8":
            codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
            stem = name.removesuffix("weight")
            tensors |= {name: codes, f"{stem}SCB": scales, f"{stem}weight_format": torch.tensor(0).byte()}
            continue
        codes, state = bnb.quantize_4bit(
            weight.bfloat16(), blocksize=64, compress_statistics=label == "FP4 double", quant_type="fp4"
        )
        tensors |= {name: codes, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}}
    return Stored(tensors, {"quantization_config": {"quant_method": "bitsandbytes", f"load_in_{label[-1:]}bit": True}})


def awq(source: Path, folder: Path, label: str) -> None:
    """``K bits, groups of N``: by GPTQModel, whose calibration takes 128 windows of 512 tokens of a text.

    ``KBITQ_CALIBRATION_TEXT`` names the text. What is scaled beside the weights (norms, inputs of other layers) is in
    the checkpoint too.
    """
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it takes one by default, and then needs two
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD
    from transformers import AutoTokenizer

    if "KBITQ_CALIBRATION_TEXT" not in os.environ:
        raise SystemExit("AWQ is calibrated on a text: KBITQ_CALIBRATION_TEXT=FILE")
    text = Path(os.environ["KBITQ_CALIBRATION_TEXT"]).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"]
    starts = torch.randint(0, len(ids) - 512, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [{"input_ids": ids[start : start + 512], "attention_mask": [1] * 512} for start in starts]
    bits, group = numbers(label)
    config = QuantizeConfig(bits=bits, group_size=group, quant_method=METHOD.AWQ, format=FORMAT.GEMM, sym=False)
    model = GPTQModel.load(str(source.resolve()), config, device="cpu", dtype=torch.bfloat16)
    folder, here = folder.resolve(), Path.cwd()
    os.chdir(folder.parent)  # it leaves logs where it works
    try:
        model.quantize(windows, batch_size=8)
        model.save(str(folder))
    finally:
        os.chdir(here)


def stored_by(store: Store) -> Make:
    """Makes a checkpoint with every Linear weight but the head's as ``store`` stores it."""

    def make(source: Path, folder: Path, label: str) -> None:
        plain: dict[str, Tensor] = {}
        for path in sorted(source.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                plain |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        stored = store(label, {n: plain.pop(n).float() for n in list(plain) if n.endswith("_proj.weight")})
        folder.mkdir()
        save_file({**plain, **stored.tensors}, folder / "model.safetensors", stored.metadata or None)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **stored.config}), encoding="utf-8")

    return make


def bits_a_weight(folder: Path) -> float:
    """Of the quantized weights of a checkpoint: the bytes that they are decoded from, options not counted."""
    from kbitq.checkpoint.source.recognise import open_source

    found = [t for t in open_source(folder).tensors.values() if t.foreign is not None]
    return 8 * sum(t.file_nbytes for t in found) / sum(torch.Size(t.shape).numel() for t in found)


def numbers(label: str) -> tuple[int, int]:
    """Bits and group of a label that has both."""
    bits, group = re.findall(r"\d+", label)
    return int(bits), int(group)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear
