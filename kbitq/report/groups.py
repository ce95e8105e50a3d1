"""Rows of an inspection, summed up by layer and by role."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kbitq.choose.tensor_names import layer_of, role_of, short_roles
from kbitq.codecs.base import coded_nbytes
from kbitq.format import DEFAULT_CODEC, element_count

Row = Mapping[str, Any]
BARS = "▁▂▃▄▅▆▇█"


def by_role(rows: Sequence[Row]) -> list[Row]:
    """A row for each role of the quantized tensors, in the order in which they come up."""
    chosen = _quantized(rows)
    short = short_roles(list(dict.fromkeys(role_of(r["name"]) for r in chosen)))
    return _grouped(chosen, lambda row: short[role_of(row["name"])])


def by_layer(rows: Sequence[Row]) -> list[Row]:
    """A row for each layer of the quantized tensors; those outside of layers come last, as ``other``."""
    chosen = sorted(_quantized(rows), key=lambda r: (layer_of(r["name"]) is None, layer_of(r["name"]) or 0))
    return _grouped(chosen, lambda row: "other" if layer_of(row["name"]) is None else f"layer {layer_of(row['name'])}")


def worst(rows: Sequence[Row], count: int) -> list[Row]:
    """The tensors of lowest SQNR, the worst first."""
    measured = [r for r in _quantized(rows) if r["sqnr_db"] is not None]
    return sorted(measured, key=lambda r: (r["sqnr_db"], r["name"]))[:count]


def mean_sqnr_db(rows: Iterable[Row]) -> float | None:
    """The SQNR of the relative error averaged over the weights, in dB."""
    weights = noise = 0.0
    for row in rows:
        if row["sqnr_db"] is not None:
            count = element_count(row["shape"])
            weights, noise = weights + count, noise + count * 10 ** (-row["sqnr_db"] / 10)
    return 10 * math.log10(weights / noise) if noise > 0 else None


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """A character for each value, from lowest to highest; a blank for None."""
    steps = len(BARS) - 1
    scale = steps / (high - low) if high > low else 0.0
    return "".join(" " if v is None else BARS[round(min(max((v - low) * scale, 0), steps))] for v in values)


def _quantized(rows: Iterable[Row]) -> list[Row]:
    return [r for r in rows if r["verdict"] == "quantized"]


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> list[Row]:
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(key(row), []).append(row)
    return [_summed(name, group) for name, group in members.items()]


def _summed(name: str, rows: Sequence[Row]) -> Row:
    """``over_depth`` is the mean SQNR in each layer, by its number."""
    weights = sum(element_count(r["shape"]) for r in rows)
    stored = sum(coded_nbytes(r.get("codec", DEFAULT_CODEC), r["name"], r["shape"], r["k"]) for r in rows)
    layers: dict[int, list[Row]] = {}
    for row in rows:
        if (layer := layer_of(row["name"])) is not None:
            layers.setdefault(layer, []).append(row)
    lowest = worst(rows, 1)
    return {
        "group": name, "tensors": len(rows), "parameters": weights, "bytes": sum(r["bytes"] for r in rows),
        "ks": sorted({r["k"] for r in rows}), "bits_per_weight": 8 * stored / weights if weights else 0.0,
        "sqnr_db": mean_sqnr_db(rows),
        "worst": {"name": lowest[0]["name"], "sqnr_db": lowest[0]["sqnr_db"]} if lowest else None,
        "over_depth": {layer: mean_sqnr_db(layers[layer]) for layer in sorted(layers)},
    }  # fmt: skip
