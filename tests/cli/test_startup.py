"""What the program does before any work: quick help, version, completion, without the heavy packages."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kbitq as library
from helpers import fresh
from helpers.program import PROGRAM, Kbitq, Result

HELP_SECONDS = 0.3
HEAVY = ("torch", "numpy", "safetensors", "huggingface_hub", "transformers")


def started(*arguments: str, **options: Any) -> Result:
    """The program started as a shell does it."""
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, **options)
    return Result(done.returncode, done.stdout, done.stderr)


def test_help_is_quick() -> None:
    def processor_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PROGRAM, "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, the best of five: the clock on the wall would measure the other tests of a busy machine.
    assert min(processor_seconds() for _ in range(5)) < HELP_SECONDS


def test_no_heavy_import_at_startup() -> None:
    code = f"import sys; import kbitq.cli.main; print([m for m in {HEAVY} + ('rich.progress',) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_little_is_imported_before_ctrl_c_is_heard() -> None:
    """Python's own handler prints a traceback: ours is in place before what takes milliseconds is imported."""
    code = "import sys; before = {*sys.modules}; import kbitq.cli.start; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"re", "json", "typing", "enum", "threading", "kbitq.errors"} & {*done.stdout.split()} == set()


INTERRUPTED = """
import os, signal, sys
from kbitq.cli import start
left = {imports}
def hook(event, given):
    global left
    left -= event == "import"
    if event == "import" and left == 0:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
sys.exit(start.run())
"""


@pytest.mark.parametrize("imports", [1, 2, 20, 60])
def test_ctrl_c_while_the_program_is_imported(imports: int) -> None:
    done = fresh.run("-c", INTERRUPTED.format(imports=imports), "--version")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_version(kbitq: Kbitq) -> None:
    assert kbitq("--version") == (0, f"kbitq {library.__version__}\n", "")


@pytest.mark.parametrize("command", ["quantize", "plan", "inspect", "dequantize", "env"])
def test_every_help_page_fits_80_columns(command: str) -> None:
    code, out, err = started(command, "-h", env={**os.environ, "COLUMNS": "80", "TERM": "dumb"})
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "Examples" in out
    assert "…" not in out


def test_no_arguments_shows_the_help(kbitq: Kbitq) -> None:
    code, out, err = kbitq()
    assert (code, err) == (2, "")
    assert "quantize" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    code, out, _ = started(
        "--show-completion", shell, env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )
    assert code == 0
    assert "_KBITQ_COMPLETE" in out


def test_completion_is_installed(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert started("--install-completion", "bash", env=environment).code == 0
    assert "kbitq" in (tmp_path / ".bashrc").read_text()


def test_completion_offers_commands_options_and_paths(tiny: Path) -> None:
    (tiny.parent / "folder").mkdir()
    (tiny.parent / "notes.txt").write_text("")

    def complete(line: str) -> str:
        extra = {"_KBITQ_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
        return started(env={**os.environ, **extra}, cwd=tiny.parent).out

    assert "dequantize" in complete("kbitq ")
    assert "--max-shard-size" in complete("kbitq quantize --max")
    assert "absmax" in complete("kbitq quantize --scale ")
    offered = complete("kbitq quantize ")
    assert "tiny.safetensors" in offered
    assert "folder/" in offered
    assert "notes.txt" not in offered
    assert f"{tiny.parent}/tiny.safetensors" in complete(f"kbitq inspect {tiny.parent}/ti")
    assert complete("kbitq inspect nowhere/ti").strip() in ("", "_files")


def test_bash_completes_file_names_by_itself(tiny: Path) -> None:
    extra = {"_KBITQ_COMPLETE": "complete_bash", "COMP_WORDS": "kbitq quantize ti", "COMP_CWORD": "2"}
    assert started(env={**os.environ, **extra}, cwd=tiny.parent).out.strip() == ""
