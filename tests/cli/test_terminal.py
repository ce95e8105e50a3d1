"""What only shows on a real terminal, with real signals, pipes and disks: the bar, Ctrl-C, 80 columns, a full disk."""

import fcntl
import io
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import fresh
from helpers.checkpoints import save_random
from helpers.program import PROGRAM, Kbitq, spawn
from kbitq.checkpoint import Progress
from kbitq.cli.views import progress
from kbitq.cli.views.text import size_text

COLUMNS = 80
LONG = "model.language_model.layers.{}.block_sparse_moe.experts.17.gate_and_up_projection.weight"


@pytest.fixture
def long_names(tmp_path: Path) -> Path:
    """A checkpoint whose tensor names are wider than a terminal."""
    return save_random(tmp_path / "long.safetensors", {LONG.format(i): (96, 96) for i in range(12)})


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A checkpoint that takes seconds at K=8 with the scalar code."""
    return save_random(tmp_path / "slow.safetensors", {f"layers.{i}.up.weight": (1024, 1024) for i in range(10)})


SLOWLY = {**os.environ, "KBITQ_SIMD": "scalar", "TERM": "xterm", "NO_COLOR": "1"}


def hear_sigint() -> None:
    """In the child: a shell that started pytest in the background has made it, and so the child, deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """Run on a pseudo-terminal of 80 columns; the exit code and everything that was shown on it."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    command = (*PROGRAM[1:], *(str(argument) for argument in arguments))
    environment = {**os.environ, "TERM": "xterm", **environment}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = fresh.Process(command, (secondary, secondary, secondary), env=environment)
    os.close(secondary)
    shown = b""
    while True:
        try:
            piece = os.read(primary, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(primary)
    return process.wait(), shown.decode()


def visible_lines(shown: str) -> list[str]:
    """What stays of each line: escape sequences removed, what a carriage return overwrote dropped."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")
    return [line.rpartition("\r")[2] for line in plain.split("\n")]


@pytest.mark.parametrize("command", [["inspect", "{}"], ["quantize", "{}", "--k", "3", "--dry-run"]])
def test_tables_fit_80_columns(command: list[str], long_names: Path) -> None:
    code, shown = on_terminal(*(part.format(long_names) for part in command), NO_COLOR="1")
    assert code == 0
    assert max(len(line) for line in visible_lines(shown) if str(long_names.parent) not in line) <= COLUMNS


def test_layers_can_be_told_apart_at_80_columns(long_names: Path) -> None:
    lines = visible_lines(on_terminal("inspect", long_names, NO_COLOR="1")[1])
    names = {line.split()[0] for line in lines if line.startswith("…")}
    assert len(names) == 12


def test_colour_only_where_it_is_wanted(long_names: Path) -> None:
    assert re.search(r"\x1b\[\d*;?\d*m", on_terminal("inspect", long_names)[1])
    assert not re.search(r"\x1b\[3\dm", on_terminal("inspect", long_names, NO_COLOR="1")[1])
    assert "\x1b" not in spawn("inspect", long_names).out


def test_the_bar(slow: Path) -> None:
    code, shown = on_terminal("quantize", slow, "--k", 8, KBITQ_SIMD="scalar", NO_COLOR="1")
    assert code == 0
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"quantizing .*\d+% +[\d.]+ [kMG]B/s +\S+( s)? left .*up\.weight", frames)
    assert "%" not in visible_lines(shown)[-2]
    assert max(len(line) for line in re.split(r"[\r\n]", frames) if str(slow.parent) not in line) <= COLUMNS


def test_no_bar_and_no_escape_in_a_log(slow: Path) -> None:
    done = spawn("quantize", slow, "--k", 2, "--scale", "absmax")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err


def test_lines_for_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 105.0, 106.0, 125.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log = io.StringIO()
    with progress.Lines(log, "quantizing", size_text) as lines:
        for done in (0, 10, 50, 60, 1000):
            lines.update(Progress(done * 10**6, 2_000_000_000, "w"))
    assert log.getvalue() == "quantizing: 2%, 10.0 MB/s, 3:15 left\nquantizing: 50%, 40.0 MB/s, 25 s left\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_run_again(number: signal.Signals, slow: Path) -> None:
    whole, out = slow.with_name("whole.safetensors"), slow.with_name("slow-kbitq-k8.safetensors")
    command = [*PROGRAM, "quantize", str(slow), "--k", "8"]
    with subprocess.Popen(
        command, env=SLOWLY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_sigint
    ) as process:
        deadline = time.monotonic() + 60
        while len(list(slow.parent.iterdir())) == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # into the work
        process.send_signal(number)
        said, err = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + number, "")
    error, hint = [line for line in err.splitlines() if not line.startswith("quantizing: ")]  # on a slow machine
    assert error.startswith("error: interrupted")
    assert hint.startswith("hint: ")
    assert not out.exists()
    assert spawn("quantize", slow, "--k", 8, "-q") == (0, f"{out}\n", "")
    assert spawn("quantize", slow, "--k", 8, "-q", "-o", whole).code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(slow.parent.iterdir()) == sorted([slow, out, whole])


def test_a_full_disk(slow: Path, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("unshare -rm does not work here, so no small file system can be made")
    script = 'mount -t tmpfs -o size=1m none "$1" && shift && "$@"; code=$?; ls -A "$PLACE" >&2; exit $code'
    command = [*PROGRAM, "quantize", str(slow), "--k", "3", "--scale", "absmax", "-o", str(place / "out.safetensors")]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(place), *command],
        capture_output=True, text=True, check=False, env={**os.environ, "PLACE": str(place)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "space" in done.stderr
    assert "out.safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 2  # and so the listing of the folder is empty


def test_a_file_size_limit(slow: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [*PROGRAM, "quantize", str(slow), "--k", "3", "--scale", "absmax"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert "internal error" not in done.stderr
    assert "slow-kbitq-k3" in done.stderr
    assert not slow.with_name("slow-kbitq-k3.safetensors").exists()


@pytest.mark.slow
def test_stdout_that_is_full_or_closed(tiny: Path, tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with Path("/dev/full").open("w") as full, said.open("w") as err, Path(os.devnull).open() as nothing:
        descriptors = (nothing.fileno(), full.fileno(), err.fileno())
        assert fresh.Process((*PROGRAM[1:], "inspect", str(tiny), "--json"), descriptors).wait() == 1
    assert said.read_text().startswith("error: no space left")
    piped = f"{sys.executable} -m kbitq.cli.main inspect '{tiny}' --json | true"
    done = subprocess.run(["bash", "-c", piped], stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


def test_a_path_that_is_not_utf8(kbitq: Kbitq, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.safetensors")
    save_file({"layers.0.up.weight": np.ones((64, 64), np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / name)
    done = subprocess.run([*PROGRAM, "quantize", str(tmp_path / name), "--k", "3"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf\\udce9-kbitq-k3.safetensors" in done.stdout
    assert Path(tmp_path / os.fsdecode(b"caf\xe9-kbitq-k3.safetensors")).exists()
