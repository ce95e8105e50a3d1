"""One self-contained page about a quantized checkpoint: no network, opens from disk.

The charts are Vega-Lite's, drawn in the browser by the libraries that the package vl-convert-python carries; the page's
own script draws the table and lets a tensor be chosen. Without ``pip install 'kbitq[html]'`` there is no page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kbitq.checkpoint.inspection import InspectReport, inspect
from kbitq.checkpoint.output.extra_output import check_extra_output, write_extra_output
from kbitq.checkpoint.source.progress import Progress
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.storage import Storage
from kbitq.checkpoint.written.stored import open_quantized
from kbitq.choose.tensor_names import layer_of, role_of, short_roles
from kbitq.errors import BuildError, CheckpointError
from kbitq.format import K_MAX, K_MIN
from kbitq.report import charts
from kbitq.report.groups import by_layer, by_role, mean_sqnr_db, worst
from kbitq.report.usage import usage
from kbitq.text_safety import all_printable

CHOSEN = 200  # tensors with histograms on the page: the worst ones
Watch = Callable[[Progress], None] | None


def write_page(
    path: str | Path | Storage,
    out: str | Path,
    against: str | Path | Storage | None = None,
    progress: Watch = None,
    *,
    force: bool = True,
) -> InspectReport:
    """Write the page of a quantized checkpoint to ``out``, and return the inspection that it shows.

    Args:
        path: a file or folder written by kbitq.
        out: an HTML file; replaced if it exists, unless it is a part of ``path`` or ``against``.
        against: the source; then errors are measured again, and the page has its weights and what other K would give.
        force: an ``out`` that exists is replaced.

    Raises:
        BuildError: the libraries are not installed. CheckpointError, FormatError: as in ``inspect``, and where ``out``
            cannot be written or would touch what is read.
    """
    libraries, inputs = _libraries(), [place for place in (path, against) if place is not None]
    check_extra_output(out, inputs, force=force)
    report = inspect(path, against=against, progress=progress)
    if not report.quantized:
        raise CheckpointError(f"{path} is not quantized by kbitq", remedy="quantize", data={"path": path})
    text = _rendered(page_data(path, report, against, progress), libraries)
    write_extra_output(out, text, inputs, force=force)
    return report


def page_data(
    path: str | Path | Storage, report: InspectReport, against: str | Path | Storage | None, progress: Watch = None
) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    rows = [r for r in report.tensors if r["verdict"] == "quantized"]
    roles = short_roles(list(dict.fromkeys(role_of(r["name"]) for r in rows)))
    tensors = [{**r, "role": roles[role_of(r["name"])], "layer": layer_of(r["name"])} for r in rows]
    opened = open_quantized(path)
    source = open_source(against) if against is not None else None
    counted = usage(opened, [r["name"] for r in worst(rows, CHOSEN)], source, progress)
    uniform = _uniform(against, {r["name"] for r in rows}, progress) if against is not None else []
    return {
        "title": opened.checkpoint.storage.name,
        "totals": report.totals,
        "tensors": tensors,
        "kept": [r for r in report.tensors if r["verdict"] != "quantized"],
        "usage": {name: found.to_json() for name, found in counted.items()},
        "charts": {
            "heat": charts.heat(tensors),
            "roles": charts.roles(by_role(rows)),
            "layers": charts.layers(by_layer(rows)),
            "curve": charts.curve(tensors, uniform),
            "weights": charts.weights(),
            "indices": charts.indices(),
            "scales": charts.scales(),
        },
    }


def _uniform(source: str | Path | Storage, names: set[str], progress: Watch) -> list[tuple[float, float]]:
    """(bits per weight, SQNR) of the source's same tensors at each K for all of them, from a sample."""
    found = inspect(source, ks=tuple(range(K_MIN, K_MAX + 1)), sample=True, progress=progress)
    rows = [(r, would) for r in found.tensors if (would := r["would"]) and r["name"] in names]
    points = []
    for k in range(K_MIN, K_MAX + 1):
        decibels = mean_sqnr_db({**r, "sqnr_db": would[k]["sqnr_db"]} for r, would in rows)
        if decibels is not None:
            points.append((k + 0.25, decibels))
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


def _rendered(data: dict[str, Any], libraries: tuple[Any, str]) -> str:
    jinja2, script = libraries
    data = all_printable(data)
    folder = resources.files("kbitq.report") / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    template = jinja2.Environment(autoescape=True).from_string(parts["page.html"])
    totals = data["totals"]
    return str(
        template.render(
            title=data["title"],
            how=_how(data["tensors"]),
            facts=_facts(totals),
            kept=_kept(data["kept"]),
            css=jinja2.utils.markupsafe.Markup(parts["page.css"]),
            libraries=jinja2.utils.markupsafe.Markup(_inline(script)),
            script=jinja2.utils.markupsafe.Markup(_inline(parts["page.js"])),
            data=jinja2.utils.markupsafe.Markup(_json(data)),
        )
    )


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


def _how(rows: Sequence[dict[str, Any]]) -> str:
    """In a line, how it was quantized."""
    said = {what: ", ".join(map(str, sorted({r[what] for r in rows}))) for what in ("k", "codebook", "scale")}
    return f"{len(rows)} tensors quantized by kbitq: K {said['k']}, codebook {said['codebook']}, scale {said['scale']}"


def _facts(totals: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Value, unit and label of the numbers at the top."""
    measured = totals["sqnr_db"] is not None
    decibels = totals["sqnr_db"] if measured else totals["mean_sqnr_db"]
    found = [
        (f"{totals['bits_per_weight']:.2f}", "bits", "per quantized weight"),
        (
            "-" if decibels is None else f"{decibels:.2f}",
            "dB",
            "SQNR over all of them" if measured else "mean SQNR of the tensors",
        ),
        (*_size(totals["bytes"]), "all tensors"),
        (f"{100 * totals['coverage']:.1f}", "%", "of the parameters quantized"),
    ]
    if totals["compression"]:
        found.append((f"{totals['compression']:.2f}", "times", "smaller than the source"))
    return found


def _size(count: float) -> tuple[str, str]:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return (f"{count:.3g}", unit)
        count /= 1000
    return (f"{count:.3g}", "TB")


def _kept(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Reasons to keep tensors, and how many there are for each."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["reason"] or "not said"] = counts.get(row["reason"] or "not said", 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
