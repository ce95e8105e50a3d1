"""The pictures of docs/quality.md, drawn from benchmarks/quality.json. Up is better in both.

They are narrow, with large letters, so that they can be read at the width of a telephone.
"""

from __future__ import annotations

from typing import Any

WIDTH, HEIGHT = 420, 340
TEXT, SMALL = 14, 12
WIDEST = 5.6  # bits a weight that are drawn
FLOOR = 14  # perplexities are drawn as the root of what they are above it, so that 4 bits are not all on one line
GREY = "#5d6978"
# By series: colour, shape of its points, and whether a line joins them.
LOOKS = {
    "kbitq --bpw": ("#1f5fd6", "circle", True),
    "kbitq, one K": ("#6fa8ff", "circle", True),
    "kbitq, trellis": ("#7a3fc0", "circle", True),
    "kbitq, trellis, scale block 128": ("#b58be0", "circle", True),
    "kbitq --bpw, both codecs": ("#c02f8f", "circle", True),
    "kbitq, one K, calibrated": ("#0b3a8c", "triangle-down", True),
    "kbitq, trellis, calibrated": ("#4a1a86", "triangle-down", True),
    "kbitq, trellis 128, calibrated": ("#8a4fd0", "triangle-down", True),
    "llama.cpp": (GREY, "diamond", False),
    "bitsandbytes": ("#a0651a", "square", False),
    "EXL3, without calibration": ("#d9602b", "triangle-up", True),
    "EXL3, with calibration": ("#2f8f6b", "triangle-up", True),
}
NAMED = ("llama.cpp", "bitsandbytes")  # series whose points carry their labels
# Where labels stand that are not on the right of their points: the side, and how far below.
PLACES: dict[str, dict[str, tuple[str, int]]] = {
    "perplexity": {
        "Q2_K": ("left", 0), "IQ3_XXS": ("right", 6), "Q3_K": ("right", 2), "IQ3_S": ("right", 4),
        "IQ4_XS": ("middle", -12), "MXFP4": ("right", 18), "NF4 double": ("left", 14), "Q4_K": ("right", 6),
        "Q4_0": ("right", 0), "NF4": ("right", 5), "Q5_K": ("left", 12),
    },
    "divergence": {
        "IQ2_S": ("left", 0), "IQ3_S": ("right", 8), "Q3_K": ("right", -3), "IQ4_XS": ("left", -3),
        "Q4_0": ("right", -3), "NF4": ("right", 6), "NF4 double": ("left", 8), "Q5_K": ("left", -4),
    },
}  # fmt: skip
SIDES = {
    "left": {"align": "right", "dx": -7},
    "right": {"align": "left", "dx": 7},
    "middle": {"align": "center", "dx": 7},
}


def perplexity(data: dict[str, Any]) -> str:
    """SVG: perplexity against bits a weight, the axis turned round."""
    axis = {
        "field": "above", "type": "quantitative", "title": "perplexity (up is better)",
        "scale": {"type": "sqrt", "domain": [0.2, 6.2], "reverse": True, "nice": False},
        "axis": {"values": [0.5, 1, 2, 3, 4, 5, 6], "labelExpr": f"datum.value + {FLOOR}"},
    }  # fmt: skip
    before = data["perplexity"]
    line = {"above": before - FLOOR, "bits": 2.04, "text": f"before quantizing: {before:.2f}"}
    height = {"field": "above", "type": "quantitative"}
    layers = [
        {
            "data": {"values": [line]}, "encoding": {"y": height, "x": {"value": 0}, "x2": {"value": WIDTH}},
            "mark": {"type": "rule", "strokeDash": [5, 4], "color": GREY},
        },
        {
            "data": {"values": [line]}, "encoding": {"y": height, "text": {"field": "text"}},
            "mark": {"type": "text", "align": "left", "dy": -8, "fontSize": SMALL, "color": GREY},
        },
    ]  # fmt: skip
    return _svg(_points(data, "perplexity"), axis, PLACES["perplexity"], layers)


def divergence(data: dict[str, Any]) -> str:
    """SVG: the mean divergence from the original's predictions against bits a weight, on a logarithmic axis."""
    axis = {
        "field": "divergence", "type": "quantitative", "title": "divergence in nats (up is better)",
        "scale": {"type": "log", "reverse": True, "domain": [0.004, 0.55], "nice": False},
        "axis": {"values": [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], "format": "~g"},
    }  # fmt: skip
    return _svg(_points(data, "divergence"), axis, PLACES["divergence"], [])


def _points(data: dict[str, Any], field: str) -> list[dict[str, Any]]:
    return [
        {**point, "series": name, "above": point["perplexity"] - FLOOR}
        for name in LOOKS
        for point in data["series"].get(name, [])
        if point[field] is not None and point["bits"] <= WIDEST
    ]


def _svg(
    points: list[dict[str, Any]], y: dict[str, Any], places: dict[str, tuple[str, int]], more: list[dict[str, Any]]
) -> str:
    import vl_convert

    names = [name for name in LOOKS if any(p["series"] == name for p in points)]
    colours, shapes = [LOOKS[n][0] for n in names], [LOOKS[n][1] for n in names]
    legend = {"orient": "bottom", "columns": 2, "labelLimit": 250, "symbolSize": 80}
    key = {"field": "series", "type": "nominal", "title": None, "legend": legend}
    colour = {**key, "scale": {"domain": names, "range": colours}}
    shape = {**key, "scale": {"domain": names, "range": shapes}}
    joined = [p for p in points if LOOKS[p["series"]][2]]
    x = {
        "field": "bits", "type": "quantitative", "title": "bits a weight",
        "scale": {"domain": [2, WIDEST], "nice": False}, "axis": {"values": [2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5]},
    }  # fmt: skip
    spec = {
        "width": WIDTH, "height": HEIGHT, "background": "white", "padding": 8,
        "config": {
            "axis": {"labelFontSize": TEXT, "titleFontSize": TEXT, "titleFontWeight": "normal", "gridColor": "#e6e9ee"},
            "legend": {"labelFontSize": TEXT},
        },
        "encoding": {"x": x, "y": y},
        "layer": [
            *more,
            {
                "data": {"values": joined},
                "mark": {"type": "line", "clip": True, "strokeWidth": 2},
                "encoding": {"color": colour},
            },
            *_labels([p for p in points if p["series"] in NAMED], places),
            {
                "data": {"values": points},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, "clip": True},
                "encoding": {"color": colour, "shape": shape},
            },
        ],
    }  # fmt: skip
    return str(vl_convert.vegalite_to_svg(spec))


def _labels(points: list[dict[str, Any]], places: dict[str, tuple[str, int]]) -> list[dict[str, Any]]:
    """Two layers for each label, since each has its own place: a white edge, where lines end, and the text."""
    made = []
    for point in points:
        side, below = places.get(point["label"], ("right", 0))
        mark = {"type": "text", "fontSize": SMALL, "dy": below, **SIDES[side]}
        edge = {"color": "white", "stroke": "white", "strokeWidth": 3}
        for look in (edge, {"color": LOOKS[point["series"]][0]}):
            text = {"text": {"field": "label"}}
            made.append({"data": {"values": [point]}, "mark": {**mark, **look}, "encoding": text})
    return made
