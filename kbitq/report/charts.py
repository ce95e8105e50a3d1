"""The charts of the page as Vega-Lite specifications.

A colour ``var(--name)`` is the page's, and its script fills it in. Each chart has one scale; what it shows beside that
stands in the tip of a mark. Every text of a tip is made here, so that a value that was not measured is a dash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.report.expected import CHANGES, STEPS, step_names, step_of
from kbitq.report.groups import by_layer, by_role, mean_sqnr_db, worst
from kbitq.report.side import Side
from kbitq.report.texts import decibels, ks, signed_decibels, size

VEGA_LITE = "6.4"
Spec = dict[str, Any]
Row = dict[str, Any]

COLOURS = {"A": "var(--first)", "B": "var(--second)"}
_ROLE_AXIS = {"labelLimit": 200, "ticks": False, "domain": False}


def chart(**parts: Any) -> Spec:
    """A Vega-Lite specification as wide as its place."""
    return {"$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE[0]}.json", "width": "container", **parts}


def tips(**titles: str) -> list[Spec]:
    """A tip from fields that are texts already."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


# --- the map


def heat(side: Side) -> Spec:
    """By layer and role, how far the lowest SQNR is from what normal weights have; the K in each cell."""
    cells = []
    for (role, layer), rows in _cells(side.rows).items():
        lowest = min(rows, key=lambda r: (r["off_db"] is None, r["off_db"] or 0.0))
        cells.append({
            "role": role, "layer": layer, "name": lowest["name"], "tensors": str(len(rows)),
            "k": ks(sorted({r["k"] for r in rows})), "step": step_of(lowest["off_db"], STEPS),
            "db": decibels(lowest), "off": signed_decibels(lowest["off_db"]),
            "expected": "-" if lowest["expected_db"] is None else f"{lowest['expected_db']:.2f} dB",
            "size": size(sum(r["bytes"] for r in rows)),
        })  # fmt: skip
    shown = tips(name="Tensor", tensors="Tensors here", k="K", db="SQNR, lowest", expected="Normal weights",
                 off="Difference", size="Size")  # fmt: skip
    return _map(cells, shown, STEPS)


def changes(rows: Sequence[Mapping[str, Any]], placed: Mapping[str, tuple[str, str]]) -> Spec:
    """By layer and role, how much SQNR the second checkpoint gains; K of both in each cell where they differ.

    ``placed`` is role and layer of each tensor by its name.
    """
    members: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["name"] in placed:
            members[placed[row["name"]]].append(dict(row))
    cells = []
    for (role, layer), group in members.items():
        lowest = min(group, key=lambda r: (r["more_db"] is None, r["more_db"] or 0.0))
        before, after = (ks(sorted({r["k"][i] for r in group if r["k"][i]})) for i in (0, 1))
        cells.append({
            "role": role, "layer": layer, "name": lowest["name"], "tensors": str(len(group)),
            "k": before if before == after else f"{before}→{after}", "step": step_of(lowest["more_db"], CHANGES),
            "gain": signed_decibels(lowest["more_db"]), "more": size(sum(r["more_bytes"] for r in group)),
        })  # fmt: skip
    shown = tips(name="Tensor", tensors="Tensors here", k="K", gain="B's gain, lowest", more="More bytes")
    return _map(cells, shown, CHANGES)


def _cells(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    members: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        members[place_of(row)].append(row)
    return members


def place_of(row: Row) -> tuple[str, str]:
    """Role and layer of a row, as the map names them."""
    return row["role"], "other" if row["layer"] is None else str(row["layer"])


def _map(cells: list[Row], shown: list[Spec], limits: tuple[float, ...]) -> Spec:
    layers = sorted({int(c["layer"]) for c in cells if c["layer"] != "other"})
    columns = [*map(str, layers), *(["other"] if any(c["layer"] == "other" for c in cells) else [])]
    roles = list(dict.fromkeys(c["role"] for c in cells))
    x = {"field": "layer", "type": "ordinal", "title": "layer", "scale": {"domain": columns},
         "axis": {"labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}}  # fmt: skip
    y = {"field": "role", "type": "nominal", "title": None, "sort": roles, "axis": _ROLE_AXIS}
    domain = [*step_names(limits), "none"]
    colour = {"field": "step", "type": "nominal", "legend": None,
              "scale": {"domain": domain, "range": [f"var(--{name})" for name in domain]}}  # fmt: skip
    on_colour = {**colour, "scale": {"domain": domain, "range": [f"var(--on-{name})" for name in domain]}}
    return chart(
        height=28 * len(roles), data={"values": cells}, encoding={"x": x, "y": y, "tooltip": shown},
        layer=[
            {"mark": {"type": "rect", "cornerRadius": 2, "cursor": "pointer"}, "encoding": {"color": colour}},
            {"mark": {"type": "text", "fontSize": 11, "cursor": "pointer"},
             "encoding": {"text": {"field": "k"}, "color": on_colour}},
        ],
        resolve={"scale": {"color": "independent"}},
        config={"axis": {"grid": False}, "scale": {"bandPaddingInner": 0.05}},
        usermeta={"columns": len(columns), "characters": max((len(c["k"]) for c in cells), default=1)},
    )  # fmt: skip


# --- roles, layers, sizes


def roles(sides: Sequence[Side]) -> Spec:
    """SQNR of each role: a bar from its worst tensor to its best, a point for the mean."""
    values = [_spread(side, group, "role") for side in sides for group in by_role(side.rows)]
    names = list(dict.fromkeys(v["group"] for v in values))
    y = {"field": "group", "type": "nominal", "title": None, "scale": {"domain": names}, "axis": _ROLE_AXIS}
    x = {"field": "mean", "type": "quantitative", "title": "SQNR (dB)", "scale": {"zero": False, "padding": 10}}
    return chart(
        height=(34 if len(sides) > 1 else 26) * len(names), data={"values": values},
        encoding={"y": y, **_offset(sides), "color": _colour(sides), "tooltip": _SPREAD_TIPS},
        layer=[
            {"mark": {"type": "rule", "strokeWidth": 5, "opacity": 0.35, "strokeCap": "round"},
             "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
            {"mark": {"type": "point", "filled": True, "size": 60, "opacity": 1}, "encoding": {"x": x}},
        ],
    )  # fmt: skip


def layers(sides: Sequence[Side]) -> Spec | None:
    """SQNR of each layer over depth: a band from its worst tensor to its best, a line. None of one layer."""
    groups = [(side, g) for side in sides for g in by_layer(side.rows) if g["group"] != "other"]
    values = [{**_spread(side, g, "layer"), "layer": int(g["group"].removeprefix("layer "))} for side, g in groups]
    if len({v["layer"] for v in values}) < 2:
        return None
    x = {"field": "layer", "type": "quantitative", "title": "layer",
         "scale": {"zero": False, "nice": False}, "axis": {"tickMinStep": 1, "format": "d", "grid": False}}  # fmt: skip
    y = {"field": "mean", "type": "quantitative", "title": "SQNR (dB)", "scale": {"zero": False}}
    line = {"type": "line", "point": {"size": 45, "opacity": 1}}
    return chart(
        height=230, data={"values": values},
        encoding={"x": x, "color": _colour(sides), "tooltip": _SPREAD_TIPS},
        layer=[
            {"mark": {"type": "area", "opacity": 0.18, "line": False},
             "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
            {"mark": line, "encoding": {"y": y}},
        ],
    )  # fmt: skip


_SPREAD_TIPS = tips(
    group="Of", side="Checkpoint", db="Mean SQNR", range="Worst to best", ks="K", bits="Bits per weight", size="Size"
)


def _spread(side: Side, group: Mapping[str, Any], kind: str) -> Row:
    """A group of tensors as a mark: mean, worst and best SQNR, and the rest as text."""
    of = side.rows if kind == "layer" else None
    members = [r for r in of or side.rows if _belongs(r, group["group"], kind)]
    known = [r["sqnr_db"] for r in members if r["sqnr_db"] is not None]
    low, high = (min(known), max(known)) if known else (None, None)
    return {
        "group": group["group"], "side": side.name, "key": side.key,
        "mean": group["sqnr_db"], "low": low, "high": high,
        "db": signed_decibels(group["sqnr_db"]).lstrip("+"),
        "range": f"{low:.2f} to {high:.2f} dB" if low is not None else "-",
        "ks": ", ".join(map(str, group["ks"])), "bits": f"{group['bits_per_weight']:.2f}", "size": size(group["bytes"]),
    }  # fmt: skip


def _belongs(row: Row, group: str, kind: str) -> bool:
    return row["role"] == group if kind == "role" else f"layer {row['layer']}" == group


def sizes(sides: Sequence[Side]) -> Spec:
    """Where the bytes are: each role, and what is kept by its reason."""
    values = []
    for side in sides:
        total = sum(r["bytes"] for r in [*side.rows, *side.kept]) or 1
        parts = {(g["group"], "quantized"): g["bytes"] for g in by_role(side.rows)}
        for row in side.kept:
            key = (f"kept: {row['reason'] or 'no reason given'}", "kept")
            parts[key] = parts.get(key, 0) + row["bytes"]
        values += [
            {"part": name, "what": what, "bytes": count, "size": size(count), "share": f"{100 * count / total:.1f} %",
             "side": side.name, "key": side.key}
            for (name, what), count in parts.items()
        ]  # fmt: skip
    names = sorted({v["part"] for v in values}, key=lambda n: -max(v["bytes"] for v in values if v["part"] == n))
    largest = max((v["bytes"] for v in values), default=1)
    y = {"field": "part", "type": "nominal", "title": None, "scale": {"domain": names}, "axis": _ROLE_AXIS}
    x = {"field": "bytes", "type": "quantitative", "scale": {"domain": [0, 1.25 * largest]}, "axis": None}
    shown = tips(part="Of", side="Checkpoint", size="Size", share="Share of all bytes")
    kept = {"test": "datum.what === 'kept'", "value": "var(--muted)"}
    fill = _colour(sides) if len(sides) > 1 else {"condition": kept, "value": COLOURS["A"]}
    return chart(
        height=(32 if len(sides) > 1 else 24) * len(names), data={"values": values},
        encoding={"y": y, "x": x, **_offset(sides), "tooltip": shown},
        layer=[
            {"mark": {"type": "bar", "opacity": 0.85, "cornerRadiusEnd": 2}, "encoding": {"color": fill}},
            {"mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 11, "color": "var(--ink)"},
             "encoding": {"text": {"field": "size"}}},
        ],
    )  # fmt: skip


def _offset(sides: Sequence[Side]) -> Spec:
    """A row of its own for each checkpoint."""
    domain = [side.key for side in sides]
    return {"yOffset": {"field": "key", "type": "nominal", "scale": {"domain": domain}}} if len(sides) > 1 else {}


def _colour(sides: Sequence[Side]) -> Spec:
    """A colour for each checkpoint, and a legend where there are two."""
    if len(sides) == 1:
        return {"value": COLOURS["A"]}
    keys = [side.key for side in sides]
    return {
        "field": "key", "type": "nominal", "title": None,
        "legend": {"orient": "top", "symbolType": "circle", "symbolOpacity": 1},
        "scale": {"domain": keys, "range": [COLOURS[key] for key in keys]},
    }  # fmt: skip


def overall(side: Side) -> tuple[float | None, bool]:
    """The SQNR of a checkpoint, and whether it was measured over all weights and not averaged."""
    totals = side.report.totals
    if totals["sqnr_db"] is not None:
        return totals["sqnr_db"], True
    recorded = side.ledger.get("totals")
    found = recorded.get("sqnr_db") if isinstance(recorded, Mapping) else None
    return (float(found), True) if isinstance(found, float) else (mean_sqnr_db(side.rows), False)


def worst_names(sides: Sequence[Side], count: int) -> list[str]:
    """The tensors of lowest SQNR of any of the checkpoints."""
    return list(dict.fromkeys(row["name"] for side in sides for row in worst(side.rows, count)))
