"""What a file says of its tensors, and what config.json says of a folder (docs/format.md section 2)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kbitq.errors import FormatError
from kbitq.format.dtypes import is_shape
from kbitq.format.shapes import (
    BLOCK,
    DEFAULT_CODEC,
    K_MAX,
    K_MIN,
    TRELLIS_K_MIN,
    module_name,
    packed_shape,
    shape_of_packed,
)

FORMAT_VERSION = 1
CODEC_VERSION = 2  # of a file with a tensor of another codec than the default one
QUANT_METHOD = "kbitq"
OUTPUT_FORMATS = ("compressed-tensors", "int8", "fp8", "fp8-block", "gptq", "bnb-nf4", "bnb-nf4-double")
"""Formats of other tools that are written."""
SCALE_FORMAT = "e4m4"
METADATA_KEY = "kbitq"  # of a shard's __metadata__
CONFIG_FILE, CONFIG_KEY = "config.json", "quantization_config"
GUARD_KEY = "transformers_weights"  # of a config.json: names the file of the weights, and stops transformers if none
GUARD_SENTENCE = "the weights are packed by kbitq: run `pip install kbitq`, and `import kbitq` before loading them"
STATISTIC_WIDTH = 16  # characters reserved for each statistic in a header


@dataclass
class TensorMeta:
    """What a shard's metadata says of one quantized tensor.

    Attributes:
        k: bits of an index that are stored.
        shape: of the source.
        dtype: of the source, in safetensors' spelling.
        scale: the rule that chose the scales.
        codebook: name of the levels.
        sqnr_db: signal to quantization noise in decibels, if measured.
        max_abs_err: the largest |w - w'|, if measured.
        importance: SHA-256 of the importance file, where one was used.
        codec: how it is coded.
        calibrated: fingerprint of the statistics that error feedback used, where it did.
    """

    k: int
    shape: tuple[int, ...]
    dtype: str
    scale: str
    codebook: str
    sqnr_db: float | None = None
    max_abs_err: float | None = None
    importance: str | None = None
    codec: str = DEFAULT_CODEC
    calibrated: str | None = None


@dataclass
class ShardMeta:
    """The ``kbitq`` entry of a shard's ``__metadata__``: quantized tensors, and why the others were kept."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Compact JSON, tensors by name."""
        pieces, statistics = self.json_pieces(), self.statistics()
        return "".join(text for pair in zip(pieces, [*statistics, ""], strict=True) for text in pair)

    def json_pieces(self) -> list[str]:
        """The text of ``to_json`` that is known before the statistics are: one goes between each piece and the next."""
        version = format_version(meta.codec for meta in self.tensors.values())
        pieces, text, comma = [], f'{{"format_version":{version},"tensors":{{', ""
        for name in sorted(self.tensors):
            meta = self.tensors[name]
            pieces += [f'{text}{comma}{dump(name)}:{_fixed_json(meta)[:-1]},"sqnr_db":', ',"max_abs_err":']
            made_with = {"importance": meta.importance, "calibrated": meta.calibrated}
            text = "".join(f",{dump(key)}:{dump(value)}" for key, value in made_with.items() if value is not None) + "}"
            comma = ","
        kept = f',"kept":{dump(dict(sorted(self.kept.items())))}' if self.kept else ""
        return [*pieces, f"{text}}}{kept}}}"]

    def statistics(self) -> list[str]:
        """The statistics as ``to_json`` writes them, in its order: two of each tensor, ``null`` for one not known."""
        return [
            spec % value if value is not None and math.isfinite(value) else "null"
            for name in sorted(self.tensors)
            for value, spec in ((self.tensors[name].sqnr_db, "%.4f"), (self.tensors[name].max_abs_err, "%.6e"))
        ]


def format_version(codecs: Iterable[str]) -> int:
    """The version of a file, or of a folder, whose quantized tensors have these codecs."""
    return FORMAT_VERSION if all(codec == DEFAULT_CODEC for codec in codecs) else CODEC_VERSION


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one for each call


def dump(value: Any) -> str:
    """Compact JSON."""
    return _ENCODER.encode(value)


def _fixed_json(meta: TensorMeta) -> str:
    fixed = {
        "k": meta.k,
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "scale": meta.scale,
        "codebook": meta.codebook,
        **coding_json(meta.codec),
    }
    return dump(fixed)


def coding_json(codec: str) -> dict[str, Any]:
    """What metadata says of a codec: nothing of the default one, its scale block where that is not one block."""
    name, _, scale_block = codec.partition("/")
    said: dict[str, Any] = {"codec": name} if name != DEFAULT_CODEC else {}
    return {**said, "scale_block": int(scale_block)} if scale_block else said


def coding_of(raw: Mapping[str, Any], where: str) -> str:
    """The codec, scale block and all, that metadata names. Raises FormatError for a scale block that is no number."""
    codec, scale_block = raw.get("codec", DEFAULT_CODEC), raw.get("scale_block", BLOCK)
    if not isinstance(scale_block, int) or isinstance(scale_block, bool):
        raise FormatError(f"{where}: scales for {scale_block!r} columns are not known to this kbitq")
    return with_scale_block(codec if isinstance(codec, str) else DEFAULT_CODEC, scale_block)


def with_scale_block(codec: str, scale_block: int) -> str:
    """The codec whose scales are for so many columns: ``trellis/128``; one for 32 columns has no such addition."""
    return codec if scale_block == BLOCK or "/" in codec else f"{codec}/{scale_block}"


def parse_shard_meta(text: str, where: str) -> ShardMeta:
    """Read the ``kbitq`` metadata of the file ``where``. Raises FormatError on a version or a shape of it not known."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the kbitq metadata is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{where}: the kbitq metadata is not a JSON object")
    check_version(raw, where)
    tensors, kept = raw.get("tensors"), raw.get("kept", {})
    if not isinstance(tensors, dict):
        raise FormatError(f"{where}: the kbitq metadata has no object 'tensors'")
    reasons = {n: r for n, r in kept.items() if isinstance(r, str)} if isinstance(kept, dict) else {}
    return ShardMeta({name: _parse_tensor_meta(name, entry, where) for name, entry in tensors.items()}, reasons)


def check_version(raw: Mapping[str, Any], where: str) -> None:
    """Raise FormatError unless ``format_version`` is one that is written here."""
    version = raw.get("format_version")
    if version not in (FORMAT_VERSION, CODEC_VERSION) or isinstance(version, bool):
        raise FormatError(
            f"{where}: format_version {version!r} is not known to this kbitq "
            f"(it reads {FORMAT_VERSION} and {CODEC_VERSION})",
            hint="pip install --upgrade kbitq",
        )


def _parse_tensor_meta(name: str, raw: Any, where: str) -> TensorMeta:
    if not isinstance(raw, dict) or not is_shape(raw.get("shape")) or not isinstance(raw.get("dtype"), str):
        raise FormatError(f"{where}: tensor {name}: its kbitq metadata lacks a shape or a dtype")
    k = raw.get("k")
    codec = coding_of(raw, f"{where}: tensor {name}")
    least = K_MIN if codec == DEFAULT_CODEC else min(K_MIN, TRELLIS_K_MIN)
    if not isinstance(k, int) or isinstance(k, bool) or not least <= k <= K_MAX:
        raise FormatError(f"{where}: tensor {name}: K = {k!r} is outside {least}..{K_MAX}")
    meta = TensorMeta(k, tuple(raw["shape"]), raw["dtype"], "unknown", "unknown", codec=codec)
    for key in ("scale", "codebook", "importance", "calibrated"):
        if isinstance(raw.get(key), str):
            setattr(meta, key, raw[key])
    for key in ("sqnr_db", "max_abs_err"):
        if isinstance(raw.get(key), float) and math.isfinite(raw[key]):
            setattr(meta, key, raw[key])
    return meta


def build_quantization_config(tensors: Mapping[str, TensorMeta], not_converted: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a folder's config.json, from all its quantized tensors and the modules left alone.

    ``dtypes`` is written only where tensors differ from the common dtype, since metadata may be lost on re-saving.
    """
    common_codec = most_common(meta.codec for meta in tensors.values())
    common_k = most_common(meta.k for meta in tensors.values())
    common_dtype = most_common(meta.dtype for meta in tensors.values())
    ordered = sorted(tensors.items())
    config: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "format_version": format_version(meta.codec for meta in tensors.values()),
        "block_size": BLOCK,
        "scale_format": SCALE_FORMAT,
        "dtype": common_dtype,
        "k": common_k,
        "overrides": {module_name(n): o for n, m in ordered if (o := _override(m, common_k, common_codec))},
        "shapes": {n: list(m.shape) for n, m in ordered if not _tells_shape(n, m)},
        "modules_to_not_convert": sorted(set(not_converted)),
    }
    if dtypes := {n: m.dtype for n, m in ordered if m.dtype != common_dtype}:
        config["dtypes"] = dtypes
    return {**config, **coding_json(common_codec)}


def _override(meta: TensorMeta, k: int, codec: str) -> dict[str, Any]:
    """What of a tensor differs from the most common K and codec."""
    differs: dict[str, Any] = {"k": meta.k} if meta.k != k else {}
    whole = {"codec": DEFAULT_CODEC, "scale_block": BLOCK}
    usual, mine = ({**whole, **coding_json(c)} for c in (codec, meta.codec))
    return {**differs, **{key: mine[key] for key in whole if mine[key] != usual[key]}}


def config_codec(config: Mapping[str, Any], name: str) -> str:
    """The codec of a tensor by its folder's ``quantization_config``, for a reader whose file has lost its metadata."""
    overrides = config.get("overrides")
    override = overrides.get(module_name(name)) if isinstance(overrides, dict) else None
    return coding_of({**config, **(override if isinstance(override, dict) else {})}, f"{CONFIG_FILE}: tensor {name}")


def _tells_shape(name: str, meta: TensorMeta) -> bool:
    """Whether the stored parts alone tell the source's shape, should the metadata be lost."""
    return meta.codec == DEFAULT_CODEC and meta.shape == shape_of_packed(
        name, meta.k, packed_shape(name, meta.shape, meta.k)
    )


def most_common(values: Iterable[Any]) -> Any:
    """The value that occurs most often; the smallest of those on a tie."""
    counts = Counter(values)
    return min(counts, key=lambda v: (-counts[v], v))


def guarded_config(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """A quantized folder's config.json: the source's with ``quantization``, guarded (docs/format.md, "The guard")."""
    own = {GUARD_KEY: config[GUARD_KEY]} if GUARD_KEY in config else {}
    return {**config, CONFIG_KEY: {**quantization, **own}, GUARD_KEY: GUARD_SENTENCE}


def unguarded_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as a reader takes it: without the guard, and with the file name that it took the place of."""
    entry, quantization = config.get(GUARD_KEY), config.get(CONFIG_KEY)
    if not is_guard(entry) or not isinstance(quantization, dict):
        return dict(config)
    own = {GUARD_KEY: quantization[GUARD_KEY]} if GUARD_KEY in quantization else {}
    return {**{key: value for key, value in config.items() if key != GUARD_KEY}, **own}


def is_guard(entry: Any) -> bool:
    """Whether an entry under ``GUARD_KEY`` is there to stop loaders: it names no file that they would take."""
    return isinstance(entry, str) and not entry.endswith((".safetensors", ".safetensors.index.json"))


def parse_quantization_config(raw: Any, where: str) -> dict[str, Any]:
    """Check a ``quantization_config`` written by kbitq and return it. Raises FormatError."""
    if not isinstance(raw, dict) or raw.get("quant_method") != QUANT_METHOD:
        raise FormatError(f"{where}: its quantization_config is not kbitq's")
    check_version(raw, where)
    for key, value in (("block_size", BLOCK), ("scale_format", SCALE_FORMAT)):
        if raw.get(key, value) != value:
            raise FormatError(f"{where}: {key} {raw[key]!r} is not known to this kbitq (it reads {value!r})")
    shapes = raw.get("shapes", {})
    if not isinstance(shapes, dict) or not all(is_shape(s) for s in shapes.values()):
        raise FormatError(f"{where}: 'shapes' of its quantization_config is not a table of shapes")
    return raw
