"""``kbitq eval --tasks``: scores of the lm-evaluation-harness, shown and kept beside the model, in card and page."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.program import Kbitq
from kbitq.cli.main import run
from kbitq.errors import BuildError, KbitqError
from kbitq.eval import tasks
from kbitq.eval.record import parse_tasks, read_evaluations, read_tasks, save_tasks
from kbitq.eval.tasks import Tasks, TaskScore, scores

FOUND = {  # as the harness returns it: a task, and a group of two tasks without metrics of its own
    "results": {
        "arc": {"alias": "arc", "sample_len": 7, "acc,none": 0.5, "acc_stderr,none": 0.25, "acc_norm,none": 1 / 3},
        "gsm": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": "N/A"},
        "both": {"alias": "both"},
        "mean": {"acc,none": 0.75, "acc_stderr,none": 0.1},
    },
    "group_subtasks": {"both": ["arc", "gsm"], "mean": ["arc", "gsm"]},
    "versions": {"arc": 1.0, "gsm": 3, "mean": 2},
    "n-shot": {"arc": 0, "gsm": 5},
    "n-samples": {"arc": {"original": 90, "effective": 7}, "gsm": {"original": 8, "effective": 8}},
}
ACC = TaskScore("arc", "acc", 0.5, 0.25, 7, 0, "1.0")
MATCH = TaskScore("gsm", "exact_match,strict-match", 0.125, None, 8, 5, "3")


def test_what_the_harness_returns() -> None:
    norm = TaskScore("arc", "acc_norm", 1 / 3, None, 7, 0, "1.0")
    assert scores(FOUND, ["arc"]) == [ACC, norm]
    assert scores(FOUND, ["both"]) == [ACC, norm, MATCH]
    assert scores(FOUND, ["mean"]) == [TaskScore("mean", "acc", 0.75, 0.1, 15, 5, "2")]


def test_scores_are_saved_beside_what_is_there(tmp_path: Path) -> None:
    save_tasks(tmp_path, [ACC, MATCH], [TaskScore("arc", "acc", 0.6, 0.2, 7, 0, "1.0")], "lm-eval 0.0")
    first = {"task": "arc", "metric": "acc", "value": 0.5, "stderr": 0.25, "samples": 7, "shots": 0, "version": "1.0"}
    rows = read_tasks(tmp_path)
    assert rows[0] == {**first, "against": 0.6, "harness": "lm-eval 0.0"}
    assert "stderr" not in rows[1] and "against" not in rows[1]
    save_tasks(tmp_path, [TaskScore("arc", "acc", 0.25, None, 7, 0, "1.0")], None, "lm-eval 0.0")
    assert [(row["task"], row["value"]) for row in read_tasks(tmp_path)] == [("gsm", 0.125), ("arc", 0.25)]
    assert read_evaluations(tmp_path) == []


@pytest.mark.parametrize(
    "row", [1, {}, {"task": 1}, {"value": "x"}, {"value": True}, {"stderr": "x"}, {"samples": 1.5}, {"harness": None}]
)
def test_a_file_of_scores_that_is_none(row: Any) -> None:
    good = {"task": "a", "metric": "b", "harness": "c", "value": 1, "samples": 2, "shots": 0}
    assert parse_tasks(json.dumps({"tasks": [good]}).encode(), "here") == [good]
    wrong = {**good, **row} if isinstance(row, dict) and row else row
    with pytest.raises(KbitqError, match="here does not hold results of kbitq eval"):
        parse_tasks(json.dumps({"tasks": [wrong]}).encode(), "here")


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(BuildError):
        Tasks(["arc_easy"])
    assert run(["eval", "nowhere", "--tasks", "arc_easy"]) == 1
    err = capsys.readouterr().err
    assert err == (
        "error: tasks are those of the lm-evaluation-harness, which is not installed\nhint: pip install 'lm-eval[hf]'\n"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tasks", "a", "--text", __file__], "takes the place of"),
        (["--tasks", " , "], "names no task"),
        (["--text", __file__, "--limit", "3"], "go with --tasks"),
        (["--text", __file__, "--chat"], "goes with --tasks"),
    ],
)
def test_usage(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "nowhere", *given]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


class Harness:
    """What stands for lm_eval: two tasks, and scores that depend on the model."""

    __version__ = "0.0"

    def __init__(self) -> None:
        self.tasks = SimpleNamespace(TaskManager=lambda include_path: self)
        self.all_tasks = ["arc", "gsm"]
        self.calls: list[dict[str, Any]] = []

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in self.all_tasks if name in names]

    def simple_evaluate(self, **given: Any) -> dict[str, Any]:
        print("chatter of the harness")
        self.calls.append(given)
        return FOUND


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    fake = Harness()
    monkeypatch.setattr(tasks, "_harness", lambda: fake)
    monkeypatch.setattr(tasks, "_wrapped", lambda model, tokenizer, batch: (model, tokenizer, batch))
    for name in ("kbitq.integrations.transformers.loading.load_model", "kbitq.cli.tasks.load_tokenizer"):
        monkeypatch.setattr(name, lambda folder, **_: folder)
    return fake


@pytest.fixture
def packed(tmp_path: Path, kbitq: Kbitq) -> Path:
    from safetensors.numpy import save_file

    from helpers.program import tiny_tensors

    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text("{}")
    save_file(tiny_tensors(), tmp_path / "plain/model.safetensors")
    assert kbitq("quantize", tmp_path / "plain", "--k", 3, "-o", tmp_path / "k3", "--quiet").code == 0
    return tmp_path / "k3"


def test_a_table_and_a_card(packed: Path, harness: Harness, kbitq: Kbitq) -> None:
    source = packed.with_name("plain")
    code, out, err = kbitq("eval", packed, "--tasks", "arc,gsm", "--against", source, "--limit", 8, "--chat")
    assert code == 0, err
    assert [line.split() for line in out.splitlines()] == [
        ["task", "metric", "value", "±", "reference", "shots", "samples"],
        ["arc", "acc", "0.5000", "0.2500", "0.5000", "0", "7"],
        ["arc", "acc_norm", "0.3333", "0.3333", "0", "7"],
        ["gsm", "exact_match,strict-match", "0.1250", "0.1250", "5", "8"],
    ]
    assert "chatter" in err
    assert [call["model"][0] for call in harness.calls] == [packed, source]
    assert harness.calls[0]["limit"] == 8 and harness.calls[0]["apply_chat_template"] is True
    card = (packed / "README.md").read_text()
    assert "| `gsm` | 5 | 8 | `exact_match,strict-match` | 0.1250 | - | 0.1250 |" in card
    assert "(lm-eval 0.0)" in card
    assert kbitq("verify", packed).code == 0
    assert kbitq("card", packed).out == card


def test_the_page_shows_scores(packed: Path, harness: Harness, kbitq: Kbitq, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    assert kbitq("eval", packed, "--tasks", "gsm", "--quiet") == (
        0, "gsm exact_match,strict-match 0.1250\n", "chatter of the harness\n",
    )  # fmt: skip
    assert kbitq("inspect", packed, "--html", tmp_path / "page.html", "--quiet").code == 0
    assert "<td>exact_match,strict-match</td><td>0.1250</td>" in (tmp_path / "page.html").read_text()


def test_what_is_saved_is_chosen(packed: Path, harness: Harness, kbitq: Kbitq) -> None:
    results, source = packed / "quantization_evaluation.json", packed.with_name("plain")
    found = json.loads(kbitq("eval", packed, "--tasks", "gsm", "--no-save", "--json").out)
    assert [(row["metric"], row["value"]) for row in found["tasks"]] == [("exact_match,strict-match", 0.125)]
    assert kbitq("eval", source, "--tasks", "gsm").code == 0
    assert not results.exists() and not (source / results.name).exists()
    assert "is not a folder that kbitq quantized" in kbitq("eval", source, "--tasks", "gsm", "--save").err
    results.symlink_to("elsewhere")
    done = kbitq("eval", packed, "--tasks", "gsm")
    assert done.code == 0 and "the result will not be saved" in done.err


def test_a_task_that_is_not_there(packed: Path, harness: Harness, kbitq: Kbitq) -> None:
    code, _, err = kbitq("eval", packed, "--tasks", "arc,gsm8")
    assert (code, err) == (1, "error: lm-eval has no task 'gsm8'\nhint: near it are gsm\n")


# -- with the harness itself -------------------------------------------------------------------------------------------

TASK = """
task: kbitq_tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""


def test_a_task_of_ones_own(tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness runs a packed and an ordinary model; to both the shorter choice is likelier."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-lm-eval runs this")
    import torch

    from helpers.small_models import make_model, save_tokenizer

    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(0)
    model.save_pretrained(tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    assert kbitq("quantize", tmp_path / "plain", "--k", 4, "-o", tmp_path / "k4", "--quiet").code == 0
    (tmp_path / "own").mkdir()
    data = tmp_path / "own/tiny.jsonl"
    rows = [{"question": "ab"[i % 2] * 5, "choices": ["a", "bb"], "answer": i % 2} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own/tiny.yaml").write_text(TASK.format(data=data))
    given = ["--tasks", "kbitq_tiny", "--include-path", tmp_path / "own", "--against", tmp_path / "plain", "--json"]
    code, out, err = kbitq("eval", tmp_path / "k4", *given)
    assert code == 0, err
    (row,) = json.loads(out)["tasks"]
    # All tokens are alike to this model, so the shorter choice is the likelier one.
    assert (row["task"], row["metric"], row["value"], row["against"], row["samples"]) == (
        "kbitq_tiny",
        "acc",
        0.5,
        0.5,
        6,
    )
    assert read_tasks(tmp_path / "k4")[0]["value"] == 0.5
