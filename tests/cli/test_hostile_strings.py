"""Strings of a hostile checkpoint, in every field that has one: no command lets them reach the terminal raw."""

import copy
import json
import os
import pty
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import fresh
from helpers.program import PROGRAM, Kbitq, Result, tiny_tensors
from kbitq import checkpoint
from kbitq.card import Subject, model_card
from kbitq.text_safety import printable

UP_PROJ = "model.layers.0.mlp.up_proj.weight"
PAYLOADS = (
    "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x9b31m", "\x1b]8;;http://x\x1b\\link", "a\rb", "a\b\b",
    "a\nok is as it should be",
    "\u202edrow", "\u2028\u2029", "\x00", "\x7f", "</script><img src=x onerror=alert(1)>", "[red]x[/red]", "{{7*7}}",
    "|x|`y`[z](javascript:1)", "```\n# heading\n",
)  # fmt: skip
Fields = dict[str, str]


def written(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def hostile(made: Path, folder: Path, strings: Callable[[str], str]) -> None:
    """``made``, a quantized folder, again at ``folder``, with ``strings(field)`` put into each of its fields."""
    raw = (made / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    meta = json.loads(header["__metadata__"]["kbitq"])
    names = {name: name + strings("name") for name in (*meta["tensors"], *meta["kept"])}

    def renamed(name: str) -> str:
        stem = max((n for n in names if name.startswith(n)), key=len, default=None)
        return name if stem is None else names[stem] + name[len(stem) :]

    for entry in meta["tensors"].values():
        for key in ("scale", "codebook", "importance"):
            entry[key] = strings(key)
    meta["tensors"] = {renamed(name): entry for name, entry in meta["tensors"].items()}
    meta["kept"] = {renamed(name): strings("reason") for name in meta["kept"]}
    meta[strings("key of metadata")] = strings("value of metadata")
    header = {renamed(name): entry for name, entry in header.items()}
    header["__metadata__"] = {"kbitq": json.dumps(meta), strings("key"): strings("value")}
    folder.mkdir()
    written(folder / "model.safetensors", header, data)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [strings("module")]
    config["quantization_config"]["overrides"] = {strings("override"): {"k": 3}}
    config["model_type"] = config["architectures"] = strings("model type")
    (folder / "config.json").write_text(json.dumps(config))
    report = json.loads((made / "quantization_report.json").read_text())
    report["options"] = {strings("option"): strings("option's value"), "include": [strings("pattern")]}
    for row in report["tensors"]:
        row.update({key: strings(key) for key in ("name", "scale", "codebook", "reason", "dtype")})
    (folder / "quantization_report.json").write_text(json.dumps(report))
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {strings('file')}\n")
    name = strings("file").replace("/", "").replace("\0", "")
    (folder / f"note{name}.txt").write_text("")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and its quantization, both folders."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("made")
    (folder / "source").mkdir()
    save_file(tiny_tensors(), folder / "source" / "model.safetensors")
    (folder / "source" / "config.json").write_text("{}")
    plan = checkpoint.plan_quantize(folder / "source", folder / "quantized", checkpoint.QuantizeOptions(k=3))
    checkpoint.run(plan)
    return folder


def commands(folder: Path, source: Path, out: Path) -> list[list[object]]:
    return [
        ["inspect", folder], ["inspect", folder, "--by", "role"], ["inspect", folder, "--by", "layer", "--worst", 1],
        ["inspect", folder, "--histograms"], ["inspect", folder, "--diff", source.parent / "quantized"],
        ["inspect", folder, "--against", source], ["inspect", folder, "--json"], ["verify", folder],
        ["verify", folder, "--source", source, "--full"], ["verify", folder, "--json"],
        ["dequantize", folder, "-o", out / "back"], ["plan", out / "back", "--k", 2], ["inspect", out / "back"],
        ["quantize", out / "back", "--k", 2, "-o", out / "again"], ["quantize", folder, "--k", 3],
        ["quantize", out / "back", "--k", 2, "--exclude", "*.0.*", "-o", out / "third", "--json"],
        ["eval", folder, "--text", folder / "config.json"], ["generate", folder, "x"], ["push", folder, "a/b"],
    ]  # fmt: skip


def unsafe(text: str, keep: str = "\n") -> set[str]:
    return {c for c in text if not c.isprintable() and c not in keep and unicodedata.category(c) != "Zs"}


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.sampled_from(PAYLOADS), min_size=12, max_size=12, unique=True))
def test_no_command_prints_them_raw(
    payloads: list[str], made: Path, kbitq: Kbitq, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    turn = iter(range(1 << 30))
    hostile(made / "quantized", place / "model", lambda _: payloads[next(turn) % len(payloads)])
    for command in commands(place / "model", made / "source", place):
        done: Result = kbitq(*command)
        assert unsafe(done.out + done.err) == set(), command
        assert "Traceback" not in done.err
        assert "internal error" not in done.err, command
        assert "ok is as it should be" not in (done.out + done.err).splitlines()


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--by", "role"], ["verify"]])
def test_nor_on_a_terminal(command: list[str], made: Path, tmp_path: Path) -> None:
    hostile(made / "quantized", tmp_path / "model", lambda _: "\x1b]0;title\x07\x1b[2J\x9b31m\u202e")
    primary, secondary = pty.openpty()
    arguments = (*PROGRAM[1:], command[0], str(tmp_path / "model"), *command[1:])
    process = fresh.Process(arguments, (secondary, secondary, secondary), env={**os.environ, "TERM": "xterm"})
    os.close(secondary)
    shown = b""
    try:
        while piece := os.read(primary, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(primary)
    assert process.wait() in (0, 1)
    plain = re.sub(r"\x1b\[[0-9;?]*[mKAl h]", "", shown.decode())  # rich's own: colours, and those of the bar
    assert unsafe(plain, keep="\n\r") == set()
    assert "\x1b[2J" not in shown.decode()
    assert command == ["verify"] or "\\x1b]0;title" in re.sub(r"\s", "", plain)


def test_nor_the_page(made: Path, kbitq: Kbitq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("vl_convert")
    from kbitq.report import html

    libraries = html._libraries()
    monkeypatch.setattr(html, "_libraries", lambda: (libraries[0], ""))  # not the megabyte of Vega-Lite
    turn = iter(range(1 << 30))
    plain = tmp_path / "plain.html"
    assert kbitq("inspect", made / "quantized", "--html", plain).code == 0
    hostile(made / "quantized", tmp_path / "model", lambda _: PAYLOADS[next(turn) % len(PAYLOADS)])
    assert kbitq("inspect", tmp_path / "model", "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert unsafe(page) == set()
    assert "onerror=alert" in page  # as text
    elements = [re.findall(r"<[/a-z!]+", text) for text in (page, plain.read_text())]
    assert set(elements[0]) == set(elements[1])
    assert elements[0].count("<script") == elements[1].count("<script")


def test_nor_the_card(made: Path) -> None:
    rows = []
    for i, payload in enumerate(PAYLOADS):
        rows.append({"name": f"layers.{i}.mlp{payload}", "verdict": "quantized", "k": 3, "scale": payload,
                     "codebook": payload, "sqnr_db": 15.0, "reason": payload})  # fmt: skip
    report = {"totals": {"sqnr_db": 15.0, "bits_per_weight": 3.25}, "tensors": rows}
    report["options"] = {"include": ["```\n<b>"]}
    card = model_card(Subject(report, "x" + PAYLOADS[-1]), title="x" + PAYLOADS[-1], place="a/b")
    assert unsafe(card) == set()
    fence = re.search(r"^(`{4,})bash\n(.*?)\n\1$", card, re.MULTILINE | re.DOTALL)
    assert fence is not None, card
    outside = card.replace(fence[0], "")
    assert not set("<>") & set(outside)
    assert "javascript:1" in outside
    assert "[z](" not in outside
    assert "# heading" not in outside.splitlines()
    row = next(line for line in outside.splitlines() if line.startswith("| Codebook"))
    assert row.count("|") - row.count("\\|") == 3


def test_an_error_is_safe_for_those_who_print_it(tmp_path: Path, made: Path) -> None:
    folder = tmp_path / "model"
    hostile(made / "quantized", folder, lambda _: "\x1b[2J\n")
    report = checkpoint.verify(folder, made / "source", full=True)
    assert report.problems
    assert not [p for p in report.problems if unsafe(p, keep="")]
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw.replace(b'"U8"', b'"I8"', 1))
    with pytest.raises(checkpoint_error()) as caught:
        checkpoint.load_file(folder)
    assert unsafe(str(caught.value), keep="") == set()


def checkpoint_error() -> type[Exception]:
    from kbitq.errors import KbitqError

    return KbitqError


def test_rows_stay_one_row_each(made: Path, kbitq: Kbitq, tmp_path: Path) -> None:
    """A line end in a name does not make a row of its own."""
    usual = len(kbitq("inspect", made / "quantized").out.splitlines())
    hostile(made / "quantized", tmp_path / "model", lambda field: "\nx" if field == "name" else copy.copy(field))
    assert len(kbitq("inspect", tmp_path / "model").out.splitlines()) <= usual + 1
    assert printable("\nx") in kbitq("inspect", tmp_path / "model").out
