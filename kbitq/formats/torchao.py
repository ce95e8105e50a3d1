"""torchao's safetensors form: a weight ``m.weight`` is ``m._weight_qdata`` and others, and a JSON text of the file's
metadata says its type. Read: int8 and integers of fewer bits in bytes (IntxUnpackedToInt8Tensor), and FP8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kbitq.format import element_count
from kbitq.formats.base import FLOAT_DTYPES, HALVES, Catalogue, Found, Stored
from kbitq.formats.row_codes import RowCodes
from kbitq.formats.scales import Scales

_TABLES = {"I8": "int8", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_TYPES = {"IntxUnpackedToInt8Tensor": ("I8",), "Int8Tensor": ("I8",), "Float8Tensor": ("F8_E4M3", "F8_E5M2")}
_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_scale")


def recognise(catalogue: Catalogue) -> Found:
    """torchao's weights. Raises CheckpointError where they are of a type that is not read here, or do not fit."""
    found = Found()
    for name, text in catalogue.metadata.items():
        if not text.startswith("{") or '"_type"' not in text:
            continue
        said = _parsed(text)
        kind = said.get("_type")
        if kind in (None, "Tensor") or not isinstance(said.get("_data"), Mapping):
            continue
        if kind not in _TYPES:
            raise catalogue.refused(f"stores {name} as torchao's {kind}, which is not read here")
        weight, dropped = _weight(catalogue, name, str(kind), said)
        found.weights.append(weight)
        found.dropped.update(dropped)
    return found


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _weight(catalogue: Catalogue, name: str, kind: str, said: Mapping[str, Any]) -> tuple[RowCodes, dict[str, str]]:
    module, _, leaf = name.rpartition(".")
    stem = f"{module}._{leaf}_" if module else f"_{leaf}_"
    codes = catalogue.want(stem + "qdata", _TYPES[kind])
    dtype = _dtype(said["_data"].get("dtype"))
    if len(codes.shape) != 2 or dtype is None:
        raise catalogue.broken(codes.name, f"a matrix with a dtype was expected of a {kind}")
    scale = _scales(catalogue, catalogue.want(stem + "scale", HALVES), codes.shape)
    parts, zero = [codes.name, scale.name], None
    points = catalogue.tensors.get(stem + "zero_point")
    if points is not None:
        catalogue.want(points.name, ("I8", "I32", *HALVES))
        if element_count(points.shape) != element_count(catalogue.tensors[scale.name].shape):
            raise catalogue.broken(points.name, "there should be as many zero points as scales")
        zero = Scales(points.name, scale.rows, scale.cols)
        parts.append(points.name)
    if stem + "act_pre_scale" in catalogue.tensors:
        raise catalogue.refused(f"stores {name} with a scale of its input, which is not read here")
    dropped = {
        stem + extra: f"activation scale of the quantized form of {name}"
        for extra in _ACTIVATIONS
        if stem + extra in catalogue.tensors
    }
    scheme = f"torchao, {_bits_text(said['_data'], codes.dtype)}, {_blocks_text(scale, codes.shape)}"
    table = _TABLES[codes.dtype]
    return RowCodes(name, codes.shape, dtype, scheme, tuple(parts), 8, scale, table=table, zero=zero), dropped


def _dtype(said: Any) -> str | None:
    named = said.get("_data") if isinstance(said, Mapping) else said
    return FLOAT_DTYPES.get(str(named).removeprefix("torch."))


def _scales(catalogue: Catalogue, scale: Stored, shape: tuple[int, ...]) -> Scales:
    """Blocks of rows and columns that share a scale, which must be whole ones."""
    (out, cols), size = shape, scale.shape
    if element_count(size) == 1:
        return Scales(scale.name, max(out, 1), max(cols, 1))
    if len(size) == 1:
        size = (*size, 1)
    if len(size) != 2 or not all(size) or out % size[0] or cols % size[1] or not out or not cols:
        raise catalogue.broken(scale.name, f"its shape {list(scale.shape)} does not fit a weight {list(shape)}")
    return Scales(scale.name, out // size[0], cols // size[1])


def _bits_text(data: Mapping[str, Any], dtype: str) -> str:
    if dtype != "I8":
        return "FP8"
    target = data.get("target_dtype")
    named = str(target.get("_data") if isinstance(target, Mapping) else target)
    return f"{named.removeprefix('int')} bits" if named.startswith("int") else "8 bits"


def _blocks_text(scale: Scales, shape: tuple[int, ...]) -> str:
    if scale.rows > 1:
        return "a scale for each tensor" if scale.rows >= shape[0] else f"blocks of {scale.rows} x {scale.cols}"
    return "a scale for each row" if scale.cols >= shape[1] else f"groups of {scale.cols}"
