"""``kbitq eval`` and ``kbitq generate`` on a tiny language model."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.program import Kbitq, Result, spawn
from helpers.small_models import save_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def packed(language_model: Path, kbitq: Kbitq, tmp_path: Path) -> Path:
    assert kbitq("quantize", language_model, "--k", 3, "-o", tmp_path / "k3", "--quiet").code == 0
    return tmp_path / "k3"


def test_eval_saves_its_result(packed: Path, text: Path, language_model: Path, kbitq: Kbitq) -> None:
    given = ["--text", text, "--window", 64, "--against", language_model, "--json"]
    code, out, err = kbitq("eval", packed, *given, "--save")
    assert code == 0, err
    found = json.loads(out)
    assert "in the model card" in err
    saved = json.loads((packed / "quantization_evaluation.json").read_text())["evaluations"]
    assert [row["text"]["name"] for row in saved] == ["text.txt"]
    assert saved[0]["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)
    assert saved[0]["against"]["kl_mean"] == pytest.approx(found["divergence"]["mean"], rel=1e-5)
    assert f"{found['perplexity']:.3f} (source: " in (packed / "README.md").read_text()
    assert kbitq("verify", packed).code == 0
    code, _, err = kbitq("eval", language_model, *given, "--save")
    assert code == 1
    assert "is not a folder that kbitq quantized" in err


def test_eval_of_a_text(packed: Path, text: Path, language_model: Path, kbitq: Kbitq) -> None:
    result = kbitq("eval", packed, "--text", text, "--window", 64, "--against", language_model, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["windows"] == 900 // 64
    assert found["tokens"] == 64 * found["windows"]
    assert found["perplexity"] > 1
    assert 0 < found["divergence"]["median"] <= found["divergence"]["p99"]
    assert 0 < found["divergence"]["same_top1"] <= 1
    same = json.loads(kbitq("eval", packed, "--text", text, "--window", 64, "--against", packed, "--json").out)
    assert same["divergence"]["mean"] == 0
    assert same["perplexity"] == pytest.approx(same["divergence"]["reference_perplexity"])
    assert same["perplexity"] == pytest.approx(found["perplexity"])


def test_eval_for_a_reader(packed: Path, text: Path, kbitq: Kbitq) -> None:
    result = kbitq("eval", packed, "--text", text, "--window", 64, "--windows", 3)
    assert result.code == 0, result.err
    assert "perplexity" in result.out
    assert "3 windows of 64 tokens" in result.out
    quiet = kbitq("eval", packed, "--text", text, "--window", 64, "--windows", 3, "--quiet")
    assert float(quiet.out) > 1
    assert quiet.err == ""


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_eval_of_token_ids(dtype: str, packed: Path, kbitq: Kbitq, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 97, 256).astype(dtype)
    (tmp_path / "ids").write_bytes(ids.tobytes())
    found = json.loads(kbitq("eval", packed, "--tokens", tmp_path / "ids", "--window", 64, "--json").out)
    assert (found["windows"], found["tokens"]) == (4, 256)


def test_generate_streams_to_stdout(packed: Path, kbitq: Kbitq) -> None:
    result = kbitq("generate", packed, "Hello", "--max-tokens", 8)
    assert result.code == 0, result.err
    assert result.out.startswith("Hello")
    assert result.out.endswith("\n")
    assert "tokens/s" in result.err
    assert "weights" in result.err
    assert kbitq("generate", packed, "Hello", "--max-tokens", 8, "--quiet") == (0, result.out, "")
    found = json.loads(kbitq("generate", packed, "Hello", "--max-tokens", 8, "--json").out)
    assert "Hello" + found["text"] + "\n" == result.out
    assert found["tokens"] <= 8
    assert 0 < found["weight_bytes"] < found["peak_bytes"]


def test_seeds_draw_alike(packed: Path, kbitq: Kbitq) -> None:
    a, b, c = (
        kbitq("generate", packed, "Hello", "--temperature", 2.0, "--seed", seed, "--quiet").out for seed in (1, 1, 2)
    )
    assert a == b != c


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (("eval", "{packed}"), 2, "--text FILE or --tokens FILE"),
        (("eval", "{packed}", "--text", "{text}", "--tokens", "{text}"), 2, "one of them"),
        (("eval", "{packed}", "--tokens", "{text}"), 1, "does not hold token ids"),
        (("eval", "{packed}", "--text", "{text}", "--windows", "9999"), 1, "not enough"),
        (("eval", "{packed}/model.safetensors", "--text", "{text}"), 1, "config.json"),
        (("eval", "{nowhere}", "--text", "{text}"), 1, "config.json"),
        (("generate", "{bare}", "x"), 1, "tokenizer"),
        (("generate", "{encoder}", "x"), 1, "cannot be loaded as a causal language model"),
        (("generate", "{bert}", "x"), 1, "is no causal language model: its config.json names BertModel"),
        (("eval", "{bert}", "--text", "{text}"), 1, "is no causal language model: its config.json names BertModel"),
        (("eval", "{packed}", "--text", "{binary}"), 1, "is not a text in UTF-8: its byte 3 is 0xff"),
        (("eval", "{packed}", "--text", "{nul}"), 1, "is not a text in UTF-8: its byte 2 is 0x00"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_errors_are_sentences(arguments, code, says, packed, text, kbitq, tmp_path) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((packed / name).read_bytes())
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    (tmp_path / "nul").write_bytes(b"ab\0c")
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    save_tokenizer(bert)
    places = {
        "binary": tmp_path / "binary", "nul": tmp_path / "nul", "bert": bert,
        "packed": packed, "text": text, "nowhere": tmp_path / "nowhere", "bare": tmp_path / "bare",
        "encoder": tmp_path / "encoder",
    }  # fmt: skip
    result = kbitq(*(a.format(**places) for a in arguments))
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(packed: Path, kbitq: Kbitq) -> None:
    result = kbitq("generate", packed, "x", "--device", "cuda")
    assert result.code == 1
    assert "no CUDA device" in result.err


def test_missing_weights_are_told(packed: Path, text: Path, kbitq: Kbitq) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(packed / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    result = kbitq("eval", packed, "--text", text)
    assert result.code == 1
    assert "model.norm.weight" in result.err


def check_sentence(result: Result) -> None:
    """Done, or a sentence; a model of no sense may still be one that runs."""
    if result.code:
        assert result.err.startswith("error: "), result
        assert "internal error" not in result.err
        assert len(result.err.splitlines()) <= 2
    assert "Traceback" not in result.err


def with_code_of_its_own(folder: Path) -> Path:
    """A model and a tokenizer that want to run a file of the folder; it would leave a trace."""
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((folder / name).read_text())
        content.pop("tokenizer_class", None)
        content["auto_map"] = {entry: ["own.Own", "own.Own"] if entry == "AutoTokenizer" else "own.Own"}
        content["model_type"] = "a_type_of_its_own"
        (folder / name).write_text(json.dumps(content))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    return folder


@pytest.mark.parametrize("command", [("generate", "{}", "Hello"), ("eval", "{}", "--text", "{text}")])
def test_code_of_a_model_is_not_run(command: tuple[str, ...], packed: Path, text: Path, kbitq: Kbitq) -> None:
    folder = with_code_of_its_own(packed)
    done = kbitq(*(word.format(folder, text=text) for word in command))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {folder} comes with Python code of its own, which was not run\n")
    assert "--trust-remote-code runs it" in done.err
    assert not (folder / "ran").exists()


def test_code_of_a_model_runs_where_it_is_trusted(packed: Path, tmp_path: Path) -> None:
    folder = with_code_of_its_own(packed)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    assert spawn("generate", folder, "Hello", "--trust-remote-code", env=environment).code == 1  # it is no model
    assert (folder / "ran").exists()


def test_saving_follows_no_link_and_spares_the_text(packed: Path, text: Path, kbitq: Kbitq, tmp_path: Path) -> None:
    results, elsewhere = packed / "quantization_evaluation.json", tmp_path / "elsewhere"
    results.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = kbitq("eval", packed, "--text", results, "--window", 16, "--save")
    assert (done.code, f"{results} is read and must not change" in done.err) == (1, True)
    readme = packed / "README.md"
    done = kbitq("eval", packed, "--text", readme, "--window", 16, "--save")
    assert (done.code, f"{readme} is read and must not change" in done.err) == (1, True)
    results.unlink()
    elsewhere.write_text("precious")
    results.symlink_to(elsewhere)
    done = kbitq("eval", packed, "--text", text, "--window", 16, "--save")
    assert (done.code, f"{results} is a link" in done.err) == (1, True)
    assert elsewhere.read_text() == "precious"


WRONG = ("x", 1e308, 1 << 62, [[]], {"a": 1}, None)
FIELDS = (
    "architectures", "model_type", "hidden_size", "vocab_size", "dtype", "eos_token_id", "rope_parameters",
    "hidden_act", "quantization_config",
)  # fmt: skip
OF_QUANTIZATION = (
    "k", "dtype", "overrides", "shapes", "modules_to_not_convert", "block_size", "scale_format", "format_version",
    "quant_method", "dtypes",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers warns of what it finds in the config
@pytest.mark.parametrize("field", [*FIELDS, *(f"quantization_config.{name}" for name in OF_QUANTIZATION)])
def test_a_config_of_no_sense(field: str, packed: Path, text: Path, kbitq: Kbitq) -> None:
    usual = json.loads((packed / "config.json").read_text())
    for i, value in enumerate(WRONG):
        config = json.loads(json.dumps(usual))
        *above, last = field.split(".")
        (config[above[0]] if above else config)[last] = value
        (packed / "config.json").write_text(json.dumps(config))
        if i % 2:
            check_sentence(kbitq("generate", packed, "x", "--max-tokens", 1))
        else:
            check_sentence(kbitq("eval", packed, "--text", text, "--window", 16, "--windows", 1))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_deeply_nested_files(file: str, packed: Path, text: Path, kbitq: Kbitq) -> None:
    for deep in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "null", "[]", "5"):
        (packed / file).write_text(deep)
        check_sentence(kbitq("generate", packed, "x", "--max-tokens", 1))
        check_sentence(kbitq("eval", packed, "--text", text, "--window", 16, "--windows", 1))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([""], "empty"),
        (["\ud800"], "Unicode"),
        (["a\udc80"], "Unicode"),
        (["x", "--seed", 1 << 64], "64 bits"),
        (["x", "--seed", -(1 << 63) - 1], "64 bits"),
        (["x", "--temperature", "inf"], "number from 0"),
        (["x", "--temperature", "1e-308"], "cannot generate"),
    ],
)
def test_prompts_and_seeds_of_no_sense(given: list[object], says: str, packed: Path, kbitq: Kbitq) -> None:
    result = kbitq("generate", packed, *given, "--max-tokens", 2)
    assert result.code == 1
    assert says in result.err
    check_sentence(result)


@pytest.mark.parametrize("seed", [-(1 << 63), -1, (1 << 64) - 1])
def test_any_seed_of_64_bits(seed: int, packed: Path, kbitq: Kbitq) -> None:
    assert kbitq("generate", packed, "x", "--seed", seed, "--temperature", 1, "--max-tokens", 2).code == 0


def test_a_loss_beyond_float64(packed: Path) -> None:
    from kbitq.eval.perplexity import evaluate

    class Sure(torch.nn.Module):
        """Of token 0, and of nothing else."""

        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor) -> object:
            logits = torch.zeros(*input_ids.shape, 4)
            logits[..., 0] = 1e5
            return type("Output", (), {"logits": logits})

    assert evaluate(Sure(), torch.ones((2, 8), dtype=torch.int64)).perplexity == float("inf")
