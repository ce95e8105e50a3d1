"""Budgets, rules, recipes and importance on the command line, and the ways of looking at what came of them."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.program import Kbitq

UP = "model.layers.{}.mlp.up_proj.weight"


def ks(path: Path, kbitq: Kbitq) -> dict[str, int]:
    rows = json.loads(kbitq("inspect", path, "--json").out)["tensors"]
    return {row["name"]: row["k"] for row in rows if row["k"] is not None}


def test_a_budget_in_bits(tiny: Path, kbitq: Kbitq) -> None:
    result = kbitq("quantize", tiny, "--bpw", 3.75, "--quiet")
    out = tiny.with_name("tiny-kbitq-3.75bpw.safetensors")
    assert result == (0, f"{out}\n", "")
    assert sorted(ks(out, kbitq).values()) == [3, 4]


def test_the_plan_of_a_budget_shows_the_choice_and_the_curve(tiny: Path, kbitq: Kbitq) -> None:
    result = kbitq("plan", tiny, "--bpw", 3.75)
    assert result.code == 0
    assert result.out.splitlines()[0].split() == ["bits", "per", "weight", "error"]
    assert "budget     3.75 bits per weight: 3.750 bits per weight" in result.out
    assert "the smallest error that is possible" in result.out
    plan = json.loads(kbitq("plan", tiny, "--size", "190kB", "--json").out)
    assert plan["files"][0]["bytes"] <= 190_000
    assert plan["budget"]["weight_bytes"] == plan["files"][0]["bytes"]
    assert list(tiny.parent.iterdir()) == [tiny]


def test_weights_and_ties(tiny: Path, kbitq: Kbitq) -> None:
    out = tiny.with_name("o.safetensors")
    assert kbitq("quantize", tiny, "--bpw", 4.5, "--weight", "*.0.*=1000", "-o", out).code == 0
    assert ks(out, kbitq) == {UP.format(0): 6, UP.format(1): 2}
    assert kbitq("quantize", tiny, "--bpw", 4.5, "--tie", "*", "-o", out, "--force").code == 0
    assert set(ks(out, kbitq).values()) == {4}


def test_rules_and_the_recipe_of_a_run(tiny: Path, kbitq: Kbitq) -> None:
    first, again, recipe = (tiny.with_name(name) for name in ("a.safetensors", "b.safetensors", "recipe.toml"))
    given = ("--rule", "*.0.*=k5,codebook=fit", "--rule", "*bias=keep", "--k", 3, "--write-recipe", recipe)
    result = kbitq("quantize", tiny, *given, "-o", first)
    assert result.code == 0
    assert f"the recipe is in {recipe}" in result.err
    assert ks(first, kbitq) == {UP.format(0): 5, UP.format(1): 3}
    assert kbitq("quantize", tiny, "--recipe", recipe, "-o", again).code == 0
    assert first.read_bytes() == again.read_bytes()


def test_the_command_line_goes_before_the_recipe(tiny: Path, kbitq: Kbitq) -> None:
    out, recipe = tiny.with_name("o.safetensors"), tiny.with_name("recipe.toml")
    recipe.write_text('k = 3\ncodebook = "nf"\n[[rule]]\nmatch = "*.0.*"\nk = 6\n')
    assert kbitq("quantize", tiny, "--recipe", recipe, "-o", out).code == 0
    assert ks(out, kbitq) == {UP.format(0): 6, UP.format(1): 3}
    over = ("--k", 4, "--codebook", "optimal", "--rule", "*.0.*=k8")
    assert kbitq("quantize", tiny, "--recipe", recipe, *over, "-o", out, "--force").code == 0
    rows = json.loads(kbitq("inspect", out, "--json").out)["tensors"]
    assert {(r["k"], r["codebook"]) for r in rows if r["k"]} == {(8, "optimal"), (4, "optimal")}


def test_importance_and_a_recipe_that_needs_it(tiny: Path, kbitq: Kbitq) -> None:
    out, recipe, weights = (tiny.with_name(name) for name in ("o.safetensors", "recipe.toml", "i.safetensors"))
    save_file({UP.format(0): np.linspace(0, 1, 64, dtype=np.float32)}, weights)
    given = ("--k", 3, "--importance", weights, "-o", out)
    result = kbitq("quantize", tiny, *given, "--write-recipe", recipe)
    assert result.code == 0
    assert f"no entry in i.safetensors, so all columns count the same: {UP.format(1)}" in result.err
    with_it = out.read_bytes()
    refused = kbitq("quantize", tiny, "--recipe", recipe, "-o", out, "--force")
    assert refused.code == 1
    assert "made with the importance file whose SHA-256 is" in refused.err
    assert kbitq("quantize", tiny, "--recipe", recipe, "--importance", weights, "-o", out, "--force").code == 0
    assert out.read_bytes() == with_it


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ((), 2, "Missing option '--k' (or --bpw, --size, --rule or --recipe)"),
        (("--k", 3, "--bpw", 3), 2, "--k and --bpw cannot go together"),
        (("--bpw", "lots"), 2, "'lots' is not a number of bits"),
        (("--bpw", 0), 2, "above zero"),
        (("--bpw", 3, "--weight", "x"), 2, "write it as PATTERN=2.5"),
        (("--bpw", 2), 1, "2 bits per weight cannot be reached: at the smallest K the quantized tensors take 2.25"),
        (("--size", "1kB"), 1, "1,000 bytes cannot be reached"),
        (("--bpw", 3, "--tie", "nowhere"), 1, "--tie 'nowhere' matches no tensor"),
        (("--bpw", 3, "--error", "importance"), 1, "need an importance file"),
        (("--rule", "*=k3,k4"), 1, "sets k twice"),
        (("--rule", "*.0.*=k3"), 1, "nothing says the K of model.layers.1"),
        (("--recipe", "absent.toml"), 1, "absent.toml: the recipe cannot be read"),
        (("--k", 3, "--importance", "absent.safetensors"), 1, "the importance file cannot be read"),
    ],
)
def test_what_is_refused(tiny: Path, kbitq: Kbitq, arguments: tuple, code: int, message: str) -> None:
    result = kbitq("quantize", tiny, *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert list(tiny.parent.iterdir()) == [tiny]


# --- looks -----------------------------------------------------------------------------------------


def test_groups(tiny_k3: Path, kbitq: Kbitq) -> None:
    by_layer = kbitq("inspect", tiny_k3, "--by", "layer")
    assert by_layer.code == 0
    assert [line.split()[:2] for line in by_layer.out.splitlines()[1:3]] == [["layer", "0"], ["layer", "1"]]
    by_role = kbitq("inspect", tiny_k3, "--by", "role")
    (line,) = (line for line in by_role.out.splitlines() if line.startswith("mlp.up_proj"))
    assert sorted(line.split()[-1]) == ["▁", "█"]
    found = json.loads(kbitq("inspect", tiny_k3, "--by", "role", "--json").out)
    assert found["groups"][0]["tensors"] == 2
    assert list(found["groups"][0]["over_depth"]) == ["0", "1"]


def test_the_worst(tiny_k3: Path, kbitq: Kbitq) -> None:
    everything = json.loads(kbitq("inspect", tiny_k3, "--json").out)["tensors"]
    lowest = min(r["sqnr_db"] for r in everything if r["sqnr_db"] is not None)
    (row,) = json.loads(kbitq("inspect", tiny_k3, "--worst", 1, "--json").out)["tensors"]
    assert row["sqnr_db"] == lowest


def test_histograms(tiny_k3: Path, kbitq: Kbitq) -> None:
    shown = kbitq("inspect", tiny_k3, "--histograms")
    assert "scale bytes" in shown.out and "levels, K=3" in shown.out
    found = json.loads(kbitq("inspect", tiny_k3, "--histograms", "--json").out)["histograms"][UP.format(0)]
    assert sum(found["indices"]) == 128 * 64 and len(found["indices"]) == 8
    assert sum(found["scales"]) == 128 * 2
    assert found["levels"] == sorted(found["levels"])


def test_differences(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    other = tiny.with_name("other.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "--rule", "*.1.*=k4", "-o", other, "-q").code == 0
    shown = kbitq("inspect", tiny_k3, "--diff", other)
    assert shown.code == 0
    (line,) = (line for line in shown.out.splitlines() if line.startswith(UP.format(1)))
    assert "3 -> 4" in line and "+1.06 kB" in line
    assert "9 tensors alike" in shown.out
    rows = {r["name"]: r for r in json.loads(kbitq("inspect", tiny_k3, "--diff", other, "--json").out)["diff"]}
    assert rows[UP.format(1)]["more_bytes"] == 128 * 2 * 4 + 4 * 8
    assert 5 < rows[UP.format(1)]["more_db"] < 7
    strange = tiny.with_name("strange.safetensors")
    save_file({"a.weight": np.random.RandomState(0).rand(128, 64).astype(np.float32)}, tiny.with_name("a.safetensors"))
    assert kbitq("quantize", tiny.with_name("a.safetensors"), "--k", 3, "-o", strange, "-q").code == 0
    refused = kbitq("inspect", tiny_k3, "--diff", strange)
    assert refused.code == 1 and "not made from one source" in refused.err


def test_differences_by_role_and_in_all(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    other = tiny.with_name("other.safetensors")
    assert kbitq("quantize", tiny, "--k", 4, "-o", other, "-q").code == 0
    for by, label in (("role", "mlp.up_proj"), ("layer", "layer 1")):
        shown = kbitq("inspect", tiny_k3, "--diff", other, "--by", by)
        assert shown.code == 0
        (line,) = (line for line in shown.out.splitlines() if line.startswith(label))
        assert "3 -> 4" in line and "3.25 -> 4.25" in line
        lines = dict(line.split(maxsplit=1) for line in shown.out.splitlines()[-3:])
        assert lines["quantized"] == "3.25 -> 4.25 bits per weight"
        assert "->" in lines["size"] and "(+2." in lines["size"]
        assert lines["mean"].startswith("SQNR  1") and "(+6." in lines["mean"]
    found = json.loads(kbitq("inspect", tiny_k3, "--diff", other, "--by", "role", "--json").out)
    (role,) = found["diff_groups"]
    assert (role["group"], role["ks"], role["more_bytes"]) == ("mlp.up_proj", [[3], [4]], 2 * (128 * 2 * 4 + 4 * 8))
    assert found["other_totals"]["bytes"] - found["totals"]["bytes"] == role["more_bytes"]


def test_the_tensors_that_lose_most(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    other = tiny.with_name("other.safetensors")
    assert kbitq("quantize", tiny, "--k", 4, "--rule", "*.1.*=k2", "-o", other, "-q").code == 0
    shown = kbitq("inspect", tiny_k3, "--diff", other, "--worst", 1)
    assert UP.format(1) in shown.out and UP.format(0) not in shown.out


def test_the_rules_of_a_recipe_are_one_line(tmp_path: Path, kbitq: Kbitq) -> None:
    source, recipe = tmp_path / "s.safetensors", tmp_path / "recipe.toml"
    layers = {f"layers.{i}.up.weight": np.random.RandomState(i).randn(64, 64).astype(np.float32) for i in range(9)}
    save_file(layers, source)
    given = ("--k", 3, "--rule", "*.1.*=k4", "--write-recipe", recipe)
    by_one = kbitq("quantize", source, *given, "-o", tmp_path / "a.safetensors")
    assert "quantized to K=4: rule '*.1.*'  " in by_one.out
    shown = kbitq("quantize", source, "--recipe", recipe, "-o", tmp_path / "b.safetensors")
    assert shown.out.splitlines()[1].split()[:5] == ["quantized", "to", "K=3:", "8", "rules"]
    assert shown.out.splitlines()[2].split()[:4] == ["quantized", "to", "K=4:", "rule"]


def test_a_page_and_quiet(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    pytest.importorskip("vl_convert", reason="the package vl-convert-python is not installed")
    page = tiny.with_name("page.html")
    assert kbitq("inspect", tiny_k3, "--html", page, "--quiet") == (0, f"{page}\n", "")
    assert page.exists()


def test_a_page(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    pytest.importorskip("vl_convert", reason="the package vl-convert-python is not installed")
    page = tiny.with_name("page.html")
    result = kbitq("inspect", tiny_k3, "--against", tiny, "--html", page)
    assert result.code == 0
    assert f"the page is in {page}" in result.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_looks_are_for_quantized_checkpoints(tiny: Path, kbitq: Kbitq) -> None:
    result = kbitq("inspect", tiny, "--by", "role")
    assert (result.code, result.out) == (2, "")
    assert "are for quantized checkpoints" in result.err


def test_the_ledger_says_the_command(tmp_path: Path, tiny: Path, kbitq: Kbitq) -> None:
    from kbitq.card.command import command_of

    folder = tmp_path / "folder"
    folder.mkdir()
    tiny.rename(folder / "model.safetensors")
    given = ("--bpw", "4.5", "--weight", "*.0.*=3", "--tie", "*", "--codebook", "fit", "--rule", "*.1.*=scale=absmax")
    assert kbitq("quantize", folder, *given, "-o", tmp_path / "out").code == 0
    ledger = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert shlex.split(command_of(ledger, "SRC")) == ["kbitq", "quantize", "SRC", *given]
