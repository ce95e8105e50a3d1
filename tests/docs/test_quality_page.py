"""docs/quality.md and its pictures show what benchmarks/quality.json holds."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quality.md").read_text()


@pytest.fixture(scope="module")
def quality() -> Any:
    """The module benchmarks/quality.py, which imports its neighbours as a script does."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("quality")
    finally:
        sys.path.pop(0)


def test_the_table_is_that_of_the_data(quality: Any) -> None:
    assert quality.table(quality.load()) in PAGE


def test_the_table_of_formats_is_that_of_the_data(quality: Any) -> None:
    made = quality.formats(quality.load())
    assert made in (ROOT / "docs" / "formats.md").read_text()
    for output in ("compressed-tensors", "int8", "fp8", "fp8-block", "gptq", "bnb-nf4", "bnb-nf4-double"):
        assert re.search(rf"--format {output}[ `]", made), f"{output}: what it costs is not told"


def test_the_steps_are_those_of_the_data(quality: Any) -> None:
    data = quality.load()
    assert quality.steps(data) in PAGE
    found = {p["label"]: p["perplexity"] for points in data["series"].values() for p in points}
    saved = [found["--k 2"] - found[f"{how}--k 2"] for how in ("--codec trellis ", "--calibration stats ")]
    saved.append(found["--k 2"] - found["--calibration stats --codec trellis --k 2"])
    told = [found["--k 2"] - data["perplexity"], *saved]
    told += [found[f"--calibration stats --codec trellis --scale-block 128 --k {k}"] for k in (2, 3, 4)]
    text = PAGE.split("end of the steps")[1]
    assert all(f"{figure:.2f}" in text.split("Every point again")[0] for figure in told)


def test_every_series_is_drawn_and_every_point_says_how_it_was_measured(quality: Any) -> None:
    data = quality.load()
    looks = list(quality.quality_plot.LOOKS)
    assert [s.name for s in quality.SERIES] == list(data["series"])
    assert list(data["series"])[: len(looks)] == looks, "a series is neither drawn nor after those that are not"
    points = [point for series in data["series"].values() for point in series]
    assert len(points) >= 30 and all(point["command"] and point["date"] for point in points)


@pytest.mark.parametrize("name", ["quality.svg", "divergence.svg"])
def test_the_pictures_are_those_of_the_data(quality: Any, name: str) -> None:
    """Every point and every label, wherever this version of the drawing library puts them."""
    pytest.importorskip("vl_convert")
    marks = r'aria-label="bits a weight: [^"]*"'
    drawn, kept = quality.PLOTS[name](quality.load()), (ROOT / "docs" / name).read_text()
    assert sorted(re.findall(marks, drawn)) == sorted(re.findall(marks, kept)) != []
    assert re.findall(r">([^<>]+)</text>", drawn) == re.findall(r">([^<>]+)</text>", kept)
    assert f"]({name})" in PAGE


def test_the_words_of_the_page_have_their_figures(quality: Any) -> None:
    """What the text quotes of the data is what the data says."""
    by_label = {p["label"]: p for p in quality.load()["series"]["kbitq --bpw"]}
    one_k = {p["label"]: p for p in quality.load()["series"]["kbitq, one K"]}
    middle = (one_k["--k 2"]["perplexity"] + one_k["--k 3"]["perplexity"]) / 2
    told = [f"{by_label['--bpw 2.75']['perplexity']:.2f}", f"{middle:.2f}"]
    others = {p["label"]: p for p in quality.load()["series"]["kbitq, other choices"]}
    told += [
        f"{others['--bpw 2.75 --error none'][of]:.{digits}f}" for of, digits in (("perplexity", 2), ("divergence", 3))
    ]
    told += [f"{point['perplexity']:.2f}" for label, point in others.items() if "fit" in label]
    text = PAGE.split(quality.START)[0]
    assert [figure for figure in told if figure not in text] == []
    opening = (ROOT / "README.md").read_text().split("```")[0]
    assert f"{quality.load()['perplexity']:.2f} has {one_k['--k 4']['perplexity']:.2f} at K = 4" in opening
