"""Charts of error against size: this checkpoint among other formats, and what its budget had to choose from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kbitq.codecs.base import coded_nbytes, coding_text
from kbitq.format import DEFAULT_CODEC, element_count
from kbitq.report.charts import COLOURS, Row, Spec, chart, overall, tips
from kbitq.report.known import DB_PER_BIT, OTHERS
from kbitq.report.side import Side

_BITS = {"field": "bpw", "type": "quantitative", "title": "bits per weight"}
_UP = {"field": "off", "type": "quantitative", "title": "dB from the limit", "scale": {"zero": False, "padding": 12}}
_LABELLED_LEFT = ("Q2_K", "IQ2_S", "IQ3_S", "MXFP4", "IQ4_XS")  # formats that have another close by on their right


Points = Sequence[tuple[float, float]]  # (bits per weight, SQNR in dB)


def curve(sides: Sequence[Side], uniform: Mapping[str, Points], normal: Mapping[str, Points]) -> Spec:
    """SQNR less 6.02 dB a bit, by bits: up is better, and 0 is the limit for independent normal values.

    Args:
        sides: the checkpoints, each with a mark of its own, and a dot for each tensor.
        uniform: by codec, the source with one K for all; empty where it is not known.
        normal: the same of N(0,1).
    """
    lines = [
        {**_point(bits, db, f"{codec}, one K, {weights} weights"), "codec": codec, "weights": weights}
        for weights, curves in (("normal", normal), ("these", uniform))
        for codec, points in curves.items()
        for bits, db in points
    ]
    dots = [
        {**_point(r["bits_per_weight"], r["sqnr_db"], side.name), "name": r["name"], "k": str(r["k"]), "key": side.key}
        for side in sides
        for r in side.rows
        if r["sqnr_db"] is not None
    ]
    x = {**_BITS, "scale": {"zero": False, "nice": False, "padding": 18}, "axis": {"format": "~g", "tickCount": 7}}
    return chart(
        height=340, encoding={"x": x, "y": _UP},
        layer=[_lines(lines), *_codec_names(lines), *_others(), _dots(sides, dots), *_marks(sides)],
        resolve={"scale": {"color": "independent", "shape": "independent"}},
    )  # fmt: skip


def _point(bits: float, decibels: float, curve: str) -> Row:
    off = decibels - DB_PER_BIT * bits
    said = {"bits": f"{bits:.3f}", "db": f"{decibels:.2f} dB", "off_text": f"{off:.2f} dB"}
    return {"bpw": bits, "off": off, "curve": curve, **said}


_POINT_TIPS = {"bits": "Bits per weight", "db": "SQNR", "off_text": "From the limit"}


def _lines(values: list[Row]) -> Spec:
    """A curve for each codec, which its dash tells, on normal weights and on these, which its colour tells."""
    codecs, weights = (list(dict.fromkeys(v[field] for v in values)) for field in ("codec", "weights"))
    legend = {"orient": "top", "columns": 3, "labelLimit": 300}
    colour = {
        "field": "weights", "type": "nominal", "title": "one K, weights:", "legend": legend,
        "scale": {"domain": weights, "range": ["var(--muted)", "var(--third)"][: len(weights)]},
    }  # fmt: skip
    dash = {
        "field": "codec", "type": "nominal", "title": None, "legend": None,
        "scale": {"domain": codecs, "range": [[1, 0], [6, 3], [2, 2]][: len(codecs)]},
    }  # fmt: skip
    return {
        "data": {"values": values},
        "mark": {"type": "line", "point": {"size": 20}, "strokeWidth": 1.5},
        "encoding": {"color": colour, "strokeDash": dash, "tooltip": tips(curve="Curve", **_POINT_TIPS)},
    }


def _codec_names(values: list[Row]) -> list[Spec]:
    """The name of each codec at the end of its curve, if there are several: Vega warns of a layer without values."""
    last = {v["codec"]: v for v in sorted(values, key=lambda v: v["bpw"])}
    mark = {"type": "text", "align": "right", "dy": -12, "fontSize": 11, "fontWeight": "bold", "color": "var(--muted)"}
    layer = {"data": {"values": list(last.values())}, "mark": mark, "encoding": {"text": {"field": "codec"}}}
    return [layer] if len(last) > 1 else []


def _others() -> list[Spec]:
    """The other formats on normal values, their names beside them."""
    values = [{**_point(o.bits_per_weight, o.normal, ""), "name": o.name} for o in OTHERS]
    shown = tips(name="Format, on normal weights", **_POINT_TIPS)
    layers: list[Spec] = [
        {
            "data": {"values": values},
            "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 55, "color": "var(--muted)"},
            "encoding": {"tooltip": shown},
        }
    ]
    for align, shift in (("left", 7), ("right", -7)):
        named = [v for v in values if (v["name"] in _LABELLED_LEFT) == (align == "right")]
        mark = {"type": "text", "align": align, "dx": shift, "fontSize": 10, "color": "var(--muted)"}
        layers.append({"data": {"values": named}, "mark": mark, "encoding": {"text": {"field": "name"}}})
    return layers


def _dots(sides: Sequence[Side], values: list[Row]) -> Spec:
    keys = [side.key for side in sides]
    colour = {"field": "key", "type": "nominal", "legend": None,
              "scale": {"domain": keys, "range": [COLOURS[key] for key in keys]}}  # fmt: skip
    return {
        "data": {"values": values},
        "mark": {"type": "circle", "size": 40, "opacity": 0.35, "cursor": "pointer"},
        "encoding": {"color": colour, "tooltip": tips(name="Tensor", k="K", **_POINT_TIPS)},
    }


def _marks(sides: Sequence[Side]) -> list[Spec]:
    """Each checkpoint as a whole, its name on a halo that sets it off from what it may lie on."""
    values = []
    for side in sides:
        decibels, bits = overall(side)[0], side.report.totals["bits_per_weight"]
        if decibels is not None and bits:
            label = "this checkpoint" if len(sides) == 1 else f"{side.key} as a whole"
            values.append({**_point(bits, decibels, side.name), "key": side.key, "label": label})
    colour = {"field": "key", "type": "nominal", "legend": None,
              "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())}}  # fmt: skip
    mark = {"type": "point", "shape": "cross", "filled": True, "size": 220, "opacity": 1, "stroke": "var(--paper)"}
    text = {"type": "text", "align": "center", "dy": -15, "fontSize": 12, "fontWeight": "bold"}
    halo = {**text, "color": "var(--paper)", "stroke": "var(--paper)", "strokeWidth": 4}
    encoding = {"color": colour, "tooltip": tips(curve="Checkpoint", **_POINT_TIPS)}
    return [
        {"data": {"values": values}, "mark": mark, "encoding": encoding},
        {"data": {"values": values}, "mark": halo, "encoding": {"text": {"field": "label"}}},
        {"data": {"values": values}, "mark": text, "encoding": {**encoding, "text": {"field": "label"}}},
    ]


def budget(side: Side) -> Spec | None:
    """How much less error each size had than the smallest, what was chosen, and one K for all; None without a budget.

    In dB, so that up is better.
    """
    found = side.ledger.get("budget")
    points = found.get("curve") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(points, list) or len(points) < 2:
        return None
    try:
        line = [(float(p["bits_per_weight"]), float(p["error"])) for p in points]
        chosen = float(found["bits_per_weight"]), float(found["error"])
        uniform = found.get("uniform_k"), found.get("uniform_error")
        codec = str(found.get("uniform_codec", DEFAULT_CODEC))
    except (KeyError, TypeError, ValueError):
        return None
    worst = line[0][1]
    values = [row for bits, error in line if (row := _saving(bits, error, worst, "best at this size"))]
    marks = [_saving(*chosen, worst, "chosen")]
    if isinstance(uniform[0], int) and isinstance(uniform[1], float):
        bits, what = _bits_at(side, codec, uniform[0]), f"{coding_text(codec, uniform[0])} for all"
        marks.append(_saving(bits, uniform[1], worst, what))
    return _budget_chart(values, [mark for mark in marks if mark])


def _bits_at(side: Side, codec: str, k: int) -> float:
    """Bits per weight of the same tensors with one codec and K for all."""
    weights = sum(element_count(row["shape"]) for row in side.rows)
    return 8 * sum(coded_nbytes(codec, row["name"], row["shape"], k) for row in side.rows) / weights


def _saving(bits: float, error: float, worst: float, what: str) -> Row | None:
    """A point: error saved over the smallest choice, in dB. None for no error at all, which no scale of dB has."""
    if not (math.isfinite(error) and error > 0 and worst > 0):
        return None
    saved = 10 * math.log10(worst / error)
    return {"bpw": bits, "saved": saved, "what": what, "bits": f"{bits:.3f}", "text": f"{saved:.2f} dB"}


def _budget_chart(values: list[Row], marks: list[Row]) -> Spec:
    x = {**_BITS, "scale": {"zero": False, "padding": 18}, "axis": {"format": "~g", "tickCount": 7}}
    y = {"field": "saved", "type": "quantitative", "title": "dB less error than the smallest"}
    shown = tips(what="Choice", bits="Bits per weight", text="Less error by")
    chosen = {"condition": {"test": "datum.what === 'chosen'", "value": COLOURS["A"]}, "value": "var(--second)"}
    dot = {"type": "point", "filled": True, "size": 110, "opacity": 1}
    label = {"type": "text", "align": "right", "dx": -9, "dy": -7, "fontSize": 11, "fontWeight": "bold"}
    below = {**label, "align": "left", "dx": 9, "dy": 9}
    first, others = ([mark for mark in marks if (mark["what"] == "chosen") == own] for own in (True, False))
    return chart(
        height=260, encoding={"x": x, "y": y, "tooltip": shown},
        layer=[
            {"data": {"values": values},
             "mark": {"type": "line", "point": {"size": 18}, "color": "var(--muted)", "strokeWidth": 1.5}},
            {"data": {"values": marks}, "mark": dot, "encoding": {"color": chosen}},
            {"data": {"values": first}, "mark": label, "encoding": {"color": chosen, "text": {"field": "what"}}},
            {"data": {"values": others}, "mark": below, "encoding": {"color": chosen, "text": {"field": "what"}}},
        ],
    )  # fmt: skip
