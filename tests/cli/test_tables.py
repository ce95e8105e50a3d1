"""Every table of the program at 80, 60 and 40 columns: no line is too long, no column is lost, rows stay apart."""

import importlib
import inspect
import io
import pkgutil
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kbitq.cli import views
from kbitq.cli.views import budget, differences, inspection, looks, planning, summary
from kbitq.cli.views.tables import Bars, Name, Table, Words, facts

DEPTH = 48
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "block_sparse_moe.experts.gate_and_up_projection")


def name(layer: int, kind: str) -> str:
    return f"model.language_model.layers.{layer}.{kind}.weight"


def rows(k: int = 3) -> list[dict[str, Any]]:
    """A model of many layers; what differs between two tensors stands in the middle of a long name."""
    return [
        {
            "name": name(layer, kind), "shape": [16384, 53248], "dtype": "BF16", "verdict": "quantized",
            "reason": f"rule 'model.*.{layer}.{kind}.*'" if layer < 2 else "matrix", "k": k, "scale": "mse",
            "codebook": "optimal" if layer % 2 else "fit-shared", "bits_per_weight": k + 0.25,
            "sqnr_db": 15.0 + layer / 100, "max_abs_err": 0.0123, "bytes": 354_000_000 + k * 10**6,
            "would": {k: {"sqnr_db": 15.53, "bits_per_weight": k + 0.25, "bytes": 10**9} for k in (2, 3, 4, 5)},
        }
        for layer in range(DEPTH)
        for kind in KINDS
    ]  # fmt: skip


def report(k: int = 3) -> Any:
    totals = {
        "bytes": 10**10, "bytes_in": 4 * 10**10, "compression": 4.0, "bits_per_weight": k + 0.25, "codebook_bytes": 999,
        "sqnr_db": None, "mean_sqnr_db": 15.2, "worst": {"name": name(0, KINDS[0]), "sqnr_db": 15.0},
        "would": rows()[0]["would"],
    }  # fmt: skip
    return SimpleNamespace(tensors=rows(k), totals=totals, notes=[], quantized=True)


def usage(k: int) -> Any:
    return SimpleNamespace(scales=np.arange(256), indices=np.arange(1, 1 + 2**k))


def groups(k: int = 3) -> list[dict[str, Any]]:
    from kbitq.report.groups import by_role

    return by_role(rows(k))


def choice() -> Any:
    return SimpleNamespace(curve=[(2.25 + i / 10, 100.0 - 3 * i) for i in range(30)])


SPLITS = {str(n): {"outputs": 100, "inputs": 100, "neither": []} for n in (1, 2, 4, 8)}
TABLES = {
    "budget.curve": lambda: budget.curve(choice()),
    "differences.by_tensor": lambda: differences.by_tensor(difference()),
    "differences.by_group": lambda: differences.by_group(differences.joined(groups(), groups(4)[1:]), "role"),
    "inspection.choices": lambda: inspection.choices(report().totals, (2, 3, 4, 5)),
    "inspection.foreseen": lambda: inspection.foreseen(rows(), (2, 3, 4, 5)),
    "inspection.measured": lambda: inspection.measured(rows(), ["scale", "codebook"]),
    "looks.groups_table": lambda: looks.groups_table(groups(), "role"),
    "looks.histograms_table": lambda: looks.histograms_table({"a": usage(3), "b": usage(8)}),
    "planning.parallel": lambda: planning.parallel(SPLITS),
    "summary.verdicts": lambda: summary.verdicts(rows()),
}


def difference() -> list[dict[str, Any]]:
    from kbitq.report.difference import difference as compared

    return compared(rows(3), rows(4))


def rendered(shown: Any, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, color_system=None).print(shown)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_no_table_is_forgotten() -> None:
    found = set()
    for module in pkgutil.iter_modules(views.__path__):
        loaded = importlib.import_module(f"{views.__name__}.{module.name}")
        for called, function in inspect.getmembers(loaded, inspect.isfunction):
            if function.__module__ == loaded.__name__ and function.__annotations__.get("return") == "Table":
                found.add(f"{module.name}.{called}")
    assert found == set(TABLES)


@pytest.mark.parametrize("width", [80, 60, 40])
@pytest.mark.parametrize("table", TABLES)
def test_a_table_fits(table: str, width: int) -> None:
    made = TABLES[table]()
    lines = rendered(made, width)
    assert max(map(len, lines)) <= width
    bands = "\n".join(lines).split("\n\n")
    headings = [re.split(r"\s{2,}|\s(?=K=)", band.split("\n")[0]) for band in bands]
    shown = [title for i, heading in enumerate(headings) for title in heading[bool(i) :]]
    assert [title for title in shown if title] == [title for title in made.titles if title]
    for band in bands:
        assert len(set(names_of(band))) == len({first(row) for row in made.rows})


def names_of(band: str) -> list[str]:
    """The first column, row by row: a line with a name or with cells alone goes on with the row above."""
    width = first_width(band)
    found: list[str] = []
    for line in band.split("\n")[1:]:
        if (line[:width].strip() and line[width:].strip()) or not found:
            found.append("")
        found[-1] += line[:width].strip()
    return found


def first_width(band: str) -> int:
    """Where the second column begins: after the last place of the first that two spaces follow in all lines."""
    lines = band.split("\n")
    width = max(map(len, lines))
    padded = [line.ljust(width) for line in lines]
    return next((i for i in range(1, width - 1) if all(line[i : i + 2] == "  " for line in padded)), width)


def first(row: Any) -> str:
    cell = row[0]
    return cell if isinstance(cell, str) else cell.fit(cell.longest)


@pytest.mark.parametrize("width", [80, 60, 40])
@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_shown(table: str, width: int) -> None:
    """Cells that are not cut are in the text as often as in the table; where one goes on below, its words are."""
    made = TABLES[table]()
    text = " ".join(rendered(made, width))
    for row in made.rows:
        for cell in row[1:]:
            if isinstance(cell, str):
                assert all(word in text for word in cell.split())


def test_in_a_file_a_table_is_one() -> None:
    for make in TABLES.values():
        made = make()
        lines = rendered(made, 10_000)
        assert len(lines) == 1 + len(made.rows)


def test_seven_roles_are_seven_names() -> None:
    """What the table of roles was at 80 columns: seven rows called '…proj'."""
    made = Table("role", "tensors", "parameters", "K", "bits", "size", "SQNR dB", "worst", "<by depth")
    roles = [f"{part}.{letter}_proj" for part in ("self_attn", "mlp") for letter in ("q", "k", "v", "o", "up", "down")]
    for role in roles:
        made.add_row(Name(role), *["12.34 MB"] * 7, Bars([1.0] * 61, (0.0, 2.0)))
    for width in (80, 60):
        bands = "\n".join(rendered(made, width)).split("\n\n")
        assert len(bands) > 1
        for band in bands:
            names = [line.split()[0] for line in band.split("\n")[1:]]
            assert len(set(names)) == len(roles)
            assert all(
                shown.rpartition(".")[2] == role.rpartition(".")[2] for shown, role in zip(names, roles, strict=True)
            )


def test_bars_share_what_room_there_is() -> None:
    bars = Bars([0.0, 0.0, 1.0, 1.0], (0.0, 1.0))
    assert (bars.fit(4), bars.fit(2), bars.fit(1)) == ("▁▁██", "▁█", "▅")
    assert Bars([1.0, None, 4.0]).fit(3) == "▃ █"


def test_words_are_cut_at_their_end() -> None:
    assert Words("kept: embedding").fit(9) == "kept: em…"
    assert Words("kept").fit(4) == "kept"


def test_a_name_too_long_for_its_lead_goes_below() -> None:
    lines = rendered(facts([("SQNR", Name(name(7, KINDS[3]), "15.91 dB overall, worst 15.77 dB: "))]), 50)
    assert lines[0] == "SQNR  15.91 dB overall, worst 15.77 dB:"
    assert "7" in lines[1] and lines[1].endswith("weight")
