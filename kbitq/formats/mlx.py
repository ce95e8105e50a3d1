"""MLX: codes packed along rows with a scale and a bias for each group of columns, and its modes mxfp4, nvfp4, mxfp8.

``X.weight`` uint32 ``[out, in * b / 32]``, a dense stream along each row; ``X.scales`` and ``X.biases``
``[out, groups]``: ``code * scale + bias``, each operation rounded to the dtype of the scales. In the other modes there
are no biases and scales are bytes. ``quantization`` of config.json says bits and group size, which shapes alone do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbitq.formats.base import HALVES, Catalogue, Found, Stored, whole_number
from kbitq.formats.row_codes import RowCodes
from kbitq.formats.scales import Scales

DEFAULTS = {"bits": 4, "group_size": 64}
_MODES = {"mxfp4": (4, 32, "e2m1", "e8m0"), "nvfp4": (4, 16, "e2m1", "e4m3"), "mxfp8": (8, 32, "e4m3", "e8m0")}
_KEY = "quantization"


def recognise(catalogue: Catalogue) -> Found:
    """MLX's weights. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for stem, scales in catalogue.ending(".scales"):
        codes = catalogue.tensors.get(stem + ".weight")
        if codes is not None and codes.dtype == "U32" and 2 <= len(codes.shape) <= 3:
            found.weights.append(_weight(catalogue, stem, codes, scales))
    return found


def _options(catalogue: Catalogue, stem: str) -> Mapping[str, Any]:
    """What the config says of a module: its own table, else the model's."""
    said = catalogue.config.get(_KEY, catalogue.quantization)
    said = said if isinstance(said, Mapping) else {}
    own = said.get(stem)
    return own if isinstance(own, Mapping) else said


def _weight(catalogue: Catalogue, stem: str, codes: Stored, scales: Stored) -> RowCodes:
    options = _options(catalogue, stem)
    mode = str(options.get("mode") or "affine").lower()
    biases = catalogue.tensors.get(stem + ".biases")
    if (mode == "affine") != (biases is not None) or (mode != "affine" and mode not in _MODES):
        raise catalogue.refused(f"stores {stem} in MLX's mode {mode!r} in a way that is not read here")
    if biases is not None:
        return _affine(catalogue, options, codes, scales, biases)
    bits, group, table, kind = _MODES[mode]
    shape = _shape(catalogue, codes, scales, bits, group)
    catalogue.want(scales.name, ("U8",))
    scale = Scales(scales.name, 1, group, kind)
    return RowCodes(codes.name, shape, "BF16", f"MLX, {mode}", (codes.name, scales.name), bits, scale, table=table)


def _affine(
    catalogue: Catalogue, options: Mapping[str, Any], codes: Stored, scales: Stored, biases: Stored
) -> RowCodes:
    catalogue.want(scales.name, HALVES)
    catalogue.want(biases.name, (scales.dtype,), scales.shape)
    bits = whole_number(options.get("bits", DEFAULTS["bits"]), 1, 8)
    group = whole_number(options.get("group_size", DEFAULTS["group_size"]), 1, 1 << 20)
    if bits is None or group is None:
        raise catalogue.refused(f"says {dict(options)!r:.80} of MLX")
    shape = _shape(catalogue, codes, scales, bits, group)
    scheme = f"MLX, {bits} bits, groups of {group}"
    scale, bias = Scales(scales.name, 1, group), Scales(biases.name, 1, group)
    stored = (codes.name, scales.name, biases.name)
    return RowCodes(codes.name, shape, scales.dtype, scheme, stored, bits, scale, bias=bias, round_each=True)


def _shape(catalogue: Catalogue, codes: Stored, scales: Stored, bits: int, group: int) -> tuple[int, ...]:
    """The weight's shape, of which words of codes and groups of scales must tell the same."""
    cols, rest = divmod(codes.shape[-1] * 32, bits)
    if rest or scales.shape != (*codes.shape[:-1], cols // group) or cols % group or not cols:
        raise catalogue.broken(
            codes.name, f"its shape and that of {scales.name} do not fit {bits} bits in groups of {group}"
        )
    return (*codes.shape[:-1], cols)
