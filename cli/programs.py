"""Other Python programs, run in this process: found by name as a shell or ``python`` would, and started as their own.

Standard library only: what the program does not need must not be loaded before it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbitq.errors import KbitqError


@dataclass(frozen=True)
class Program:
    """A program that was found. To call it is to run it: what it raises, ``SystemExit`` included, is its own.

    Attributes:
        name: what it finds in ``sys.argv[0]``.
        arguments: the rest of ``sys.argv``.
        path: the first entry of ``sys.path``, as ``python`` sets it; None leaves the entry that is there.
        start: runs its code and returns what it returned: an exit code, or None.
    """

    name: str
    arguments: tuple[str, ...]
    path: str | None
    start: Callable[[], Any]

    def __call__(self) -> int:
        sys.argv[:] = [self.name, *self.arguments]
        if self.path is not None and not getattr(sys.flags, "safe_path", False):
            sys.path[0] = self.path
        sys.exit(self.start())  # as the script that pip writes


def find(name: str, arguments: Sequence[str], *, module: bool = False) -> Program:
    """The program that a name stands for: a file, a command of a package in this environment, or a module.

    Args:
        name: ``train.py`` or another path, ``lm_eval``; with ``module`` a dotted name, as after ``python -m``.
        arguments: its own.
        module: it is a module.

    Raises:
        KbitqError: there is no such program.
    """
    given = tuple(arguments)
    if module:
        return _module(name, given)
    if name.endswith(".py") or os.sep in name:
        return _file(name, given)
    commands = list(importlib.metadata.entry_points(group="console_scripts", name=name))
    if commands:
        return Program(_script(name) or name, given, None, lambda: commands[0].load()())
    if (script := _script(name)) and _is_python(script):
        return Program(script, given, str(Path(script).parent), lambda: _without_result(script))
    raise _not_found(name)


def _module(name: str, arguments: tuple[str, ...]) -> Program:
    here = str(Path.cwd())
    sys.path.insert(0, here)  # where ``python -m`` looks first
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove(here)
    if found is None:
        raise KbitqError(f"there is no Python module {name!r}", hint=_install(name.partition(".")[0]))

    def start() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return Program(name, arguments, here, start)


def _file(name: str, arguments: tuple[str, ...]) -> Program:
    if not Path(name).exists():
        raise KbitqError(f"{name}: no such file", hint="check the spelling of the path")
    folder = name if Path(name).is_dir() else str(Path(name).resolve().parent)
    return Program(name, arguments, folder, lambda: _without_result(name))


def _without_result(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def _script(name: str) -> str | None:
    """The file of this environment that a shell would start."""
    path = Path(sysconfig.get_path("scripts"), name)
    return str(path) if path.is_file() else None


def _is_python(path: str) -> bool:
    with Path(path).open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"#!") and b"python" in first


def _not_found(name: str) -> KbitqError:
    elsewhere = shutil.which(name)
    if elsewhere is not None:
        sentence = f"{elsewhere} is no program of the Python environment that kbitq is in ({sys.prefix})"
        return KbitqError(sentence, hint=f"if it is written in Python, install it there: {_install(name)}")
    if name.isidentifier() and importlib.util.find_spec(name) is not None:
        return KbitqError(f"there is no program {name!r}, but a module of that name", hint=f"kbitq run -m {name}")
    return KbitqError(f"there is no program {name!r} in the Python environment that kbitq is in", hint=_install(name))


def _install(name: str) -> str:
    return f"{sys.executable} -m pip install {name}"
