"""A model without its weights, which are read from its files when they are needed, and forgotten after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import CalibrationError
from kbitq.eval.failures import told
from kbitq.integrations.transformers.loading import model_class
from kbitq.integrations.transformers.manifest import DTYPES
from kbitq.integrations.transformers.ways import Way, find_ways
from kbitq.ops.dtypes import TORCH_DTYPES
from kbitq.text_safety import shown


class Skeleton:
    """A transformers model whose parameters are on the meta device until they are loaded.

    Args:
        folder: of the model.
        checkpoint: its files.
        device: where parameters are loaded to.
        dtype: that the model computes in: ``auto`` or a name of torch's.

    Attributes:
        model: the model, its base with buffers on ``device``.
        layers: its decoder's (or encoder's) layers, in order.
        name: of the list that they are in.

    Raises:
        CalibrationError: no list of layers is found in it.
        KbitqError: transformers cannot make it.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, device: str, dtype: str) -> None:
        self._folder, self._checkpoint, self.device = folder, checkpoint, device
        self.model = _made(folder, checkpoint, dtype)
        self.name, self.layers = find_layers(self.model, checkpoint.where)
        self._ways = {way.name: way for way in find_ways(self.model, checkpoint.tensors)}
        _make_buffers(self.model, device)

    def within(self, layer: int) -> list[str]:
        """Names of the parameters and persistent buffers of a layer."""
        return [f"{self.name}.{layer}.{name}" for name in self.layers[layer].state_dict()]

    def around(self) -> list[str]:
        """Names of those outside the layers; none of a head on top, which is not run."""
        prefix = next((n for n, m in self.model.named_modules() if m is self.model.base_model), "")
        names = [n for n in self.model.state_dict() if n.startswith(f"{prefix}." if prefix else "")]
        return [name for name in names if not name.startswith(f"{self.name}.")]

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes that these take in memory."""
        state = self.model.state_dict()
        return sum(state[name].numel() * state[name].element_size() for name in names)

    def load(self, names: Iterable[str]) -> None:
        """Read parameters from the files. Raises CalibrationError for one that is not simply in them."""
        for name in names:
            if name not in self._ways:
                raise CalibrationError(
                    f"{self._folder}: {shown(name)} is not made by taking or stacking tensors, so the model cannot be "
                    "run layer by layer",
                    hint="give it enough memory for the whole model",
                )
            self._set(name, self._read(self._ways[name]))

    def drop(self, names: Iterable[str]) -> None:
        """Forget parameters."""
        state = self.model.state_dict()
        for name in names:
            self._set(name, state[name].to("meta"))

    def _set(self, name: str, value: Tensor) -> None:
        prefix, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(prefix)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def _read(self, way: Way) -> Tensor:
        dtype = self.model.get_parameter_or_buffer(way.name).dtype
        parts = [[self._tensor(name).to(self.device, dtype) for name in part] for part in way.parts]
        return torch.cat([torch.stack(part) for part in parts], dim=1) if way.stacked else parts[0][0]

    def _tensor(self, name: str) -> Tensor:
        stored = self._checkpoint.tensors[name]
        if stored.foreign is not None:
            return self._decoded(stored)
        if stored.scaling is not None or (
            stored.dtype not in DTYPES and not stored.dtype.startswith(("I", "U", "BOOL"))
        ):
            raise CalibrationError(f"{self._folder}: {shown(name)} is {stored.dtype}, which is not run layer by layer")
        path = self._folder / stored.file if self._folder.is_dir() else self._folder
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    def _decoded(self, stored: SourceTensor) -> Tensor:
        """A weight in another tool's format, decoded a tile at a time."""
        dtype = TORCH_DTYPES[stored.dtype]
        whole = torch.empty(stored.shape, dtype=dtype)
        raw = whole.view(-1).view(torch.uint8)
        with TileReader(self._checkpoint) as reader:
            reader.read_into(stored, 0, raw)
        return whole


def find_layers(model: Any, where: str) -> tuple[str, list[Any]]:
    """The name and the modules of the list of layers that holds the most parameters.

    Raises:
        CalibrationError: there is no list of layers.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise CalibrationError(
            f"{where}: no list of layers is found in it, so it cannot be run layer by layer",
            hint="give it enough memory for the whole model",
        )
    sizes = [sum(p.numel() for p in found.parameters()) for _, found in lists]
    name, found = lists[sizes.index(max(sizes))]  # the outermost of lists in lists comes first
    return name, list(found)


def _made(folder: Path, checkpoint: Checkpoint, dtype: str) -> Any:
    import transformers

    with told(f"{folder} cannot be made as a model"):
        config = transformers.AutoConfig.from_pretrained(folder)
        if checkpoint.schemes and hasattr(config, "quantization_config"):
            del config.quantization_config  # the model is made to hold what its weights decode to
        found = model_class(folder)
        wanted = getattr(torch, dtype) if dtype != "auto" else config.dtype or _stored_dtype(checkpoint)
        build = getattr(found, "_from_config", None) or found.from_config
        with torch.device("meta"):
            return build(config, dtype=wanted).eval()


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    return next((DTYPES[t.dtype] for t in checkpoint.tensors.values() if t.dtype in DTYPES), torch.float32)


def _make_buffers(model: Any, device: str) -> None:
    """Give buffers that no file has their values, as transformers does when it loads a model."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        model.initialize_weights()
