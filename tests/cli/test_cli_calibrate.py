"""``kbitq calibrate``, and ``inspect`` and ``quantize --importance`` on what it wrote."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from helpers.program import Kbitq
from helpers.small_models import make_model, save_with_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(make_model("llama"), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def stats(model: Path, text: Path, tmp_path: Path, kbitq: Kbitq) -> Path:
    out = tmp_path / "stats"
    given = ("--text", text, "--samples", 4, "--length", 32, "-o", out)
    assert kbitq("calibrate", model, *given, "--quiet") == (0, f"{out}\n", "")
    return out


def test_what_was_made_is_shown(model: Path, text: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    given = ("--text", text, "--samples", 4, "--length", 32, "-o", tmp_path / "stats")
    code, out, err = kbitq("calibrate", model, *given)
    assert code == 0, err
    assert "8, of 10 weights" in out
    assert "4 windows of 32 tokens" in out
    code, out, _ = kbitq("calibrate", model, *given, "--force", "--json")
    assert code == 0
    assert json.loads(out)["text"]["samples"] == 4


def test_inspect_shows_what_is_in_it(stats: Path, kbitq: Kbitq) -> None:
    code, out, err = kbitq("inspect", stats)
    assert code == 0, err
    assert "model.layers.0.mlp.gate_proj.weight and 1 more: 64 columns, 128 tokens, 8.58 kB" in out
    assert "8, of 10 weights" in out
    code, out, _ = kbitq("inspect", stats, "--json")
    table = json.loads(out)
    assert table["inputs"] == len(table["hessians"]) == 8
    assert table["bytes"] == sum(row["bytes"] for row in table["hessians"])
    assert kbitq("inspect", stats, "--quiet") == (0, table["fingerprint"] + "\n", "")


def test_plan_says_what_gets_error_feedback(model: Path, stats: Path, kbitq: Kbitq) -> None:
    code, out, err = kbitq("plan", model, "--k", 2, "--calibration", stats)
    assert code == 0, err
    assert "calibrated  all tensors, by error feedback" in out


def test_a_recipe_made_with_statistics_needs_them(model: Path, stats: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    recipe, given = tmp_path / "recipe.toml", ("--calibration", stats)
    made = kbitq("quantize", model, "--k", 2, *given, "-o", tmp_path / "a", "--write-recipe", recipe, "--quiet")
    assert made[0] == 0
    code, _, err = kbitq("quantize", model, "--recipe", recipe, "-o", tmp_path / "b")
    assert code != 0
    assert "the recipe was made with the statistics whose fingerprint is " in err
    assert kbitq("quantize", model, "--recipe", recipe, *given, "-o", tmp_path / "b", "--quiet")[0] == 0
    a, b = (sorted((tmp_path / name).glob("*.safetensors")) for name in "ab")
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]


def test_inspect_says_that_a_model_was_calibrated(model: Path, stats: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    assert kbitq("quantize", model, "--k", 2, "--calibration", stats, "-o", tmp_path / "out", "--quiet")[0] == 0
    code, out, err = kbitq("inspect", tmp_path / "out")
    assert code == 0, err
    fingerprint = json.loads((tmp_path / "out/quantization_report.json").read_text())["calibration"]
    assert f"all tensors, by error feedback with the statistics {fingerprint[:12]}..." in out


def test_statistics_of_another_model_are_refused(stats: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    from safetensors.torch import save_file
    from torch import randn

    save_file({"h.0.weight": randn(64, 128)}, tmp_path / "other.safetensors")
    for option in ("--calibration", "--importance"):
        code, _, err = kbitq("quantize", tmp_path / "other.safetensors", "--k", 2, option, stats)
        assert code != 0
        assert "none of the 1 tensors" in err or "another model, or of this one under other names: model." in err


def test_quantize_takes_it_as_importance(model: Path, stats: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    out = tmp_path / "k3"
    code, _, err = kbitq("quantize", model, "--k", 3, "--importance", stats, "-o", out, "--quiet")
    assert code == 0, err
    fingerprint = json.loads(kbitq("inspect", stats, "--json").out)["fingerprint"]
    assert fingerprint in (out / "quantization_report.json").read_text()
    code, _, err = kbitq("verify", out, "--source", model, "--full", "--importance", stats)
    assert code == 0, err


def test_no_text_and_a_text_that_is_too_short(model: Path, tmp_path: Path, text: Path, kbitq: Kbitq) -> None:
    code, _, err = kbitq("calibrate", model, "-o", tmp_path / "stats")
    assert code == 2
    assert "--text" in err
    code, _, err = kbitq("calibrate", model, "--text", text, "--length", 32, "-o", tmp_path / "stats")
    assert code == 1
    assert "900 tokens are 28 windows of 32, and 128 are wanted" in err
    assert "--samples 28" in err


def test_the_output_is_no_text_of_its_own(model: Path, text: Path, kbitq: Kbitq) -> None:
    code, _, err = kbitq("calibrate", model, "--text", text, "-o", text, "--force")
    assert code == 1
    assert "text.txt" in err
    assert text.read_text().startswith("The quick")


def test_a_field_that_is_not_there(model: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    (tmp_path / "chat.jsonl").write_text('{"content": "a"}\n')
    code, _, err = kbitq("calibrate", model, "--text", tmp_path / "chat.jsonl", "-o", tmp_path / "stats")
    assert code == 1
    assert "line 1 has no text in a field 'text'" in err
    assert "--field NAME" in err
