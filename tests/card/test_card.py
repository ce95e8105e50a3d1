"""The model card: what it says, that nothing in a file can say more, and that its command makes the bytes again."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from helpers.program import in_this_process, spawn
from kbitq.card import Subject, command_of, model_card, source_in, source_text
from kbitq.card.front_matter import split
from kbitq.card.markdown import code, fenced, inline
from kbitq.card.usage import auto_class
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, plan_quantize, run
from kbitq.cli import cards
from kbitq.cli.console import console
from kbitq.errors import KbitqError
from kbitq.eval.perplexity import Divergence, Evaluation
from kbitq.eval.record import read_evaluations, save_evaluation

SOURCE_CARD = """---
license: mit
language:
- en
tags:
- tiny
base_model: someone/else
model-index:
- name: tiny
  results: []
widget:
- text: Hello
---
# Tiny

It reaches a perplexity of 3.
"""


def weights() -> dict[str, np.ndarray]:
    draw = np.random.RandomState(3)
    names = [f"model.layers.{i}.{role}.weight" for i in range(3) for role in ("self_attn.q_proj", "mlp.up_proj")]
    tensors = {name: draw.standard_normal((96, 128)).astype(np.float32) * 0.05 for name in names}
    return {**tensors, "model.norm.weight": np.ones(128, np.float32), "model.embed_tokens.weight": tensors[names[0]]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(SOURCE_CARD)
    return folder


def quantized(source: Path, name: str = "out", **options: Any) -> Path:
    out = source.parent / name
    run(plan_quantize(source, out, QuantizeOptions(**{"k": 3, **options})))
    return out


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def command_in(text: str) -> list[str]:
    block = re.search(r"^(`{3,})bash\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    assert block is not None, text
    return shlex.split(block[2])


# --- what it says


def test_the_local_readme_is_the_card(source: Path) -> None:
    text = (quantized(source) / "README.md").read_text()
    own, below = text.split("## The card of the source")
    for said in ("# tiny, quantized to K = 3", "3.250", "Coverage", "SQNR", "AutoModelForCausalLM", " kB, from "):
        assert said in own, said
    assert "perplexity" not in own.lower(), "a claim about another model"
    assert "It reaches a perplexity of 3." in below
    assert front_matter(text) == {"license": "mit", "language": ["en"], "tags": ["tiny", "kbitq", "quantized"]}


def test_a_source_without_a_readme_has_a_card_without_a_foot(source: Path) -> None:
    (source / "README.md").unlink()
    text = (quantized(source) / "README.md").read_text()
    assert "The card of the source" not in text
    assert front_matter(text) == {"tags": ["kbitq", "quantized"]}


def test_a_card_made_again_is_the_same(source: Path) -> None:
    out = quantized(source)
    assert cards.card_of(out) == (out / "README.md").read_text()
    published = cards.card_of(out, repository="me/tiny-k3", base="someone/tiny@abc")
    (out / "README.md").write_text(published)
    again = cards.card_of(out, repository="me/tiny-k3", base="someone/tiny@abc")
    assert again == published
    assert front_matter(published)["base_model"] == "someone/tiny"
    assert front_matter(published)["base_model_relation"] == "quantized"
    assert published.count("It reaches a perplexity of 3.") == 1
    assert 'from_pretrained("me/tiny-k3")' in published
    assert command_in(published)[:3] == ["kbitq", "quantize", "someone/tiny@abc"]


def test_the_restored_folder_has_the_source_s_readme(source: Path) -> None:
    dequantize_checkpoint(quantized(source), source.parent / "restored")
    text = (source.parent / "restored" / "README.md").read_text()
    assert front_matter(text) == {"license": "mit", "language": ["en"], "tags": ["tiny"]}
    assert split(text)[1] == "# Tiny\n\nIt reaches a perplexity of 3.\n"
    assert source_text("# Any\n") == "# Any\n"
    assert source_text(cards.card_of(quantized(bare(source), "bare-out"))) is None


def bare(source: Path) -> Path:
    (source / "README.md").unlink()
    return source


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "AutoModelForCausalLM"),
        ({"architectures": ["BertModel"]}, "AutoModel"),
        ({"architectures": ["BertForMaskedLM"]}, "AutoModelForMaskedLM"),
        ({"architectures": ["RobertaForSequenceClassification"]}, "AutoModelForSequenceClassification"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "AutoModelForSeq2SeqLM"),
        (
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
            "AutoModelForSpeechSeq2Seq",
        ),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "AutoModelForImageTextToText"),
        ({"model_type": "bert"}, "AutoModel"),
        ({"architectures": "LlamaForCausalLM"}, None),
        ({"architectures": [3], "model_type": []}, None),
        ({}, None),
    ],
)
def test_the_auto_class_fits_the_model(config: dict[str, Any], expected: str | None) -> None:
    assert auto_class(config) == expected


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BertModel", "T5ForConditionalGeneration"])
def test_transformers_has_the_auto_class(architecture: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    found = getattr(transformers, auto_class({"architectures": [architecture]}) or "")
    assert architecture in {name for names in found._model_mapping._model_mapping.values() for name in _flat(names)}


def _flat(names: Any) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def test_a_single_file_is_loaded_as_a_file(source: Path) -> None:
    out = quantized(source, "out.safetensors")
    text = cards.card_of(out)
    assert 'kbitq.load_file("out.safetensors")' in text
    assert "transformers" not in text
    assert command_in(text) == ["kbitq", "quantize", "SRC", "--k", "3", "-o", "out.safetensors"]


# --- results of evaluations


RESULT = Evaluation(15.1849999, 2.7203, 48, 512, 3.2, Divergence(0.071234567, 0.04, 0.6, 0.875, 14.313))


def test_saved_results_are_in_the_card(source: Path) -> None:
    out, text = quantized(source), source.parent / "wiki.txt"
    text.write_text("words")
    before = cards.before_saving(out)
    cards.save(out, RESULT, text, before)
    card = (out / "README.md").read_text()
    for said in ("| Perplexity | 15.185 (source: 14.313) |", "0.0712", "87.5 %", "`wiki.txt`", "48 x 512 tokens"):
        assert said in card, said
    saved = (out / "quantization_evaluation.json").read_text()
    assert str(source.parent) not in saved and "seconds" not in saved and "3.2" not in saved
    assert cards.card_of(out) == card


def test_a_result_of_the_same_text_takes_the_place_of_the_first(source: Path) -> None:
    out, text, other = quantized(source), source.parent / "a.txt", source.parent / "b.txt"
    text.write_text("a")
    other.write_text("b")
    for file, perplexity in ((text, 20.0), (other, 30.0), (text, 25.0)):
        save_evaluation(out, Evaluation(perplexity, 3.0, 4, 64, 1.0), file)
    assert [(r["text"]["name"], r["perplexity"]) for r in read_evaluations(out)] == [("b.txt", 30.0), ("a.txt", 25.0)]
    assert "nats" not in cards.card_of(out).split("## Use")[0]


def test_an_edited_card_stays(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, text = quantized(source), source.parent / "wiki.txt"
    text.write_text("words")
    (out / "README.md").write_text("# Mine\n")
    console.reset()  # a test before may have been quiet
    cards.save(out, RESULT, text, cards.before_saving(out))
    assert (out / "README.md").read_text() == "# Mine\n"
    assert "has been edited and stays" in capsys.readouterr().err


@pytest.mark.parametrize("found", ["[]", '{"evaluations": [{"text": {}}]}', '{"evaluations": {}}', "no JSON"])
def test_a_file_of_results_that_is_none(found: str, source: Path) -> None:
    out = quantized(source)
    (out / "quantization_evaluation.json").write_text(found)
    with pytest.raises(KbitqError):
        read_evaluations(out)
    with pytest.raises(KbitqError):
        cards.before_saving(out)


def test_a_source_gets_no_results(source: Path) -> None:
    with pytest.raises(KbitqError, match="is not a folder that kbitq quantized"):
        cards.before_saving(source)


# --- what files say is text and nothing else


HOSTILE = "](http://x) <img src=x onerror=alert(1)> | `rm` \x1b[31m\n# Heading"


def test_text_is_only_text() -> None:
    shown = inline(HOSTILE)
    assert "<" not in shown and "\x1b" not in shown and "\n" not in shown
    assert re.search(r"(?<!\\)[\[\]|`]", shown) is None
    assert "\n" not in code(HOSTILE) and "\x1b" not in code(HOSTILE)
    assert code("a`b``c") == "```a`b``c```"
    assert fenced("```\n# out").startswith("````\n")


def test_a_hostile_ledger_makes_a_card_of_text(source: Path) -> None:
    out = quantized(source)
    ledger = json.loads((out / "quantization_report.json").read_text())
    ledger |= {"kbitq": HOSTILE, "recipe": HOSTILE, "files": [{"name": HOSTILE, "sha256": HOSTILE}]}
    for row in ledger["tensors"]:
        if row["verdict"] == "quantized":
            row |= {"name": HOSTILE, "scale": HOSTILE, "codebook": HOSTILE}
    ledger["totals"] |= {"bytes": "many", "sqnr_db": [], "bits_per_weight": None, "coverage": True}
    evaluation = {
        "text": {"name": HOSTILE, "sha256": HOSTILE}, "windows": 1, "window": 1, "perplexity": 1.0, "loss": 0.0,
    }  # fmt: skip
    text = model_card(Subject(ledger, HOSTILE, evaluations=[evaluation]))
    outside = re.sub(r"^(`{3,})\w*\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert "<img" not in spans
    assert "\x1b" not in outside
    assert [line for line in outside.splitlines() if line.startswith("# ")] == [outside.split("\n\n")[1]]


@pytest.mark.parametrize(
    "head",
    [
        "license: [", "- a\n- b", "tags: {a: b}\nlicense: {x: y}", "license: !!python/object:os.system x",
        "a: &a [*a]", "license: " + "[" * 5000, "\x00", "language: [1, 2]\ntags: [[], tiny]",
    ],
)  # fmt: skip
def test_strange_front_matter_is_no_reason_to_fail(head: str, source: Path) -> None:
    (source / "README.md").write_text(f"---\n{head}\n---\nText\n")
    text = (quantized(source) / "README.md").read_text()
    assert {"kbitq", "quantized"} <= set(front_matter(text)["tags"]) <= {"kbitq", "quantized", "tiny"}
    assert front_matter(text).keys() == {"tags"}


# --- its command


def custom_levels(folder: Path) -> Path:
    path = folder / "levels.json"
    path.write_text(json.dumps({"3": [-1, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1]}))
    return path


def importance(folder: Path) -> Path:
    path = folder / "columns.safetensors"
    names = [name for name in weights() if "proj" in name]
    save_file({name: np.linspace(0.1, 3, 128, dtype=np.float32) for name in names}, path)
    return path


RULES = [f"re:layers\\.{i}\\.mlp=k{k}" for i, k in ((0, 2), (1, 4), (2, 5))] + ["*norm*=keep"]
WAYS: dict[str, Callable[[Path], list[object]]] = {
    "one K": lambda folder: ["--k", 3, "--exclude", "*.1.*", "--scale", "absmax", "--no-keep-embeddings"],
    "a budget": lambda folder: ["--bpw", 3.26, "--weight", "*q_proj*=0.1", "--tie", "*mlp*", "--codebook", "fit"],
    "a few rules": lambda folder: ["--k", 3, "--rule", RULES[0]],
    "many rules": lambda folder: ["--k", 3, *(word for rule in RULES for word in ("--rule", rule))],
    "many rules and a budget": lambda folder: ["--bpw", 3.5, *(word for rule in RULES for word in ("--rule", rule))],
    "wide scales": lambda folder: ["--k", 3, "--codec", "trellis", "--scale-block", 128],
    "many rules and both codecs": lambda folder: [
        "--bpw", 2.5, "--codec", "auto", *(word for rule in RULES for word in ("--rule", rule)),
    ],
    "many rules and wide scales": lambda folder: [
        "--k", 3, "--codec", "trellis", "--scale-block", 128,
        *(word for part in (".0.", ".1.", ".2.", "q_proj") for word in ("--rule", f"*{part}*=trellis:k2/128")),
    ],
    "importance": lambda folder: ["--k", 3, "--importance", importance(folder)],
    "importance and many rules": lambda folder: [
        "--k", 4, "--importance", importance(folder), *(word for rule in RULES for word in ("--rule", rule)),
    ],
    "levels from a file": lambda folder: ["--k", 3, "--codebook", custom_levels(folder)],
    "small shards": lambda folder: ["--k", 3, "--max-shard-size", "20kB", "--include", "*embed*"],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_its_command_makes_the_bytes_again(
    way: str, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fresh process, in a folder where the source and the files that the card names lie."""
    monkeypatch.chdir(source.parent)
    first, elsewhere = source.parent / "first", source.parent / "elsewhere"
    elsewhere.mkdir()
    done = in_this_process(capsys)("quantize", source, *WAYS[way](source.parent), "-o", first, "-q")
    assert done.code == 0, done.err
    card = (first / "README.md").read_text()
    ledger = json.loads((first / "quantization_report.json").read_text())
    words = command_in(card)
    assert words[:3] == ["kbitq", "quantize", "tiny"]
    assert str(source.parent) not in card + json.dumps(ledger)
    assert card.count("--rule") <= 3
    (elsewhere / "tiny").symlink_to(source)
    for name in ("levels.json", "columns.safetensors"):
        if name in words:
            (elsewhere / name).symlink_to(source.parent / name)
            assert f"`{name}` has the SHA-256" in card
    if "--recipe" in words:
        (elsewhere / "quantization_recipe.toml").symlink_to(first / "quantization_recipe.toml")
    done = spawn(*words[1:], "-o", "again", cwd=elsewhere)
    assert done.code == 0, done.err
    files = {path.name: path.read_bytes() for path in first.iterdir()}
    assert {path.name: path.read_bytes() for path in (elsewhere / "again").iterdir()} == files


def test_the_command_of_a_file_made_into_a_folder(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "m.safetensors")
    out = quantized(tmp_path / "m.safetensors")
    assert command_in((out / "README.md").read_text())[2:] == ["m.safetensors", "--k", "3", "-o", "out"]
    assert cards.card_of(out) == (out / "README.md").read_text()


@pytest.mark.parametrize("name", ["tiny", "my model", "it's", "a'b c\"d", "m.safetensors"])
def test_the_source_is_read_back_from_the_card(name: str) -> None:
    card = model_card(Subject({"totals": {}, "tensors": []}, name))
    assert source_in(card) == name
    assert source_in(model_card(Subject({"totals": {}, "tensors": []}))) is None
    assert source_in("## Reproduce\n\n```bash\nkbitq quantize 'x\n```") is None


def test_a_command_of_nonsense_is_still_one_line_of_words() -> None:
    assert command_of({"options": [], "files": {}}) == "kbitq quantize SRC"
    assert shlex.split(command_of({"options": {"only": ["a b", 3], "k": 4}}, "o/n@1")) == [
        "kbitq", "quantize", "o/n@1", "--only", "a b", "--k", "4",
    ]  # fmt: skip


def test_what_is_not_quantized_has_no_card(source: Path) -> None:
    for path in (source, source / "model.safetensors"):
        with pytest.raises(KbitqError, match="not quantized"):
            cards.card_of(path)
