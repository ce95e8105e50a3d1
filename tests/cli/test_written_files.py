"""No option that names a file to write may touch what is read, the output, or without --force anything that exists."""

import functools
import hashlib
import json
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from helpers.program import Kbitq, Result, tiny_tensors
from kbitq import checkpoint
from kbitq.checkpoint import estimation
from kbitq.checkpoint.output.same_place import is_or_lies_in
from kbitq.cli.commands import COMMANDS
from kbitq.cli.options import files
from kbitq.errors import CheckpointError, OutputExistsError
from kbitq.report import html

# How each command with such an option is called, on a file and on a folder.
CALLS: dict[str, tuple[list[str], list[str]]] = {
    "quantize": (
        ["single.safetensors", "--k", "3", "-o", "out.safetensors", "--importance", "importance.safetensors"],
        ["source", "--k", "4", "-o", "out", "--codebook", "levels.json"],
    ),
    "plan": (
        ["single.safetensors", "--recipe", "rules.toml", "-o", "out.safetensors"],
        ["source", "--k", "4", "-o", "out"],
    ),
    "inspect": (
        ["single-k3.safetensors", "--against", "single.safetensors"],
        ["quantized", "--diff", "single-k3.safetensors"],
    ),
}


def written_options() -> list[tuple[str, str]]:
    """(command, flag) of every option that names a file to write besides the output."""
    found = []
    for name, module in COMMANDS.items():
        for parameter, annotation in typing.get_type_hints(module.command, include_extras=True).items():
            if files.role_of(annotation) is files.WRITTEN:
                found.append((name, f"--{parameter.replace('_', '-')}"))
    return found


def test_every_path_has_a_role() -> None:
    for name, module in COMMANDS.items():
        for parameter, annotation in typing.get_type_hints(module.command, include_extras=True).items():
            kind, *notes = typing.get_args(annotation) or [annotation]
            is_path = kind is Path or Path in typing.get_args(kind)
            names_a_file = any("FILE" in (getattr(note, "metavar", None) or "") for note in notes)
            if is_path or names_a_file:
                assert files.role_of(annotation), f"{name}: say in the type of {parameter!r} what becomes of the file"


def test_all_such_options_are_tried() -> None:
    assert {"--write-recipe", "--html"} <= {flag for _, flag in written_options()}
    assert {command for command, _ in written_options()} == set(CALLS), "say in CALLS how to call the command"


def run(*arguments: str) -> Result:
    """The program in this process, its output thrown away: a fixture would not fit a test of many examples."""
    from kbitq.cli.main import run

    return Result(run(list(arguments)), "", "")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of sources, outputs and files that options name, in which the tests of this module run."""
    folder, before = tmp_path_factory.mktemp("house"), Path.cwd()
    scripts, html._libraries = html._libraries, lambda: (pytest.importorskip("jinja2"), "")  # nearly a megabyte
    os.chdir(folder)
    tensors = tiny_tensors()
    (folder / "source" / "more").mkdir(parents=True)
    save_file(tensors, folder / "source" / "model.safetensors")
    (folder / "source" / "config.json").write_text("{}")
    (folder / "source" / "more" / "notes.txt").write_text("notes")
    save_file(tensors, folder / "single.safetensors")
    columns = {name: tensor[0] ** 2 for name, tensor in tensors.items() if "up_proj.weight" in name}
    save_file(columns, folder / "importance.safetensors")
    (folder / "levels.json").write_text(json.dumps([i / 8 - 1 for i in range(16)]))
    (folder / "rules.toml").write_text("k = 3\n")
    (folder / "precious.txt").write_text("precious")
    assert run("quantize", "single.safetensors", "--k", "3", "-o", "single-k3.safetensors").code == 0
    assert run("quantize", "source", "--k", "4", "-o", "quantized").code == 0
    (folder / "by-link").symlink_to(folder)
    (folder / "source-link").symlink_to("source")
    (folder / "file-link.safetensors").symlink_to("single.safetensors")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    (folder / "second-name.safetensors").hardlink_to(folder / "single.safetensors")
    (folder / "second-name-of-shard").hardlink_to(folder / "source" / "model.safetensors")
    rate, estimation._codec_rate = estimation._codec_rate, lambda *_: 1e9  # a second of work for every plan
    yield folder
    os.chdir(before)
    estimation._codec_rate = rate
    html._libraries = scripts


@functools.cache
def digest(path: Path, _changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Everything in a folder: files by digest, links by what they lead to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path.relative_to(folder).as_posix()] = f"-> {path.readlink()}"
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = digest(path, path.stat().st_mtime_ns)
        else:
            found[path.relative_to(folder).as_posix()] = "folder"
    return found


VICTIMS = (
    "single.safetensors", "single-k3.safetensors", "source", "source/model.safetensors", "source/config.json",
    "source/new.toml", "source/more/new.toml", "source/more/new/deep.toml", "quantized/config.json",
    "quantized/SHA256SUMS", "quantized/new.html", "importance.safetensors", "levels.json", "rules.toml", "precious.txt",
    "source-link", "source-link/new.toml", "source-link/config.json", "file-link.safetensors", "dangling", "circle",
    "circle/new", "second-name.safetensors", "second-name-of-shard", "out.safetensors", "out", "out/new.toml",
    ".out.kbitq-partial", ".out.kbitq-partial/out/x", ".out.kbitq-replaced", ".out.safetensors.kbitq-partial/journal",
    "OUT.safetensors", "out.", "out.safetensors .", "Out/x", "no-such-folder/new.toml", "new.toml", ".",
)  # fmt: skip
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: f"./{name}",
    lambda name: f"source/../{name}",
    lambda name: f"by-link/by-link//{name}",
    lambda name: str(Path.cwd() / name),
    lambda name: f"{name}/",
)


def restore(house: Path, before: dict[str, str], kept: dict[str, bytes]) -> None:
    """Remove what a command made, and bring back what --force allowed it to replace."""
    after = contents(house)
    for name in sorted(after.keys() - before.keys()):
        path = house / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in (name for name in kept if after.get(name) != before[name]):
        (house / name).unlink(missing_ok=True)
        (house / name).write_bytes(kept[name])


@pytest.mark.parametrize(("command", "flag"), written_options())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from((0, 1)), st.sampled_from(VICTIMS), st.sampled_from(SPELLINGS), st.booleans(), st.booleans()
)  # fmt: skip
def test_nothing_that_exists_is_touched(
    command: str,
    flag: str,
    house: Path,
    call: int,
    victim: str,
    spell: Callable[[str], str],
    force: bool,
    late: bool,
) -> None:
    before = contents(house)
    kept = {name: (house / name).read_bytes() for name, found in before.items() if len(found) == 64}
    options = [flag, spell(victim), "--quiet", *(["--force"] if force else [])]
    words = CALLS[command][call]
    code = run(command, *(words + options if late else [words[0], *options, *words[1:]])).code
    after = contents(house)
    try:
        read = [word for word in words if word in before]
        changed = {name for name in before.keys() | after.keys() if after.get(name) != before.get(name)}
        assert not [name for name in changed for r in read if name == r or name.startswith(f"{r}/")]
        assert force or not changed & before.keys()
        if code:
            assert after == before
        elif command == "quantize":
            assert checkpoint.verify(words[words.index("-o") + 1]).problems == []
    finally:
        restore(house, before, kept)


def test_a_recipe_does_not_replace_the_source(kbitq: Kbitq, tiny: Path) -> None:
    before = tiny.read_bytes()
    for force in ([], ["--force"]):
        refused = kbitq("quantize", tiny, "--k", 4, "--write-recipe", tiny, *force)
        assert refused.code == 1
        assert "is read and must not change" in refused.err
    assert tiny.read_bytes() == before
    assert list(tiny.parent.iterdir()) == [tiny]


def test_a_recipe_is_not_the_default_output(kbitq: Kbitq, tiny: Path) -> None:
    refused = kbitq("quantize", tiny, "--k", 4, "--write-recipe", tiny.with_name("tiny-kbitq-k4.safetensors"))
    assert refused.code == 1
    assert "the output" in refused.err
    assert list(tiny.parent.iterdir()) == [tiny]


def test_refused_before_a_budget_is_measured(kbitq: Kbitq, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbitq.checkpoint.allocation.choose", lambda *_: pytest.fail("measured"))
    refused = kbitq("plan", tiny, "--bpw", 4, "--write-recipe", tiny.parent / "nowhere" / "r.toml")
    assert refused.code == 1
    assert "no folder" in refused.err


def test_an_output_does_not_replace_another_input(kbitq: Kbitq, tiny: Path) -> None:
    levels = tiny.with_name("levels.safetensors")
    save_file({"levels": tiny_tensors()["lm_head.weight"][0, :8]}, levels)
    before = levels.read_bytes()
    for option in ("--codebook", "--importance"):
        refused = kbitq("quantize", tiny, "--k", 3, option, levels, "-o", levels, "--force")
        assert refused.code == 1
        assert "is read and must not change" in refused.err
    assert levels.read_bytes() == before


def test_an_existing_recipe_is_replaced_by_force_only(kbitq: Kbitq, tiny: Path) -> None:
    recipe = tiny.with_name("r.toml")
    recipe.write_text("mine")
    assert kbitq("plan", tiny, "--k", 3, "--write-recipe", recipe).code == 1
    assert recipe.read_text() == "mine"
    assert kbitq("plan", tiny, "--k", 3, "--write-recipe", recipe, "--force").code == 0
    assert "k = 3" in recipe.read_text()


def test_a_run_that_failed_leaves_no_recipe_in_its_own_way(kbitq: Kbitq, tiny: Path, tmp_path: Path) -> None:
    """The same command, run again after an interruption, is not refused because of its own recipe."""
    recipe = tmp_path / "r.toml"
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tiny)
    assert kbitq("quantize", tiny, "--k", 3, "--write-recipe", recipe).code == 1
    assert not recipe.exists()
    save_file(tiny_tensors(), tiny)
    assert kbitq("quantize", tiny, "--k", 3, "--write-recipe", recipe).code == 0
    assert recipe.exists()


def test_from_python(tiny: Path) -> None:
    plan = checkpoint.plan_quantize(tiny, None, checkpoint.QuantizeOptions(k=3))
    other = tiny.with_name("second.safetensors")
    other.hardlink_to(tiny)
    for path in (tiny, other, plan.out, plan.out.with_name(f".{plan.out.name}.kbitq-partial")):
        with pytest.raises(CheckpointError):
            checkpoint.write_recipe(plan, path)
    recipe = tiny.with_name("r.toml")
    checkpoint.write_recipe(plan, recipe)
    with pytest.raises(OutputExistsError, match="exists"):
        checkpoint.write_recipe(plan, recipe)
    assert sorted(p.name for p in tiny.parent.iterdir()) == ["r.toml", "second.safetensors", "tiny.safetensors"]


def test_a_stream_is_written_to_and_not_replaced(kbitq: Kbitq, tiny: Path) -> None:
    assert kbitq("plan", tiny, "--k", 3, "--quiet", "--write-recipe", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("path", "place", "answer"),
    [
        ("a/b", "a/b", True),
        ("a/b/c", "a/b", True),
        ("a", "a/b", False),
        ("a/bc", "a/b", False),
        ("a/x/../b", "a/b", True),
        ("A/B", "a/b", True),  # neither exists: some file systems take them for the same
        ("a/b. .", "a/b", True),
        ("a/\u00e9", "a/e\u0301", True),
        ("link/new", "real", True),
        ("real/new", "link", True),
        ("REAL", "real", False),  # both exist, and are two
    ],
)
def test_is_or_lies_in(path: str, place: str, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("real", "REAL"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    assert is_or_lies_in(path, place) == answer
