"""The rules of CONTRIBUTING.md that a machine can check: sizes of files, docstrings, documents that name everything."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("kbitq", "cli", "csrc", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu", ".js", ".css")
)
MODULES = [p for p in SOURCES if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("kbitq", "cli")]

# Public functions and classes without a docstring, as file:name. The list may only shrink.
SILENT: set[str] = set()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_stay_under_400_lines() -> None:
    long = {relative(path) for path in SOURCES if len(path.read_text().splitlines()) >= 400}
    assert long == set()


def silent(path: Path) -> list[str]:
    """Public functions and classes of a file that say nothing."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [n for n in ast.parse(path.read_text()).body if isinstance(n, kinds) and not n.name.startswith("_")]
    return [f"{relative(path)}:{node.name}" for node in public if ast.get_docstring(node) is None]


def test_public_functions_have_docstrings() -> None:
    assert {name for path in MODULES if path.name != "_C.pyi" for name in silent(path)} == SILENT


def test_the_check_of_docstrings_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "a.py").write_text('def f(): pass\ndef _g(): pass\ndef h():\n    "H."\nclass C: pass\n')
    assert silent(tmp_path / "a.py") == ["a.py:f", "a.py:C"]


def test_every_module_is_named_in_the_map() -> None:
    """docs/design.md: a folder's __init__ is named by the folder, the others by their stem."""
    words = set(re.findall(r"[\w.]+", (ROOT / "docs/design.md").read_text()))
    names = {(path.parent.name if path.stem == "__init__" else path.stem): relative(path) for path in MODULES}
    assert {file for name, file in names.items() if name not in words and f"{name}.py" not in words} == set()


def test_every_option_is_in_docs_cli() -> None:
    from kbitq.cli.app import app

    page = (ROOT / "docs/cli.md").read_text()
    missing = []
    for command, made in typer.main.get_command(app).commands.items():
        assert f"kbitq {command}" in page, command
        for parameter in made.params:
            flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("-")]
            if flags and not any(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", page) for flag in flags):
                missing.append(f"{command} {flags[0]}")
    assert missing == []


def test_every_variable_of_the_environment_is_documented() -> None:
    """KBITQ_...: in CONTRIBUTING.md or docs/, wherever it is read."""
    pages = "".join(p.read_text() for p in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
    read = {name for path in MODULES for name in re.findall(r'environ[^\n]*"(KBITQ_\w+)"', path.read_text())}
    assert {name for name in read if name not in pages} == set()


FACE = ("kbitq", "kbitq.ops", "kbitq.nn", "kbitq.checkpoint", "kbitq.hub", "kbitq.functional", "kbitq.format")


def callables(face: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(name, what is called, what is said of it) of a module's functions, of its classes, and of their methods."""
    module = importlib.import_module(face)
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
        for method in vars(found).values() if inspect.isclass(found) else ():
            function = getattr(method, "__func__", method)
            if inspect.isfunction(function) and function.__name__ == "__init__":
                yield name, function, inspect.getdoc(found) or ""
            elif inspect.isfunction(function) and not function.__name__.startswith("_"):
                yield f"{name}.{function.__name__}", function, inspect.getdoc(function) or ""


@pytest.mark.parametrize("face", FACE)
def test_what_takes_three_arguments_says_each(face: str) -> None:
    checked, silent = 0, []
    for name, function, told in callables(face):
        arguments = [a for a in inspect.signature(function).parameters if a not in ("self", "cls", "_")]
        checked += len(arguments) >= 3
        unsaid = [a for a in arguments if not re.search(rf"\b{a}\b", told)] if len(arguments) >= 3 else []
        silent += [f"{name}: {a}" for a in unsaid]
    assert checked and silent == []
