"""``kbitq quantize`` and what it says."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from helpers.program import Kbitq, spawn, tiny_tensors

QUANTIZED = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]


def quantized_names(path: Path) -> list[str]:
    with safe_open(path, "np") as file:
        return sorted(name.removesuffix("_packed") for name in file.keys() if name.endswith("_packed"))  # noqa: SIM118


def test_the_summary(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("quantize", tiny, "--k", 3)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["outcome", "tensors", "parameters", "share"]
    table = {line[:30].rstrip(): line[30:].split() for line in lines[1 : lines.index("")]}
    assert table["quantized to K=3: matrix"][:3] == ["2", "16.4", "k"]
    assert table["kept: embedding"][0] == table["kept: output head"][0] == "1"
    assert table["kept: norm"][0] == table["kept: bias"][0] == "2"
    facts = {line.split()[0]: line for line in lines[lines.index("") :] if line}
    assert "smaller)" in facts["size"]
    assert "3.25 bits per weight" in facts["quantized"]
    assert " dB overall, worst " in facts["SQNR"]
    assert any(name in facts["SQNR"] for name in QUANTIZED)
    assert "s (" in facts["time"]
    assert lines[-1] == str(tiny.with_name("tiny-kbitq-k3.safetensors"))


def test_json_is_the_whole_ledger(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("quantize", tiny, "--k", 4, "--json")
    assert (code, err) == (0, "")
    ledger = json.loads(out)
    assert {row["name"] for row in ledger["tensors"]} == set(tiny_tensors())
    assert {row["name"] for row in ledger["tensors"] if row["verdict"] == "quantized"} == set(QUANTIZED)
    wanted = {"name", "verdict", "reason", "shape", "dtype", "k", "bits_per_weight", "scale", "codebook", "sqnr_db"}
    assert wanted | {"max_abs_err", "bytes"} <= set(ledger["tensors"][0])
    assert ledger["totals"]["sqnr_db"] > 20
    assert ledger["out"].endswith("tiny-kbitq-k4.safetensors")
    assert ledger["seconds"] > 0


def test_quiet_says_only_where(kbitq: Kbitq, tiny: Path) -> None:
    assert kbitq("quantize", tiny, "--k", 2, "-q") == (0, f"{tiny.with_name('tiny-kbitq-k2.safetensors')}\n", "")


def test_dry_run_writes_nothing(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("quantize", tiny, "--k", 3, "--dry-run")
    assert code == 0
    assert "quantized to K=3: matrix" in out
    assert "3.25 bits per weight" in out
    assert "nothing was written" in err
    said = {line.split("  ")[0]: line for line in out.splitlines()}
    assert " needed, " in said["disk"]
    assert "about " in said["memory"]
    assert "about " in said["time"]
    assert said["split along inputs"].split()[3:] == ["2", "2", "0", "0"]
    assert list(tiny.parent.iterdir()) == [tiny]
    plan = json.loads(kbitq("plan", tiny, "--k", 3, "--json").out)
    dry = json.loads(kbitq("quantize", tiny, "--k", 3, "--dry-run", "--json").out)
    assert plan.pop("estimate").keys() == dry.pop("estimate").keys()
    assert plan["disk"].pop("free") >= 0 <= dry["disk"].pop("free")
    assert plan == dry
    real = json.loads(kbitq("quantize", tiny, "--k", 3, "--json").out)
    for key in ("quantized", "parameters", "bytes_in", "bytes_out", "bits_per_weight"):
        assert plan["totals"][key] == real["totals"][key]
    assert plan["files"][0]["bytes"] == Path(real["out"]).stat().st_size


def test_a_plan_that_does_not_fit(kbitq: Kbitq, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbitq.checkpoint.estimation.disk_free", lambda out: 1000)
    code, out, err = kbitq("plan", tiny, "--k", 3)
    assert code == 1
    assert "1.00 kB free" in out
    assert "1.00 kB free" in err.splitlines()[-2]
    assert list(tiny.parent.iterdir()) == [tiny]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--include", "lm_head.weight"], ["lm_head.weight", *QUANTIZED]),
        (["--exclude", "*.1.*"], QUANTIZED[:1]),
        (["--include", "lm_head.weight", "--exclude", "*head*"], QUANTIZED),
        (["--only", "re:embed"], ["model.embed_tokens.weight"]),
        (["--only", "*.0.*.weight", "--only", "lm_head.weight"], ["lm_head.weight", QUANTIZED[0]]),
        (["--no-keep-embeddings"], ["model.embed_tokens.weight", *QUANTIZED]),
        (["--keep-embeddings"], QUANTIZED),
    ],
)
def test_selection(options: list[str], names: list[str], kbitq: Kbitq, tiny: Path) -> None:
    out = tiny.with_name("out.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "-o", out, *options).code == 0
    assert quantized_names(out) == names


def test_scale_and_codebook_reach_the_library(kbitq: Kbitq, tiny: Path) -> None:
    book = tiny.with_name("book.json")
    book.write_text(json.dumps([-1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0]))
    for options, scale, codebook in (
        ([], "mse", "optimal"),
        (["--scale", "absmax", "--codebook", "nf"], "absmax", "nf"),
        (["--codebook", book], "mse", "custom"),
    ):
        report = json.loads(kbitq("quantize", tiny, "--k", 3, "--force", "--json", "--device", "cpu", *options).out)
        row = next(row for row in report["tensors"] if row["name"] == QUANTIZED[0])
        assert (row["scale"], row["codebook"]) == (scale, codebook)


def test_force_replaces(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    before = tiny_k3.read_bytes()
    assert kbitq("quantize", tiny, "--k", 3, "--scale", "absmax").code == 1
    assert tiny_k3.read_bytes() == before
    assert kbitq("quantize", tiny, "--k", 3, "--scale", "absmax", "--force").code == 0
    assert tiny_k3.read_bytes() != before


def test_nonfinite_tensors_are_kept_on_request(kbitq: Kbitq, tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors[QUANTIZED[0]][0, 0] = np.nan
    save_file(tensors, tmp_path / "nan.safetensors")
    code, out, _ = kbitq("quantize", tmp_path / "nan.safetensors", "--k", 3, "--on-nonfinite", "keep")
    assert code == 0
    assert "finite" in out
    kept = load_file(tmp_path / "nan-kbitq-k3.safetensors")
    np.testing.assert_array_equal(kept[QUANTIZED[0]], tensors[QUANTIZED[0]])
    assert quantized_names(tmp_path / "nan-kbitq-k3.safetensors") == QUANTIZED[1:]


def test_a_folder_in_shards(kbitq: Kbitq, tiny: Path) -> None:
    source = tiny.parent / "model"
    source.mkdir()
    shutil.copy(tiny, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    code, out, _ = kbitq("quantize", source, "--k", 3, "--max-shard-size", "50kB")
    assert code == 0
    made = tiny.parent / "model-kbitq-k3"
    assert out.splitlines()[-1] == str(made)
    assert len(list(made.glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((made / "config.json").read_text())["quantization_config"]["k"] == 3
    assert (made / "tokenizer.json").read_text() == "{}"


def test_data_on_stdout_talk_on_stderr(tiny: Path) -> None:
    code, out, err = spawn("quantize", tiny, "--k", 3, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["totals"]["quantized"] == 2


@pytest.mark.parametrize("how", [["plan"], ["quantize", "--dry-run"]])
def test_a_plan_may_be_made_of_what_is_there_already(how: list[str], kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    before = tiny_k3.read_bytes()
    code, out, err = kbitq(*how, tiny, "--k", 3)
    assert code == 0
    assert out.splitlines()[-1] == str(tiny_k3)
    assert f"note: {tiny_k3} exists, so quantize would stop here; --force replaces it" in err
    assert "exists" in json.loads(kbitq(*how, tiny, "--k", 3, "--json").out)["obstacle"]
    code, out, err = kbitq(*how, tiny, "--k", 3, "--force", "--json")
    assert (code, json.loads(out)["obstacle"]) == (0, None)
    assert "exists" not in err
    assert tiny_k3.read_bytes() == before


def test_a_run_taken_up_again_says_what_it_reuses(kbitq: Kbitq, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbitq.checkpoint.passes import journal
    from kbitq.checkpoint.passes.run_state import RunState

    finish, calls = RunState.tensor_finished, []

    def stop(self: RunState, *given: object) -> None:
        finish(self, *given)
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(journal, "SYNC_BYTES", 1)
    monkeypatch.setattr(RunState, "tensor_finished", stop)
    assert kbitq("quantize", tiny, "--k", 3).code == 130
    monkeypatch.undo()
    code, out, _ = kbitq("quantize", tiny, "--k", 3)
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("reused"))
    assert re.fullmatch(rf"reused     [1-4] of {len(tiny_tensors())} tensors were written by the interrupted run", line)
    assert "reused" not in kbitq("quantize", tiny, "--k", 3, "--force").out


def test_formats_of_other_tools(kbitq: Kbitq, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    alone = kbitq("plan", tiny, "--format", "fp8", "--json")
    assert json.loads(alone.out)["out"] == str(tiny.with_name(f"{tiny.stem}-fp8"))
    assert any("no config.json" in note for note in json.loads(alone.out)["notes"])
    tiny.rename(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    plan = kbitq("quantize", folder, "--format", "int8", "--dry-run", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["out"] == str(tmp_path / "model-int8")
    for arguments, said in (
        (("--format", "gguf"), "one of kbitq, compressed-tensors"),
        (("--format", "int8", "--group", 32), "--group goes with"),
        (("--format", "compressed-tensors", "--k", 4, "--group", 40), "multiple of 32"),
        (("--format", "int8", "--codec", "trellis"), "--codec is for"),
        (("--format", "compressed-tensors"), "--k"),
        (("--format", "bnb-nf4", "--k", 3), "K = 3"),
        (("--format", "gptq", "--k", 4, "--group", 96), "no groups of 96 columns"),
        (("--format", "gptq", "--bpw", 4.5), "one K for all tensors"),
        (
            ("--format", "compressed-tensors", "--kl", 0.1, "--text", folder / "config.json"),
            "--kl is for kbitq's own format",
        ),
        (("--format", "bnb-nf4-double", "--importance", folder / "config.json"), "compressed-tensors, gptq"),
    ):
        result = kbitq("quantize", folder, *arguments)
        assert result.code != 0 and said in " ".join(result.err.split()), (arguments, result.err)
    assert kbitq("quantize", folder, "--format", "int8", "-o", tmp_path / "out").code == 0
    card = kbitq("push", tmp_path / "out", "me/int8", "--dry-run")
    assert "pip install compressed-tensors" in card.out and "--format int8" in card.out, card.err
    assert "int8" in kbitq("inspect", tmp_path / "out", "--by", "role").out
    refused = kbitq("inspect", tmp_path / "out", "--histograms")
    assert refused.code == 1 and "format int8 of other tools" in " ".join(refused.err.split())
