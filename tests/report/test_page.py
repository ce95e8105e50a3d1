"""The page in a real browser: nothing on the console, nothing from the network, sorting, searching, choosing."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.browser import Browser
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.choose.selection import TensorRule
from kbitq.errors import BuildError, CheckpointError
from kbitq.report.html import write_page

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
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed")
    with Browser(driver, chromium, tmp_path_factory.mktemp("profile")) as session:
        session.open(page)
        yield session


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
    for chart in ("heat", "roles", "layers", "curve", "weights", "indices", "scales"):
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
    assert sorted(names) == sorted(t["name"] for t in browser.run("return data.tensors"))
    assert names != sorted(names, reverse=True)


def test_searching(browser: Browser) -> None:
    assert search(browser, "up_proj") == "3 of 11"
    assert all("up_proj" in name for name in first_column(browser))
    assert search(browser, "k=2 ATTN") == "2 of 11"
    assert set(column(browser, "k")) == {"2"}
    assert search(browser, "no such tensor") == "0 of 11"
    assert first_column(browser) == []
    assert search(browser, "") == "11 of 11"


def test_choosing_a_tensor(browser: Browser, page: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    browser.run(
        "const box = document.getElementById('choice'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('change'))", name,
    )  # fmt: skip
    bars = "return document.querySelectorAll('#indices svg .mark-rect path').length"
    for _ in range(100):
        if browser.run(bars) == 32:
            break
    assert browser.run(bars) == 32  # levels of K = 5
    found = browser.run("return data.usage[arguments[0]]", name)
    assert sum(found["indices"]) == 96 * 100
    assert sum(found["scales"]) == 96 * 4
    assert 0.99 * 9600 < sum(found["weights"]) <= 9600
    assert browser.console() == []


@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_the_window(browser: Browser, width: int) -> None:
    assert browser.screenshot(width, 900).startswith(b"\x89PNG")
    inside = "return document.documentElement.scrollWidth <= window.innerWidth + 1"
    for _ in range(100):
        if browser.run(inside):
            break
    assert browser.run(inside)


def test_without_the_source_there_are_no_weights(made: tuple[Path, Path], tmp_path: Path) -> None:
    report = write_page(made[1], tmp_path / "page.html")
    assert report.quantized
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert all(found["weights"] is None for found in data["usage"].values())
    assert {t["name"] for t in data["tensors"]} >= set(data["usage"])
    assert data["totals"]["quantized"] == len(data["tensors"]) == 11


def test_what_has_no_page(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is not quantized"):
        write_page(made[0], tmp_path / "page.html")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_page(made[1], tmp_path / "absent" / "page.html")
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(BuildError, match="needs the package vl_convert") as raised:
        write_page(made[1], tmp_path / "page.html")
    assert "kbitq[html]" in raised.value.hint
