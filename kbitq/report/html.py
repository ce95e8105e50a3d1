"""One self-contained page about a quantized checkpoint, or two side by side: no network, opens from disk.

The charts are Vega-Lite's, drawn in the browser by the libraries that the package vl-convert-python carries; the page's
own scripts draw the table and open a tensor. Without ``pip install 'kbitq[html]'`` there is no page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from kbitq.checkpoint.inspection import InspectReport, inspect
from kbitq.checkpoint.output.extra_output import check_extra_output, write_extra_output
from kbitq.checkpoint.plan.totals import codec_of
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.storage import Storage
from kbitq.codecs.base import bits_per_weight, codec_names, get_codec
from kbitq.errors import BuildError
from kbitq.format import DEFAULT_CODEC
from kbitq.report import charts, curves, facts, tensor_charts
from kbitq.report.difference import difference
from kbitq.report.expected import CHANGES, STEPS, expected_db, step_names
from kbitq.report.groups import mean_sqnr_db
from kbitq.report.side import Row, Side, Watch, read_side
from kbitq.report.usage import usage
from kbitq.text_safety import all_printable

CHOSEN = 200  # tensors with histograms on the page: the worst ones
_SCRIPTS = ("draw.js", "tensor.js", "table.js")
_ROW = ("name", "layer", "shape", "k", "bits_per_weight", "sqnr_db", "expected_db", "off_db", "max_abs_err", "bytes",
        "codebook", "scale")  # fmt: skip


def write_page(
    path: str | Path | Storage,
    out: str | Path,
    against: str | Path | Storage | None = None,
    progress: Watch = None,
    *,
    diff: str | Path | Storage | None = None,
    force: bool = True,
) -> list[InspectReport]:
    """Write the page of a quantized checkpoint to ``out``.

    Args:
        path: a file or folder written by kbitq.
        out: an HTML file; replaced if it exists, unless it is a part of what is read.
        against: the source; then errors are measured again, and the page has its weights and what other K would give.
        progress: called as the work goes on.
        diff: another quantization of the same source, to stand beside the first.
        force: an ``out`` that exists is replaced.

    Returns:
        The inspection that the page shows, and that of ``diff``.

    Raises:
        BuildError: the libraries are not installed. CheckpointError, FormatError: as in ``inspect``, and where ``out``
            cannot be written or would touch what is read, or the two are not of one source.
    """
    libraries, inputs = _libraries(), [place for place in (path, against, diff) if place is not None]
    check_extra_output(out, inputs, force=force)
    sides = [read_side("A", path, against, progress)]
    if diff is not None:
        sides.append(read_side("B", diff, against, progress))
    text = _rendered(sides, page_data(sides, against, progress), libraries)
    write_extra_output(out, text, inputs, force=force)
    return [side.report for side in sides]


def page_data(sides: Sequence[Side], against: str | Path | Storage | None, progress: Watch = None) -> dict[str, Any]:
    """Everything that the page's scripts show, as JSON."""
    compared = difference(sides[0].report.tensors, sides[1].report.tensors) if len(sides) > 1 else None
    names = {row["name"] for side in sides for row in side.rows}
    codecs = _codecs(sides)
    uniform = {c: _uniform(against, names, c, progress) for c in codecs} if against is not None else {}
    normal = {c: [(_bits(c, k), expected_db(c, k, "optimal", "mse") or 0.0) for k in get_codec(c).ks] for c in codecs}
    placed = {row["name"]: charts.place_of(row) for side in reversed(sides) for row in side.rows}
    drawn = {
        "heat": charts.heat(sides[0]) if compared is None else charts.changes(compared, placed),
        "roles": charts.roles(sides),
        "layers": charts.layers(sides),
        "sizes": charts.sizes(sides),
        "curve": curves.curve(sides, uniform, normal),
        **{f"budget{side.key}": curves.budget(side) for side in sides},
        "weights": tensor_charts.weights(),
        "indices": tensor_charts.indices(),
        "scales": tensor_charts.scales(),
    }
    return {
        "sides": [{"key": side.key, "name": side.name} for side in sides],
        "rows": {side.key: {row["name"]: _row(row) for row in side.rows} for side in sides},
        "compared": compared and [row for row in compared if row["name"] in names],
        "usage": _usage(sides, against, progress),
        "charts": {name: spec for name, spec in drawn.items() if spec is not None},
    }


def _row(row: Row) -> Row:
    """Of a tensor, what the page's scripts show."""
    return {**{key: row[key] for key in _ROW}, "coding": codec_of(row)}


def _usage(sides: Sequence[Side], against: str | Path | Storage | None, progress: Watch) -> dict[str, dict[str, Any]]:
    """Histograms of the worst tensors, by name and checkpoint."""
    source = open_source(against) if against is not None else None
    chosen = charts.worst_names(sides, CHOSEN)
    found: dict[str, dict[str, Any]] = {}
    for side in sides:
        here = [name for name in chosen if name in side.opened.tensors]
        for name, counted in usage(side.opened, here, source, progress).items():
            found.setdefault(name, {})[side.key] = counted.to_json()
    return found


def _codecs(sides: Sequence[Side]) -> list[str]:
    """Those that curves are drawn of: ``planes``, and what these checkpoints are coded with."""
    used = {codec_of(row) for side in sides for row in side.rows}
    return [codec for codec in codec_names() if codec == DEFAULT_CODEC or codec in used]


def _bits(codec: str, k: int) -> float:
    """Bits per weight of a large matrix."""
    return bits_per_weight(codec, "weight", (1024, 1024), k)


def _uniform(source: str | Path | Storage, names: set[str], codec: str, progress: Watch) -> list[tuple[float, float]]:
    """(bits per weight, SQNR) of the source's same tensors at each K of a codec for all of them, from a sample."""
    ks = tuple(get_codec(codec).ks)
    found = inspect(source, ks=ks, sample=True, progress=progress, codec=codec)
    rows = [(r, would) for r in found.tensors if (would := r["would"]) and r["name"] in names]
    points = []
    for k in ks:
        decibels = mean_sqnr_db({**r, "sqnr_db": would[k]["sqnr_db"]} for r, would in rows)
        if decibels is not None:
            points.append((_bits(codec, k), decibels))
    return points


def _libraries() -> tuple[Any, str]:
    """Jinja2 and the script of the charts."""
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise BuildError(
            f"the page needs the package {error.name}, which is not installed", hint="pip install 'kbitq[html]'"
        ) from None
    bundle: Any = vl_convert.javascript_bundle  # Any: its stub forgets that the snippet is optional
    return jinja2, bundle(vl_version=charts.VEGA_LITE)


def _rendered(sides: Sequence[Side], data: dict[str, Any], libraries: tuple[Any, str]) -> str:
    jinja2, script = libraries
    folder = resources.files("kbitq.report") / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *_SCRIPTS)}
    template = jinja2.Environment(autoescape=True).from_string(parts["page.html"])
    safe = jinja2.utils.markupsafe.Markup
    words = all_printable({
        "title": " and ".join(side.name for side in sides),
        "sides": [{"key": side.key, "name": side.name, "origin": facts.origin(side)} for side in sides],
        "facts": facts.facts(sides[0]),
        "compared": facts.compared_facts(*sides) if len(sides) > 1 else None,
        "evaluations": facts.evaluations(sides),
        "tasks": facts.tasks(sides),
        "kept": facts.kept(sides[0]),
    })  # fmt: skip
    return str(
        template.render(
            **words,
            evaluation_head=facts.EVALUATION_HEAD,
            task_head=facts.TASK_HEAD,
            mixed=any(len({row["k"] for row in side.rows}) > 1 for side in sides),
            steps=_legend(CHANGES if len(sides) > 1 else STEPS),
            charts=data["charts"],
            css=safe(parts["page.css"]),
            libraries=safe(_inline(script)),
            scripts=safe(_inline("\n".join(parts[name] for name in _SCRIPTS))),
            data=safe(_json(all_printable(data))),
        )
    )


def _legend(limits: tuple[float, ...]) -> list[tuple[str, str]]:
    """The colours of the map and what they mean, from the lowest."""
    bounds = [f"{limit:+g}".replace("-", "\N{MINUS SIGN}") for limit in limits]
    texts = [f"below {bounds[0]}", *(f"{a} to {b}" for a, b in pairwise(bounds)), f"above {bounds[-1]}"]
    return list(zip(step_names(limits), texts, strict=True))


def _inline(script: str) -> str:
    """A script that cannot end the element it stands in."""
    return script.replace("</script", "<\\/script")


def _json(data: Any) -> str:
    """JSON that is safe inside an element of HTML, whatever the tensors are called."""
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
