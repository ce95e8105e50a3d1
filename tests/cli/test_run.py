"""``kbitq run``: another program in this process, as if it had been started by itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.fresh import Process, run
from helpers.program import PROGRAM, Kbitq, spawn

ECHO = """
import signal, sys
print(__name__, sys.argv, sys.path[0], sys.stdin.read())
print([signal.getsignal(n) for n in (2, 15)] == [signal.default_int_handler, signal.SIG_DFL], sys.stdout.errors)
sys.exit(7)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A program that shows what it was given."""
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def test_a_file(echo: Path) -> None:
    code, out, err = spawn("run", "--debug", echo, "--help", "-k", "3", "--", "x", cwd=echo.parent)
    assert (code, err) == (7, "")
    given = [str(echo), "--help", "-k", "3", "--", "x"]
    assert out == f"__main__ {given} {echo.parent} \nTrue {sys.__stdout__.errors}\n"


def test_from_the_start_of_the_program(echo: Path) -> None:
    """The handler that the start sets before any import is not what the program finds."""
    done = run("-m", "kbitq.cli.start", "run", echo)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[1].startswith("True ")


def test_a_module(echo: Path) -> None:
    code, out, err = spawn("run", "-m", "echo", "a", cwd=echo.parent)
    assert (code, err) == (7, "")
    assert out.startswith(f"__main__ {[str(echo), 'a']} {echo.parent} \nTrue ")


def test_a_command_of_a_package() -> None:
    code, out, err = spawn("run", "pytest", "--version")
    assert (code, err) == (0, "")
    assert out == f"pytest {pytest.__version__}\n"


def test_errors_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise OSError(28, 'of its own')")
    code, out, err = spawn("run", tmp_path / "fails.py")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.endswith("OSError: [Errno 28] of its own\n")
    (tmp_path / "says.py").write_text("import sys; sys.exit('a sentence')")
    assert spawn("run", tmp_path / "says.py") == (1, "", "a sentence\n")


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        (("nothing_of_this_name",), "there is no program 'nothing_of_this_name'", "pip install nothing_of_this_name"),
        (("-m", "no_module.at_all"), "there is no Python module 'no_module.at_all'", "pip install no_module"),
        (("nowhere/at_all.py",), "nowhere/at_all.py: no such file", "spelling"),
        (("timeit",), "a module of that name", "kbitq run -m timeit"),
        (("sh",), "is no program of the Python environment that kbitq is in", "install it there"),
    ],
)
def test_what_is_not_there(given: tuple[str, ...], says: str, hint: str, kbitq: Kbitq) -> None:
    code, out, err = kbitq("run", *given)
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert says in first
    assert hint in second


def test_no_program_is_a_usage_error(kbitq: Kbitq) -> None:
    assert kbitq("run").code == 2
    assert kbitq("run", "--nothing", "x").code == 2


WAITS = """
import signal, sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(5)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_are_the_programs(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    read, write = os.pipe()
    with (tmp_path / "err").open("w+b") as err, Path(os.devnull).open() as nothing, os.fdopen(read) as out:
        arguments = (*PROGRAM[1:], "run", str(tmp_path / "waits.py"))
        process = Process(arguments, (nothing.fileno(), write, err.fileno()))
        os.close(write)
        assert out.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.wait() == code
        err.seek(0)
        assert err.read() == b""


def test_a_light_start(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(
        "import sys; print([m for m in ('torch', 'numpy', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([*PROGRAM, "run", tmp_path / "loaded.py"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


LOADS = """
import sys
from transformers import AutoModelForCausalLM
assert "kbitq.nn.linear" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""


def test_a_program_that_knows_nothing_of_kbitq_loads_a_packed_model(kbitq: Kbitq, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from helpers.small_models import make_model

    make_model("llama").save_pretrained(tmp_path / "plain")
    assert kbitq("quantize", tmp_path / "plain", "--k", 3, "-o", tmp_path / "k3", "--quiet").code == 0
    (tmp_path / "loads.py").write_text(LOADS)
    code, out, err = spawn("run", tmp_path / "loads.py", tmp_path / "k3")
    assert (code, out) == (0, "KbitLinear\n"), err
