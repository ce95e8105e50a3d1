"""The page in a real browser: nothing on the console, nothing from the network, sorting, searching, choosing."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.browser import Browser
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import TensorRule
from kbitq.errors import BuildError, CheckpointError
from kbitq.eval.perplexity import Divergence, Evaluation
from kbitq.eval.record import save_evaluation
from kbitq.report.expected import STEPS, expected_db, step_of
from kbitq.report.facts import origin
from kbitq.report.html import page_data, write_page
from kbitq.report.side import read_side

pytest.importorskip("vl_convert", reason="the package vl-convert-python is not installed")

HOSTILE = "model.layers.0.</script><img src=x onerror=alert(1)>&amp;.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of three layers, and a quantization of it with several K."""
    draw, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("page")
    tensors = {HOSTILE: torch.randn(64, 96, generator=draw), "model.norm.weight": torch.ones(96)}
    for layer in range(3):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(96, 100, generator=draw) * 10.0**-layer
    tensors["model.layers.2.mlp.zero_proj.weight"] = torch.zeros(64, 96)
    save_file(tensors, folder / "source.safetensors")
    rules = (TensorRule("*up_proj*", k=5, codebook="fit"), TensorRule("*.1.*", k=2))
    out = folder / "quantized.safetensors"
    run(plan_quantize(folder / "source.safetensors", out, QuantizeOptions(k=3, rules=rules)))
    return folder / "source.safetensors", out


@pytest.fixture(scope="module")
def page(made: tuple[Path, Path]) -> Path:
    write_page(made[1], made[1].with_suffix(".html"), against=made[0])
    return made[1].with_suffix(".html")


@pytest.fixture(scope="module")
def folder(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same source with a budget, in a folder, with the result of an evaluation."""
    out = tmp_path_factory.mktemp("budget") / "budget"
    run(choose(plan_quantize(made[0], out, QuantizeOptions(budget=Budget(bpw=3.5)))))
    found = Evaluation(15.25, 2.72, 48, 512, 1.0, Divergence(0.0712, 0.04, 0.61, 0.875, 14.313))
    text = out.with_name("<b>wiki.txt")
    text.write_text("words")
    save_evaluation(out, found, text)
    return out


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed")
    with Browser(driver, chromium, tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture
def browser(session: Browser, page: Path) -> Browser:
    session.console()  # forgets what an earlier page said
    session.open(page)
    return session


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def first_column(browser: Browser) -> list[str]:
    return browser.run("return [...document.querySelectorAll('#tensors tbody tr')].map(r => r.cells[0].textContent)")


def column(browser: Browser, key: str) -> list[str]:
    place = "[...document.querySelectorAll('#tensors th')].findIndex(h => h.dataset.key === arguments[0])"
    rows = "[...document.querySelectorAll('#tensors tbody tr')]"
    return browser.run(f"const at = {place}; return {rows}.map(r => r.cells[at].textContent)", key)


def press(browser: Browser, key: str) -> None:
    browser.run("document.querySelector(`#tensors th[data-key=${arguments[0]}] button`).click()", key)


def search(browser: Browser, text: str) -> str:
    return browser.run(
        "const box = document.getElementById('search'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('input')); return document.getElementById('found').textContent",
        text,
    )


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert len(text) < 2_000_000
    own = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    assert own.count("<script") == 3
    assert not re.search(r"\s(?:src|href)=|url\(|@import", own)


def test_every_chart_is_drawn_and_the_console_is_silent(browser: Browser) -> None:
    for chart in ("heat", "roles", "sizes", "layers", "curve", "weightsA", "indicesA", "scalesA"):
        marks = browser.run(
            f"return document.querySelectorAll('#{chart} svg .mark-group path, #{chart} svg path').length"
        )
        assert marks > 2, chart
        assert browser.run(f"return document.querySelector('#{chart} svg').getBoundingClientRect().width") > 200
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


def test_a_hostile_name_is_only_a_name(browser: Browser) -> None:
    assert HOSTILE in first_column(browser)
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_sorting(browser: Browser) -> None:
    search(browser, "")
    press(browser, "sqnr_db")
    shown = column(browser, "sqnr_db")
    assert shown[-1] == "-"  # the tensor of zeros has no SQNR, and stays last
    assert [float(v) for v in shown[:-1]] == sorted(float(v) for v in shown[:-1])
    press(browser, "sqnr_db")
    shown = column(browser, "sqnr_db")
    assert shown[-1] == "-"
    assert [float(v) for v in shown[:-1]] == sorted((float(v) for v in shown[:-1]), reverse=True)
    state = "return document.querySelector('#tensors th[data-key=sqnr_db]').getAttribute('aria-sort')"
    assert browser.run(state) == "descending"
    press(browser, "name")
    names = first_column(browser)
    assert sorted(names) == sorted(browser.run("return Object.keys(data.rows.A)"))
    assert names != sorted(names, reverse=True)


def test_searching(browser: Browser) -> None:
    assert search(browser, "up_proj") == "3 of 11"
    assert all("up_proj" in name for name in first_column(browser))
    assert search(browser, "k=2 ATTN") == "2 of 11"
    assert set(column(browser, "k")) == {"2"}
    assert search(browser, "no such tensor") == "0 of 11"
    assert first_column(browser) == []
    assert search(browser, "") == "11 of 11"


def bars(browser: Browser, count: int) -> int:
    """Bars of the use of levels, once there are so many (a browser draws when it likes)."""
    for _ in range(100):
        drawn = browser.run("return document.querySelectorAll('#indicesA svg .mark-rect path').length")
        if drawn == count:
            break
    return drawn


def opened(browser: Browser) -> list[str]:
    """The tensor that is open, by the list, the row of the table, and the address."""
    return browser.run(
        "return [document.getElementById('choice').value, document.querySelector('#tensors tr.open').dataset.name,"
        "decodeURIComponent(location.hash.slice(1))]"
    )


def test_choosing_a_tensor(browser: Browser, page: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    browser.run(
        "const box = document.getElementById('choice'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('change'))", name,
    )  # fmt: skip
    assert bars(browser, 32) == 32  # levels of K = 5
    assert "planes" in browser.run("return document.getElementById('tensor-facts').textContent")
    found = browser.run("return data.usage[arguments[0]].A", name)
    assert sum(found["indices"]) == 96 * 100
    assert sum(found["scales"]) == 96 * 4
    assert 0.99 * 9600 < sum(found["weights"]) <= 9600
    assert opened(browser) == [name] * 3
    assert browser.console() == []


def test_a_click_on_a_row_opens_its_tensor(browser: Browser) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    browser.run("document.querySelector(`#tensors tr[data-name='${arguments[0]}'] td:nth-child(3)`).click()", name)
    assert bars(browser, 4) == 4
    assert opened(browser) == [name] * 3
    facts = browser.run("return document.getElementById('tensor-facts').textContent")
    assert "SQNR of normal weights9.78 dB" in facts


def test_a_click_on_a_cell_opens_its_tensor(browser: Browser) -> None:
    """Where the pointer is over the cell, as a reader's is."""
    name = "model.layers.0.mlp.up_proj.weight"
    browser.run(
        "const cell = [...document.querySelectorAll('#heat svg .mark-rect path')].find(c => c.__data__.datum.name ==="
        "arguments[0]); const at = cell.getBoundingClientRect(); const where = {bubbles: true, clientX: at.x + 3,"
        "clientY: at.y + 3}; for (const what of ['pointerdown', 'pointerup', 'click'])"
        "cell.dispatchEvent(new PointerEvent(what, where));", name,
    )  # fmt: skip
    assert bars(browser, 32) == 32
    assert opened(browser) == [name] * 3


@pytest.mark.parametrize("wish", ["model.layers.2.mlp.up_proj.weight", "%", "constructor", "no%20such"])
def test_an_address_names_a_tensor_or_nothing(wish: str, session: Browser, page: Path) -> None:
    session.console()
    session.open(page.with_name(page.name))  # another address of the same page only counts as a jump in it
    session.run("location.hash = arguments[0]; location.reload()", wish)
    session.ready()
    chosen = session.run("return document.getElementById('choice').value")
    assert chosen == wish if wish.startswith("model") else chosen in session.run("return Object.keys(data.rows.A)")
    assert session.console() == []


def tip_values(data: dict[str, Any]) -> list[Any]:
    """Every value that a tip of a chart shows."""
    found = []

    def walk(spec: Any, values: list[dict[str, Any]]) -> None:
        if not isinstance(spec, dict):
            return
        values = spec.get("data", {}).get("values", values)
        shown = spec.get("encoding", {}).get("tooltip", [])
        found.extend(row[tip["field"]] for tip in shown for row in values if "field" in tip and values)
        for layer in spec.get("layer", []):
            walk(layer, values)

    for spec in data["charts"].values():
        walk(spec, [])
    return found


def test_tips_are_texts(page: Path) -> None:
    """A number that is missing would be a NaN in a tip."""
    values = tip_values(data_of(page))
    assert len(values) > 200
    assert all(isinstance(value, str) and "nan" not in value.lower() for value in values)
    zero = next(v for v in data_of(page)["charts"]["heat"]["data"]["values"] if "zero_proj" in v["name"])
    assert (zero["step"], zero["db"], zero["off"]) == ("none", "exact", "-")


def test_a_colour_means_the_same_on_every_page(page: Path, folder: Path, tmp_path: Path) -> None:
    """What a cell's colour says depends on its tensor alone, not on its neighbours."""
    write_page(folder, tmp_path / "other.html")
    for data in (data_of(page), data_of(tmp_path / "other.html")):
        rows = data["rows"]["A"]
        for cell in data["charts"]["heat"]["data"]["values"]:
            assert cell["step"] == step_of(rows[cell["name"]]["off_db"], STEPS)
    assert [step_of(value, STEPS) for value in (None, -9.0, -1.0, 0.0, 3.0)] == [
        "none", "step0", "step3", "step5", "step6",
    ]  # fmt: skip


@pytest.mark.parametrize("k, name, scale, decibels", [(3, "optimal", "mse", 15.93), (4, "fit", "mse", 22.26)])
def test_the_expectation_is_that_of_normal_weights(k: int, name: str, scale: str, decibels: float) -> None:
    assert expected_db("planes", k, name, scale) == pytest.approx(decibels, abs=0.03)


def test_the_expectation_of_other_levels() -> None:
    levels = tuple((2 * i - 7) / 7 for i in range(8))
    even = expected_db("planes", 3, "custom", "mse", levels)
    assert even is not None and 13 < even < 15.9
    assert expected_db("planes", 3, "nf", "absmax") < expected_db("planes", 3, "nf", "mse")
    assert expected_db("planes", 3, "custom", "mse") is None
    assert expected_db("planes", 3, "of a later version", "mse") is None
    assert expected_db("planes", 3, "optimal", "of a later version") is None


def test_what_lies_beside_the_weights_is_shown(session: Browser, folder: Path, tmp_path: Path) -> None:
    write_page(folder, tmp_path / "page.html")
    session.console()
    session.open(tmp_path / "page.html")
    text = session.run("return document.body.innerText")
    for said in ("Perplexity", "15.25", "source 14.31", "0.0712", "87.5 %", "<b>wiki.txt", "What the budget could buy",
                 "kbitq quantize source.safetensors --bpw 3.5 -o out", "Coverage", "kbitq 0."):  # fmt: skip
        assert said in text, said
    assert session.run("return document.querySelectorAll('#budgetA svg path').length") > 5
    labels = session.run("return [...document.querySelectorAll('#budgetA svg text')].map(t => t.textContent)")
    assert "chosen" in labels and "K=2 for all" in labels
    assert session.console() == []


def test_two_side_by_side(session: Browser, made: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    reports = write_page(made[1], tmp_path / "page.html", made[0], diff=folder)
    assert [report.totals["quantized"] for report in reports] == [11, 11]
    session.console()
    session.open(tmp_path / "page.html")
    for chart in ("heat", "roles", "sizes", "layers", "curve", "budgetB", "weightsA", "weightsB", "scalesB"):
        assert session.run(f"return document.querySelectorAll('#{chart} svg path').length") > 2, chart
    values = tip_values(data_of(tmp_path / "page.html"))
    assert all(isinstance(value, str) and "nan" not in value.lower() for value in values)
    ks = column(session, "k")
    assert any("→" in k for k in ks) and any("→" not in k for k in ks)
    press(session, "more_db")
    gains = [float(gain) for gain in column(session, "more_db") if gain != "-"]
    assert gains == sorted(gains)
    assert session.run("return document.querySelectorAll('h1 .side').length") == 2
    assert session.console() == []
    with pytest.raises(CheckpointError, match="is not the same in both"):
        save_file({"a.weight": torch.randn(64, 96)}, tmp_path / "other.safetensors")
        out = tmp_path / "other-k3.safetensors"
        run(plan_quantize(tmp_path / "other.safetensors", out, QuantizeOptions(k=3)))
        write_page(made[1], tmp_path / "page.html", diff=out)


OVERLAPS = """
const shown = [...document.querySelectorAll('#curve svg text')].filter(t => t.textContent && t.getAttribute('stroke')
  === null).map(t => [t.textContent, t.getBoundingClientRect()]);
const found = [];
for (const [i, [a, p]] of shown.entries()) for (const [b, q] of shown.slice(i + 1))
  if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2) found.push([a, b]);
return found;
"""


@pytest.mark.parametrize("width", [390, 1400])
def test_no_label_lies_on_another(width: int, session: Browser, made: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "k3.safetensors"
    run(plan_quantize(made[0], out, QuantizeOptions(k=3)))
    write_page(out, tmp_path / "page.html", made[0])
    session.resize(width, 900)
    session.open(tmp_path / "page.html")
    assert session.run("return document.querySelectorAll('#curve svg text').length") > 20
    assert session.run(OVERLAPS) == []


@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_the_window(browser: Browser, width: int) -> None:
    assert browser.screenshot(width, 900).startswith(b"\x89PNG")
    inside = "return document.documentElement.scrollWidth <= window.innerWidth + 1"
    for _ in range(100):
        if browser.run(inside):
            break
    assert browser.run(inside)


def test_without_the_source_there_are_no_weights(made: tuple[Path, Path], tmp_path: Path) -> None:
    (report,) = write_page(made[1], tmp_path / "page.html")
    assert report.quantized
    data = data_of(tmp_path / "page.html")
    assert all(found["A"]["weights"] is None for found in data["usage"].values())
    assert data["rows"]["A"].keys() >= data["usage"].keys()
    assert report.totals["quantized"] == len(data["rows"]["A"]) == 11


def test_what_has_no_page(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is not quantized"):
        write_page(made[0], tmp_path / "page.html")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_page(made[1], tmp_path / "absent" / "page.html")
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(BuildError, match="needs the package vl_convert") as raised:
        write_page(made[1], tmp_path / "page.html")
    assert "kbitq[html]" in raised.value.hint


def test_each_codec_has_its_curves(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Of normal weights and of these, for `planes` and for what the checkpoint is coded with."""
    out = tmp_path / "trellis.safetensors"
    run(plan_quantize(made[0], out, QuantizeOptions(k=2, codec="trellis")))
    side = read_side("A", out, made[0], None)
    data = page_data([side], made[0])
    assert {row["coding"] for row in data["rows"]["A"].values()} == {"trellis"}
    assert ("Codec", "trellis", False) in origin(side)
    lines, names = data["charts"]["curve"]["layer"][:2]
    found = {(v["codec"], v["weights"]): 0 for v in lines["data"]["values"]}
    for value in lines["data"]["values"]:
        found[value["codec"], value["weights"]] += 1
    assert found == {("planes", w): 7 for w in ("normal", "these")} | {("trellis", w): 4 for w in ("normal", "these")}
    assert {v["codec"] for v in names["data"]["values"]} == {"planes", "trellis"}
