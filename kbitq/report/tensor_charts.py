"""The charts of one tensor; their data are given when a tensor is chosen."""

from __future__ import annotations

from kbitq.report.charts import Spec, chart
from kbitq.report.usage import WEIGHT_RANGE


def weights() -> Spec:
    """How the weights, each over its block's scale, lie among the levels."""
    x = {
        "field": "at", "type": "quantitative", "title": "weight / scale of its block",
        "scale": {"domain": [-WEIGHT_RANGE, WEIGHT_RANGE]},
    }  # fmt: skip
    bars = {
        "x": {**x, "bin": "binned"}, "x2": {"field": "to"},
        "y": {"field": "count", "type": "quantitative", "title": "weights", "axis": {"format": "~s"}},
        "tooltip": [{"field": "at", "format": ".3f", "title": "from"}, {"field": "count", "format": ","}],
    }  # fmt: skip
    shown = [{"field": "level", "title": "level"}, {"field": "at", "format": ".4f"}]
    return chart(
        height=180,
        layer=[
            {"data": {"name": "weights"}, "mark": {"type": "bar", "color": "var(--first)", "opacity": 0.7},
             "encoding": bars},
            {"data": {"name": "levels"}, "mark": {"type": "rule", "color": "var(--second)", "strokeWidth": 1.5},
             "encoding": {"x": x, "tooltip": shown}},
        ],
    )  # fmt: skip


def indices() -> Spec:
    """How often each level is used."""
    return _counts("indices", "level", "level", "weights")


def scales() -> Spec:
    """How often each scale is used."""
    return _counts("scales", "byte", "scale byte", "blocks")


def _counts(data: str, field: str, title: str, counted: str) -> Spec:
    axis = {"labelOverlap": "parity", "labelSeparation": 8, "labelAngle": 0}
    return chart(
        height=140, data={"name": data}, mark={"type": "bar", "color": "var(--first)"},
        encoding={
            "x": {"field": field, "type": "ordinal", "title": title, "axis": axis},
            "y": {"field": "count", "type": "quantitative", "title": counted, "axis": {"format": "~s"}},
            "tooltip": [{"field": field, "title": title}, {"field": "count", "title": counted, "format": ","}],
        },
    )  # fmt: skip
