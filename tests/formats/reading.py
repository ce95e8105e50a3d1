"""Writes a case as a checkpoint, and reads its weights as every job reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.ops.dtypes import TORCH_DTYPES

PLAIN = "model.norm.weight"


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> Path:
    """A folder of these tensors, with a plain one beside what is quantized."""
    folder.mkdir()
    save_file({**tensors, PLAIN: torch.ones(64)}, folder / "model.safetensors", dict(metadata) or None)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", **config}))
    return folder


def decoded(folder: Path, tile_bytes: int) -> dict[str, Tensor]:
    """The weights of a folder that are in another tool's format, read in tiles."""
    checkpoint = open_source(folder)
    found = {}
    with TileReader(checkpoint, tile_bytes) as reader:
        for name, tensor in checkpoint.tensors.items():
            if tensor.foreign is not None and len(tensor.shape) > 1:
                parts = [reader.read(tensor, span).clone().reshape(-1) for span in reader.spans(tensor)]
                found[name] = torch.cat(parts).view(tensor.shape)
            elif tensor.foreign is not None:
                raw = torch.cat([data.clone() for _, data in reader.chunks(tensor)])
                found[name] = raw.view(TORCH_DTYPES[tensor.dtype])
    return found
