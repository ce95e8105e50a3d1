"""compressed-tensors (llm-compressor): integers packed into words, plain int8 and FP8, NVFP4, MXFP4 and MXFP8.

Packed: ``weight_packed`` int32 ``[out, in * b / 32]``, a dense stream along each row of code + 2^(b-1);
``weight_shape``; ``weight_scale`` ``[out, groups]``; asymmetric: ``weight_zero_point`` packed down each column; in act
order ``weight_g_idx``. Plain: ``weight`` int8 or FP8 with ``weight_scale`` for the tensor, each row, group or block.
NVFP4: ``weight_packed`` uint8, ``weight_scale`` FP8 for 16 columns, divided by ``weight_global_scale``. MX: scales are
bytes 2^(b-127) for 32 columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from kbitq.format import element_count
from kbitq.formats.base import HALVES, Catalogue, Found, Stored, groups_text
from kbitq.formats.row_codes import RowCodes
from kbitq.formats.scales import Scales

METHOD = "compressed-tensors"
_PLAIN = {"I8": ("int8", "8-bit integers"), "F8_E4M3": ("e4m3", "FP8"), "F8_E5M2": ("e5m2", "FP8 (e5m2)")}
_ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point")
_CACHE = ("k_scale", "v_scale", "q_scale")
_NVFP4_GROUP, _MX_GROUP = 16, 32


def recognise(catalogue: Catalogue) -> Found:
    """Weights of compressed-tensors. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for stem, codes in catalogue.ending("weight_packed"):
        if stem + "weight_scale" in catalogue.tensors and len(codes.shape) == 2:
            packed = _fp4(catalogue, stem, codes) if codes.dtype == "U8" else _packed(catalogue, stem, codes)
            found.weights += [packed] if packed is not None else []
    if catalogue.method == METHOD:
        _check_sparsity(catalogue)
        for stem, codes in catalogue.ending("weight"):
            if codes.dtype in _PLAIN and stem + "weight_scale" in catalogue.tensors and len(codes.shape) == 2:
                found.weights.append(_plain(catalogue, stem, codes))
    for weight in found.weights:
        stem = weight.name.removesuffix("weight")
        extra = dict.fromkeys(_ACTIVATIONS, "activation scale") | dict.fromkeys(_CACHE, "scale of the cache")
        found.dropped.update(
            (stem + name, f"{what} of the quantized form of {weight.name}")
            for name, what in extra.items()
            if stem + name in catalogue.tensors
        )
    return found


def _check_sparsity(catalogue: Catalogue) -> None:
    sparsity = catalogue.quantization.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if form not in (None, "", "dense"):
        raise catalogue.refused(f"stores sparse weights ({form!r} of compressed-tensors), which are not read here")


def _packed(catalogue: Catalogue, stem: str, codes: Stored) -> RowCodes | None:
    if stem + "weight_shape" not in catalogue.tensors:
        return None
    catalogue.want(codes.name, ("I32",))
    shape = _shape(catalogue, stem + "weight_shape")
    out, cols = shape
    bits = next((b for b in range(1, 9) if -(-cols * b // 32) == codes.shape[1]), 0)
    if not bits or out != codes.shape[0]:
        raise catalogue.broken(codes.name, f"its shape {list(codes.shape)} does not fit a weight {list(shape)}")
    scale = _scales(catalogue, stem, shape, HALVES)
    groups = -(-cols // scale.cols)
    parts = [codes.name, scale.name, stem + "weight_shape"]
    zero, index = None, ""
    if stem + "weight_zero_point" in catalogue.tensors:
        if scale.rows != 1:
            raise catalogue.broken(scale.name, "zero points go with a scale for each row or group")
        packed = (-(-out * bits // 32), groups)
        zero = Scales(stem + "weight_zero_point", 1, scale.cols, "stream", bits=bits)
        parts.append(catalogue.want(zero.name, ("I32",), packed).name)
    if stem + "weight_g_idx" in catalogue.tensors:
        index = catalogue.want(stem + "weight_g_idx", ("I32", "I64"), (cols,)).name
        parts.append(index)
    scheme = f"compressed-tensors, {bits} bits, {_scale_text(scale, shape)}"
    dtype = catalogue.tensors[scale.name].dtype
    offset = 1 << (bits - 1)
    return RowCodes(
        stem + "weight", shape, dtype, scheme, tuple(parts), bits, scale, offset=offset, zero=zero, index=index
    )


def _plain(catalogue: Catalogue, stem: str, codes: Stored) -> RowCodes:
    table, kind = _PLAIN[codes.dtype]
    shape = codes.shape
    parts, zero = [codes.name, stem + "weight_scale"], None
    if catalogue.tensors[stem + "weight_scale"].dtype == "U8":
        scale = _fixed(catalogue, stem, shape, _MX_GROUP, "U8", "e8m0")
        dtype, scheme = "BF16", "compressed-tensors, MXFP8"
    else:
        scale = _scales(catalogue, stem, shape, HALVES)
        dtype, scheme = catalogue.tensors[scale.name].dtype, f"compressed-tensors, {kind}, {_scale_text(scale, shape)}"
    if stem + "weight_zero_point" in catalogue.tensors:
        points = catalogue.want(stem + "weight_zero_point", ("I8", "F8_E4M3"), catalogue.tensors[scale.name].shape)
        zero = Scales(points.name, scale.rows, scale.cols)
        parts.append(points.name)
    return RowCodes(codes.name, shape, dtype, scheme, tuple(parts), 8, scale, table=table, zero=zero)


def _fp4(catalogue: Catalogue, stem: str, codes: Stored) -> RowCodes | None:
    shape = (codes.shape[0], 2 * codes.shape[1])
    parts: tuple[str, ...]
    if stem + "weight_global_scale" in catalogue.tensors:
        form, parts = "NVFP4", (codes.name, stem + "weight_scale", stem + "weight_global_scale")
        scale = _fixed(catalogue, stem, shape, _NVFP4_GROUP, "F8_E4M3", "float", divisor=parts[2])
        if element_count(catalogue.want(parts[2], ("F32",)).shape) != 1:
            raise catalogue.broken(parts[2], "it should have one element")
    elif catalogue.tensors[stem + "weight_scale"].dtype == "U8":
        form, parts = "MXFP4", (codes.name, stem + "weight_scale")
        scale = _fixed(catalogue, stem, shape, _MX_GROUP, "U8", "e8m0")
    else:
        return None
    return RowCodes(stem + "weight", shape, "BF16", f"compressed-tensors, {form}", parts, 4, scale, table="e2m1")


def _fixed(
    catalogue: Catalogue, stem: str, shape: tuple[int, ...], group: int, dtype: str, kind: str, divisor: str = ""
) -> Scales:
    """Scales of groups whose size the format fixes."""
    if shape[1] % group:
        raise catalogue.broken(stem + "weight_scale", f"{shape[1]} columns are not groups of {group}")
    catalogue.want(stem + "weight_scale", (dtype,), (shape[0], shape[1] // group))
    return Scales(stem + "weight_scale", 1, group, kind, divisor)


def _scales(catalogue: Catalogue, stem: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Scales:
    """Scales whose shape says whether they are of the tensor, of rows, groups or blocks."""
    scale = catalogue.want(stem + "weight_scale", dtypes)
    out, cols = shape
    if element_count(scale.shape) == 1 and out != 1:
        return Scales(scale.name, max(out, 1), max(cols, 1))
    if scale.shape == (out,):
        return Scales(scale.name, 1, max(cols, 1))
    if len(scale.shape) == 2 and scale.shape[0] == out and 0 < scale.shape[1] <= max(cols, 1):
        groups = scale.shape[1]
        if cols % groups == 0:
            return Scales(scale.name, 1, max(cols // groups, 1))
        size = next((s for s in _said(catalogue, "group_size") if s > 0 and -(-cols // s) == groups), 0)
        if size:
            return Scales(scale.name, 1, size)
    for block in _blocks(catalogue):
        if scale.shape == (-(-out // block[0]), -(-cols // block[1])):
            return Scales(scale.name, *block)
    raise catalogue.broken(scale.name, f"its shape {list(scale.shape)} does not fit a weight {list(shape)}")


def _said(catalogue: Catalogue, key: str) -> Iterator[int]:
    """What the config's groups say of their weights under a key, where it is a number."""
    groups = catalogue.quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        value = weights.get(key) if isinstance(weights, Mapping) else None
        if isinstance(value, int):
            yield value


def _blocks(catalogue: Catalogue) -> Iterator[tuple[int, int]]:
    groups = catalogue.quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        value = weights.get("block_structure") if isinstance(weights, Mapping) else None
        if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
            yield value[0], value[1]


def _shape(catalogue: Catalogue, name: str) -> tuple[int, int]:
    stored = catalogue.want(name, ("I64", "I32"), (2,))
    out, cols = struct.unpack("<2q" if stored.dtype == "I64" else "<2i", catalogue.peek(name))
    if not (0 < out < 1 << 40 and 0 < cols < 1 << 40):
        raise catalogue.broken(name, f"it says a shape [{out}, {cols}]")
    return out, cols


def _scale_text(scale: Scales, shape: tuple[int, ...]) -> str:
    if scale.rows == 1:
        return groups_text(scale.cols, shape[1])
    return "a scale for each tensor" if scale.rows >= shape[0] else f"blocks of {scale.rows} x {scale.cols}"
