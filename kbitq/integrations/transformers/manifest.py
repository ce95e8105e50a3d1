"""What the files of a quantized model hold, from their headers: which weights are packed, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kbitq import format as fmt
from kbitq.codecs.base import Codec, coded_entries, get_codec, part_names
from kbitq.errors import FormatError
from kbitq.nn.packed import WeightInfo

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Manifest:
    """The tensors of a checkpoint, by the names in its files.

    Attributes:
        quantized: of every quantized tensor, what is known of its source.
        plain: names of all other tensors, the guard included.
        kept: why tensors were kept, as recorded.
        shards: file name of every stored tensor.
        guard: name of the guard tensor.
    """

    quantized: dict[str, fmt.TensorMeta] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    guard: str | None = None

    def codec_of(self, name: str) -> str:
        """How a quantized tensor is coded."""
        return self.quantized[name].codec

    def parts_of(self, name: str) -> dict[str, str]:
        """Part of a quantized tensor -> its name in the files."""
        return part_names(self.codec_of(name), name)


def read_manifest(files: Sequence[str], config: Mapping[str, Any]) -> Manifest:
    """Read the headers of safetensors files.

    Args:
        files: paths of all weight files.
        config: the ``quantization_config``, for what the metadata lacks.

    Raises:
        FormatError: a packed tensor is incomplete or its parts do not fit each other; the message names it.
    """
    manifest, shapes = Manifest(), {}
    described: dict[str, fmt.TensorMeta] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            meta = (file.metadata() or {}).get(fmt.METADATA_KEY)
            if meta is not None:
                shard = fmt.parse_shard_meta(meta, path)
                described.update(shard.tensors)
                manifest.kept.update(shard.kept)
            for name in file.keys():  # noqa: SIM118  (not a dict)
                shapes[name] = tuple(file.get_slice(name).get_shape())
                manifest.shards[name] = Path(path).name
    names = _undescribed(shapes, config) | set(described)
    for name in sorted(names):
        manifest.quantized[name] = _described(name, shapes, described.get(name), config)
    parts = {part for name in names for part in manifest.parts_of(name).values()}
    manifest.plain = [name for name in shapes if name not in parts]
    manifest.guard = next((n for n in manifest.plain if n in names and shapes[n] == fmt.GUARD_SHAPE), None)
    return manifest


def _undescribed(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> set[str]:
    """Names of quantized tensors by those of their first parts, of the codecs that the config names."""
    codecs = {fmt.config_codec(config, name) for name in ("", *config.get("overrides", {}))}
    found: set[str] = set()
    for codec in codecs:
        suffix = next(iter(part_names(codec, "").values()))
        stems = {name.removesuffix(suffix) for name in shapes if name.endswith(suffix)}
        found |= {stem for stem in stems if fmt.config_codec(config, stem) == codec}
    return found


def _described(
    name: str, shapes: Mapping[str, tuple[int, ...]], meta: fmt.TensorMeta | None, config: Mapping[str, Any]
) -> fmt.TensorMeta:
    codec = get_codec(meta.codec if meta is not None else fmt.config_codec(config, name))
    names = part_names(codec.name, name)
    for part in names.values():
        if part not in shapes:
            raise FormatError(f"tensor {name}: its part {part} is missing", hint="download or quantize the model again")
    stored = {part: shapes[in_file] for part, in_file in names.items()}
    k = codec.k_of(name, stored)
    if meta is None:
        shape = config.get("shapes", {}).get(name) or _shape_of_parts(codec, name, k, stored)
        dtype = config.get("dtypes", {}).get(name, config.get("dtype", "F32"))
        meta = fmt.TensorMeta(k, tuple(shape), dtype, "unknown", "unknown", codec=codec.name)
    wanted = {entry.name: entry.shape for entry in coded_entries(codec.name, name, meta.shape, meta.k)}
    if meta.k != k or any(shapes[part] != shape for part, shape in wanted.items()):
        raise FormatError(f"tensor {name}: its parts do not fit each other or its recorded shape and K")
    return meta


def _shape_of_parts(codec: Codec, name: str, k: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return codec.shape_of(name, k, shapes)
    except FormatError as error:
        raise FormatError(f"tensor {name}: {error}") from None


def meta_of(info: WeightInfo, k: int, shape: Sequence[int]) -> fmt.TensorMeta:
    """The description that a file gets of a layer's weight."""
    rest = info.sqnr_db, info.max_abs_err, info.importance, info.codec, info.calibrated
    return fmt.TensorMeta(k, tuple(shape), STORED[info.dtype], info.scale, info.codebook, *rest)
