"""The charts of the page and of the documentation, as Vega-Lite specifications. Colours and fonts are the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.report.known import DB_PER_BIT, NORMAL_DB, OTHERS
from kbitq.report.usage import WEIGHT_RANGE

VEGA_LITE = "6.4"
Spec = dict[str, Any]

_LABELLED = 32  # layers up to which a cell of the heat map has room for its K
_DB = {"field": "db", "type": "quantitative", "title": "SQNR (dB)", "format": ".2f"}
_BPW = {"field": "bpw", "type": "quantitative", "title": "bits per weight", "format": ".3f"}


def _chart(**parts: Any) -> Spec:
    return {"$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE[0]}.json", "width": "container", **parts}


def heat(tensors: Sequence[Mapping[str, Any]]) -> Spec:
    """SQNR by layer and role; the K in each cell where there is room."""
    values = [
        {
            "name": t["name"], "role": t["role"], "layer": "other" if t["layer"] is None else t["layer"], "k": t["k"],
            "db": t["sqnr_db"], "bytes": t["bytes"],
        }
        for t in tensors
    ]  # fmt: skip
    layers = sorted({v["layer"] for v in values if v["layer"] != "other"})
    roles = list(dict.fromkeys(v["role"] for v in values))
    x = {"field": "layer", "type": "ordinal", "title": "layer", "sort": [*layers, "other"], "axis": {"labelAngle": 0}}
    y = {"field": "role", "type": "nominal", "title": None, "sort": roles, "axis": {"labelLimit": 150}}
    colour = {"field": "db", "type": "quantitative", "title": "SQNR (dB)", "scale": {"zero": False}, "aggregate": "min"}
    many = {"field": "db", "aggregate": "min", "title": "SQNR (dB), lowest", "format": ".2f"}
    tips = [
        {"field": "name", "aggregate": "min", "title": "tensor"}, {"aggregate": "count", "title": "tensors"},
        {"field": "k", "aggregate": "min", "title": "K"}, many,
    ]  # fmt: skip
    layer: list[Spec] = [{"mark": {"type": "rect"}, "encoding": {"color": colour, "tooltip": tips}}]
    if len(layers) <= _LABELLED:
        text = {"field": "k", "aggregate": "min", "type": "quantitative"}
        layer.append({"mark": {"type": "text", "fontSize": 11, "color": "white"}, "encoding": {"text": text}})
    return _chart(
        height=26 * len(roles), data={"values": values}, encoding={"x": x, "y": y}, layer=layer,
        config={"axis": {"grid": False}, "scale": {"bandPaddingInner": 0.06}},
    )  # fmt: skip


def roles(groups: Sequence[Mapping[str, Any]]) -> Spec:
    """Bytes and SQNR of each role, a bar and a point."""
    y = {"field": "group", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 150}}
    return _chart(
        height=22 * len(groups), **_sized(groups, "role", {"y": y}, "x", {"type": "point", "filled": True, "size": 60})
    )


def layers(groups: Sequence[Mapping[str, Any]]) -> Spec:
    """Bytes and SQNR of each layer, bars and a line over depth."""
    x = {
        "field": "group", "type": "ordinal", "sort": None, "title": "layer",
        "axis": {"labelAngle": 0, "labelOverlap": True},
    }  # fmt: skip
    return _chart(
        height=190, **_sized(groups, "layer", {"x": x}, "y", {"type": "line", "point": {"color": {"expr": "second"}}})
    )


def _sized(groups: Sequence[Mapping[str, Any]], kind: str, place: Spec, along: str, mark: Spec) -> Spec:
    """Two layers that share ``place`` and have bytes and SQNR on two axes ``along`` the other side."""
    values = [
        {
            "group": g["group"].removeprefix("layer "), "bytes": g["bytes"], "db": g["sqnr_db"],
            "bpw": g["bits_per_weight"], "ks": ", ".join(map(str, g["ks"])),
        }
        for g in groups
    ]  # fmt: skip
    tips = [
        {"field": "group", "title": kind}, {"field": "bytes", "type": "quantitative", "format": ".3s"},
        _BPW, {"field": "ks", "title": "K"}, _DB,
    ]  # fmt: skip
    second = {"expr": "second"}
    db_axis = {"orient": "top" if along == "x" else "right", "tickCount": 4, "titleColor": second, "grid": False}
    byte_axis = {"format": "~s", "tickCount": 4, "titleColor": {"expr": "first"}}
    return {
        "data": {"values": values}, "encoding": {**place, "tooltip": tips},
        "resolve": {"scale": {along: "independent"}},
        "layer": [
            {
                "mark": {"type": "bar", "opacity": 0.6},
                "encoding": {along: {"field": "bytes", "type": "quantitative", "title": "bytes", "axis": byte_axis}},
            },
            {
                "mark": {**mark, "color": second},
                "encoding": {along: {**_DB, "scale": {"zero": False, "padding": 8}, "axis": db_axis}},
            },
        ],
    }  # fmt: skip


def curve(tensors: Sequence[Mapping[str, Any]], uniform: Sequence[tuple[float, float]]) -> Spec:
    """How far each tensor is from the limit, by its bits, among the curves of the alternatives."""
    lines = [_distance(bits, db, curve="this source, one K for all") for bits, db in uniform]
    lines += [_distance(k + 0.25, db, curve="kbitq on normal values") for k, db in NORMAL_DB.items()]
    dots = [
        _distance(t["bits_per_weight"], t["sqnr_db"], name=t["name"], k=t["k"])
        for t in tensors
        if t["sqnr_db"] is not None
    ]
    others = [_distance(o.bits_per_weight, o.normal, name=o.name) for o in OTHERS]
    x = {**_BPW, "scale": {"zero": False, "nice": False, "padding": 16}, "axis": {"format": "~g", "tickCount": 8}}
    y = {"field": "off", "type": "quantitative", "title": "dB from the limit", "scale": {"nice": True}}
    legend = {"orient": "top", "labelLimit": 220}
    by_curve = {"field": "curve", "type": "nominal", "title": None, "legend": legend}
    tips = [_BPW, _DB, {"field": "off", "title": "dB from the limit", "format": ".2f"}]
    muted = {"expr": "muted"}
    return _chart(
        height=300,
        encoding={"x": x, "y": y},
        layer=[
            {
                "data": {"values": lines}, "mark": {"type": "line", "point": True, "strokeWidth": 1.5},
                "encoding": {"color": by_curve, "tooltip": [{"field": "curve", "title": "curve"}, *tips]},
            },
            {
                "data": {"values": others},
                "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 60, "color": muted},
                "encoding": {"tooltip": [{"field": "name", "title": "other format"}, *tips]},
            },
            {
                "data": {"values": others},
                "mark": {"type": "text", "align": "left", "dx": 7, "fontSize": 10, "color": muted},
                "encoding": {"text": {"field": "name"}},
            },
            {
                "data": {"values": dots},
                "mark": {"type": "circle", "size": 60, "opacity": 0.45, "color": {"expr": "first"}},
                "encoding": {"tooltip": [{"field": "name", "title": "tensor"}, {"field": "k", "title": "K"}, *tips]},
            },
        ],
    )  # fmt: skip


def _distance(bits: float, decibels: float, **more: Any) -> Spec:
    """A point: ``off`` is what the SQNR lacks to the limit for independent normal values at these bits."""
    return {"bpw": bits, "db": decibels, "off": DB_PER_BIT * bits - decibels, **more}


def weights() -> Spec:
    """How the weights of the chosen tensor, each over its block's scale, lie among its levels."""
    x = {
        "field": "at", "type": "quantitative", "title": "weight / scale of its block",
        "scale": {"domain": [-WEIGHT_RANGE, WEIGHT_RANGE]},
    }  # fmt: skip
    bars = {
        "x": {**x, "bin": "binned"}, "x2": {"field": "to"},
        "y": {"field": "count", "type": "quantitative", "title": "weights", "axis": {"format": "~s"}},
        "tooltip": [{"field": "at", "format": ".3f", "title": "from"}, {"field": "count", "format": ","}],
    }  # fmt: skip
    tips = [{"field": "level", "title": "level"}, {"field": "at", "format": ".4f"}]
    return _chart(
        height=180,
        layer=[
            {"data": {"name": "weights"}, "mark": {"type": "bar", "opacity": 0.7}, "encoding": bars},
            {
                "data": {"name": "levels"}, "mark": {"type": "rule", "color": {"expr": "second"}, "strokeWidth": 1.5},
                "encoding": {"x": x, "tooltip": tips},
            },
        ],
    )  # fmt: skip


def indices() -> Spec:
    """How often each level of the chosen tensor is used."""
    return _counts("indices", "level", "level", "weights")


def scales() -> Spec:
    """How often each scale of the chosen tensor is used."""
    return _counts("scales", "byte", "scale byte", "blocks")


def _counts(data: str, field: str, title: str, counted: str) -> Spec:
    axis = {"labelOverlap": "greedy", "labelSeparation": 8, "labelAngle": 0}
    return _chart(
        height=140, data={"name": data}, mark={"type": "bar"},
        encoding={
            "x": {"field": field, "type": "ordinal", "title": title, "axis": axis},
            "y": {"field": "count", "type": "quantitative", "title": counted, "axis": {"format": "~s"}},
            "tooltip": [{"field": field, "title": title}, {"field": "count", "title": counted, "format": ","}],
        },
    )  # fmt: skip
