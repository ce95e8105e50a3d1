"""``kbitq inspect`` of quantized and of ordinary checkpoints."""

import json
from pathlib import Path

import pytest

from helpers.program import Kbitq, tiny_tensors

UP_PROJ = "model.layers.0.mlp.up_proj.weight"
ROW = {"name", "verdict", "reason", "shape", "dtype", "k", "bits_per_weight", "scale", "codebook", "sqnr_db"}


def test_of_a_quantized_file(kbitq: Kbitq, tiny_k3: Path) -> None:
    code, out, err = kbitq("inspect", tiny_k3)
    assert (code, err) == (0, "")
    head, first, second, *_ = out.splitlines()
    assert head.split()[:4] == ["tensor", "shape", "K", "bits"]
    assert first.split()[:4] == [UP_PROJ, "128x64", "3", "3.25"]
    assert second.split()[0] == UP_PROJ.replace("0", "1")
    assert float(first.split()[4]) == pytest.approx(15.9, abs=0.6)
    assert "quantized to K=3" in out
    assert "kept: norm" in out
    assert "scale mse, codebook optimal" in out


def test_json(kbitq: Kbitq, tiny_k3: Path) -> None:
    code, out, err = kbitq("inspect", tiny_k3, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {"totals", "tensors"}
    assert {row["name"] for row in report["tensors"]} == set(tiny_tensors())
    assert all(set(row) >= ROW | {"max_abs_err", "bytes"} for row in report["tensors"])


def test_against_the_source_measures_again(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    recorded = json.loads(kbitq("inspect", tiny_k3, "--json").out)
    measured = json.loads(kbitq("inspect", tiny_k3, "--against", tiny, "--json").out)
    for old, new in zip(recorded["tensors"], measured["tensors"], strict=True):
        assert old["name"] == new["name"]
        if old["sqnr_db"] is not None:
            assert new["sqnr_db"] == pytest.approx(old["sqnr_db"], abs=1e-4)
    assert measured["totals"]["sqnr_db"] is not None
    assert "\nSQNR       " in kbitq("inspect", tiny_k3, "--against", tiny).out
    assert "\nmean SQNR  " in kbitq("inspect", tiny_k3).out


@pytest.mark.parametrize("by", ["name", "sqnr", "size"])
def test_sort(by: str, kbitq: Kbitq, tiny: Path) -> None:
    out = tiny.with_name("all.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "-o", out, "--include", "lm_head.weight", "--no-keep-embeddings").code == 0
    rows = [row for row in json.loads(kbitq("inspect", out, "--sort", by, "--json").out)["tensors"] if row["k"]]
    expected = {
        "name": sorted(rows, key=lambda row: row["name"]),
        "sqnr": sorted(rows, key=lambda row: row["sqnr_db"]),
        "size": sorted(rows, key=lambda row: (-row["bytes"], row["name"])),
    }
    assert [row["name"] for row in rows] == [row["name"] for row in expected[by]]


def test_of_an_ordinary_file_says_what_each_k_would_give(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("inspect", tiny, "--k", "2,3,8")
    assert (code, err) == (0, "")
    head, first, *_ = out.splitlines()
    assert head.split() == ["tensor", "shape", "K=2", "K=3", "K=8"]
    assert first.split()[:2] == [UP_PROJ, "128x64"]
    two, three, eight = (float(cell) for cell in first.split()[2:])
    assert 8 < two < 11 < three < 18 < 43 < eight
    choices = [line.split() for line in out.splitlines()[-3:]]
    assert [row[:2] for row in choices] == [["2", "2.25"], ["3", "3.25"], ["8", "8.25"]]


def test_what_it_foresees_is_what_comes(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    would = json.loads(kbitq("inspect", tiny, "--json").out)
    came = json.loads(kbitq("inspect", tiny_k3, "--against", tiny, "--json").out)
    for before, after in zip(would["tensors"], came["tensors"], strict=True):
        assert before["name"] == after["name"]
        if after["k"]:
            assert before["would"]["3"]["sqnr_db"] == pytest.approx(after["sqnr_db"], abs=1e-4)
    assert would["totals"]["would"]["3"]["sqnr_db"] == pytest.approx(came["totals"]["sqnr_db"], abs=1e-4)


def test_sample(kbitq: Kbitq, tiny: Path) -> None:
    assert kbitq("inspect", tiny, "--sample").code == 0


def test_against_what_is_not_its_source(kbitq: Kbitq, tiny_k3: Path) -> None:
    code, out, err = kbitq("inspect", tiny_k3, "--against", tiny_k3.with_name("other.safetensors"))
    assert (code, out) == (1, "")
    assert "other.safetensors" in err
