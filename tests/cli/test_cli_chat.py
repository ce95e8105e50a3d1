"""``kbitq chat``, and ``generate --chat``: lines in, answers out, and Ctrl-C that stops an answer."""

import io
import json
import os
import signal
from pathlib import Path

import pytest

from helpers.fresh import Process, run
from helpers.program import PROGRAM, Kbitq
from helpers.small_models import llama_config, save_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model without a chat template, packed."""
    import torch
    from transformers import LlamaForCausalLM

    from kbitq.checkpoint import QuantizeOptions, plan_quantize
    from kbitq.checkpoint import run as quantize

    torch.manual_seed(0)
    plain = tmp_path_factory.mktemp("models") / "plain"
    config = llama_config(vocab_size=97, num_hidden_layers=1, max_position_embeddings=2048, eos_token_id=0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
    save_tokenizer(plain)
    quantize(plan_quantize(plain, plain.with_name("k3"), QuantizeOptions(k=3)))
    return plain.with_name("k3")


@pytest.fixture
def instructed(base: Path, tmp_path: Path) -> Path:
    """The same with a chat template."""
    folder = tmp_path / "instructed"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    own = folder / "tokenizer_config.json"
    settings = json.loads(own.read_text())
    own.unlink()
    own.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def test_a_conversation(instructed: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n\n/clear\nHello\n/exit\nnot read\n"))
    code, out, err = kbitq("chat", instructed, "--max-tokens", 8, "--temperature", 0, "--system", "Be brief.")
    assert code == 0, err
    first, second, third = out.splitlines()
    assert first == third != second
    assert [line.split(",")[0] for line in err.splitlines()] == ["note: 8 tokens"] * 3
    assert err.count("tokens/s after") == 3
    alone = kbitq("generate", instructed, "Hello", "--chat", "--system", "Be brief.", "--max-tokens", 8, "--quiet")
    assert alone == (0, first + "\n", "")


def test_a_base_model_is_said(base: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two lines\\\nare one message\n"))
    code, out, err = kbitq("chat", base, "--max-tokens", 4, "--temperature", 0)
    assert code == 0
    assert err.startswith("note: the tokenizer has no chat template: a base model")
    assert err.count("tokens/s") == 1
    code, out, err = kbitq("generate", base, "Hello", "--chat")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "error: the tokenizer has no chat template"
    assert "leave --chat away" in err
    assert kbitq("generate", base, "Hello", "--system", "x").code == 2


def test_a_message_that_fails_does_not_end_it(base: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 3000 + "\nHello\n"))
    code, out, err = kbitq("chat", base, "--max-tokens", 4, "--quiet")
    assert (code, len(out.splitlines())) == (0, 1)
    assert err.startswith("error: the message has 3,")


def test_ctrl_c_stops_an_answer_only(instructed: Path, tmp_path: Path) -> None:
    answers, asked = os.pipe(), os.pipe()
    with (
        (tmp_path / "err").open("w+b") as err,
        os.fdopen(answers[0], "rb", 0) as out,
        os.fdopen(asked[1], "wb", 0) as ask,
    ):
        given = ("chat", str(instructed), "--max-tokens", "1900", "--temperature", "0")
        process = Process((*PROGRAM[1:], *given), (asked[0], answers[1], err.fileno()))
        os.close(asked[0])
        os.close(answers[1])
        for _ in range(3):  # the third would end the program at once, if each were not a part's
            ask.write(b"Hello\n")
            assert out.read(1) not in (b"", b"\n")
            os.kill(process.pid, signal.SIGINT)
            while out.read(1) not in (b"", b"\n"):
                pass
        ask.close()
        assert process.wait() == 0
        err.seek(0)
        assert err.read().decode() == "note: stopped\n" * 3


PARTS = """
import os, signal, time
from kbitq.cli.signals import Signals, in_parts
with Signals(own_process=True) as signals:
    signals.unwind()
    for expected in range(3):
        with in_parts():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            except KeyboardInterrupt:
                print("part", flush=True)
            time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
"""


def test_after_the_parts_ctrl_c_ends_the_program() -> None:
    done = run("-c", PARTS)
    assert done.stdout == "part\n" * 3
    assert done.stderr.endswith("KeyboardInterrupt\n")
