"""Signals, sent to real processes: the first is an orderly end with a sentence, the second ends the process at once."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import fresh
from helpers.checkpoints import save_random
from helpers.fake_hub import FakeHub, hosting
from helpers.program import Kbitq
from kbitq.checkpoint.output.staging import leftovers, remove_leftovers, working_folders

HEARD = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR1"]
SECONDS = 60

# Each call of a function takes a moment longer, and says by a file that it was reached.
SLOWLY = """
import importlib, pathlib, sys, time
module, _, path = {function!r}.partition(":")
*owner, name = path.split(".")
place = importlib.import_module(module)
for part in owner:
    place = getattr(place, part)
real = getattr(place, name)
def slow(*given, **more):
    pathlib.Path({marker!r}).touch()
    time.sleep({pause})
    return real(*given, **more)
setattr(place, name, slow)
{extra}
from kbitq.cli.main import run
sys.exit(run())
"""
HINTS = {
    "calibrate": [
        "hint: nothing is under the final name yet; "
        "run again, and a model that is run layer by layer goes on where it was"
    ]
}
AT_EVERY_TILE = "from kbitq.checkpoint.passes import journal; journal.SYNC_SECONDS = 0.0"
READ, FORWARD = "kbitq.checkpoint.source.tile_reader:TileReader.read_into", "torch.nn:Module.__call__"


class Running:
    """A command in a process of its own, in the middle of its work."""

    def __init__(
        self, folder: Path, function: str, *arguments: object, pause: float = 0.05, extra: str = "", **env: str
    ):
        marker = folder / "reached"
        marker.unlink(missing_ok=True)
        code = SLOWLY.format(function=function, marker=str(marker), pause=pause, extra=extra)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err, Path(os.devnull).open() as nothing:
            self.process = fresh.Process(
                ("-c", code, *map(str, arguments)), (nothing.fileno(), out.fileno(), err.fileno()), folder,
                {**os.environ, **env},
            )  # fmt: skip
        deadline = time.monotonic() + SECONDS
        while not marker.exists():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def send(self, name: str) -> None:
        os.kill(self.process.pid, getattr(signal, name))

    def said(self) -> tuple[str, list[str]]:
        """Stdout, and the lines of stderr that are not about progress."""
        lines = self._err.read_text().splitlines()
        return self._out.read_text(), [line for line in lines if not line.startswith(("note: ", "quantizing: "))]

    def ended(self) -> tuple[int, list[str]]:
        code = self.process.wait(SECONDS)
        return code, self.said()[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Enough tensors that reading them slowly takes seconds."""
    return save_random(tmp_path / "source.safetensors", {f"layers.{i}.up.weight": (128, 64) for i in range(200)})


@pytest.fixture
def made(source: Path, kbitq: Kbitq) -> Path:
    out = source.with_name("made.safetensors")
    assert kbitq("quantize", source, "--k", 3, "-o", out, "-q").code == 0
    return out


def by(name: str) -> str:
    return "" if name == "SIGINT" else f" by {name}"


@pytest.mark.parametrize("name", HEARD)
def test_quantize_ends_in_order(name: str, source: Path, tmp_path: Path) -> None:
    """That it goes on from there to the same bytes is in test_terminal.py."""
    out, function = tmp_path / "out.safetensors", "kbitq.checkpoint.passes.shard_writer:ShardWriter.write"
    running = Running(tmp_path, function, "quantize", source, "--k", 3, "-o", out, extra=AT_EVERY_TILE)
    running.send(name)
    code, err = running.ended()
    assert code == 128 + getattr(signal, name)
    assert err == [
        f"error: interrupted{by(name)}",
        "hint: nothing is under the final name yet; run again, the same quantize goes on from where it was",
    ]
    assert running.said()[0] == ""
    assert not out.exists()
    assert (tmp_path / ".out.safetensors.kbitq-partial" / "journal").stat().st_size > 0


@pytest.mark.parametrize(
    ("command", "name"),
    [("dequantize", "SIGINT"), ("dequantize", "SIGHUP"), ("verify", "SIGTERM"), ("verify", "SIGQUIT"),
     ("inspect", "SIGTERM"), ("plan", "SIGINT")],
)  # fmt: skip
def test_the_others_end_with_a_sentence(command: str, name: str, source: Path, made: Path, tmp_path: Path) -> None:
    given: dict[str, list[object]] = {
        "dequantize": [made, "-o", tmp_path / "back.safetensors"],
        "verify": [made, "--source", source, "--full"],
        "inspect": [source, "--k", "3"],
        "plan": [source, "--bpw", 3.5],
    }
    before = sorted(p.name for p in tmp_path.iterdir())
    running = Running(tmp_path, READ, command, *given[command])
    running.send(name)
    code, err = running.ended()
    assert code == 128 + getattr(signal, name)
    assert err[0] == f"error: interrupted{by(name)}"
    assert len(err) == (2 if command == "dequantize" else 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "reached", "stdout", "stderr"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from helpers.small_models import make_model, save_with_tokenizer

    return save_with_tokenizer(make_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"), [("eval", "SIGTERM"), ("eval", "SIGINT"), ("generate", "SIGUSR1"), ("calibrate", "SIGINT")]
)
def test_running_a_model_ends_with_a_sentence(command: str, name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    given = {
        "eval": ("--text", "text.txt", "--window", 16),
        "generate": ("Hello", "--max-tokens", 40),
        "calibrate": ("--text", "text.txt", "--length", 16, "-o", "stats"),
    }
    running = Running(tmp_path, FORWARD, command, model, *given[command])
    running.send(name)
    code, said = running.ended()
    assert (code, said[0]) == (128 + getattr(signal, name), f"error: interrupted{by(name)}")
    assert [line for line in said[1:] if not line.startswith("running: ")] == HINTS.get(command, [])


@pytest.fixture
def hub(source: Path) -> Iterator[FakeHub]:
    with hosting("someone/some", source) as server:
        yield server


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("command", ["download", "push"])
def test_the_hub_is_left_at_once(command: str, name: str, hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """The client's threads would be waited for until they have sent or fetched their file."""
    settings = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    given: list[object] = ["verify", "someone/some"] if command == "download" else ["push", made, "me/made"]
    function = "kbitq.hub.remote:snapshot_download" if command == "download" else "huggingface_hub:HfApi.create_repo"
    in_a_thread = (
        "def slow_thread(*given, **more):\n"
        "    from concurrent.futures import ThreadPoolExecutor\n"
        "    with ThreadPoolExecutor() as pool:\n"
        "        return pool.submit(slow, *given, **more).result()\n"
        "setattr(place, name, slow_thread)"
    )
    running = Running(tmp_path, function, *given, pause=SECONDS, extra=in_a_thread, **settings)
    sent = time.monotonic()
    running.send(name)
    code, err = running.ended()
    assert time.monotonic() - sent < 10
    assert code == 128 + getattr(signal, name)
    assert err[0] == f"error: interrupted{by(name)}"
    assert err[1].startswith("hint: ")
    assert len(err) == 2


STUBBORN = """
from kbitq.checkpoint.output.staging import Staging
def clean_up_for_ever(*_):
    pathlib.Path("cleaning").touch()
    while True:
        sum(range(10**7))
Staging.__exit__ = clean_up_for_ever
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_second_ends_at_once(name: str, source: Path, tmp_path: Path) -> None:
    running = Running(tmp_path, READ, "quantize", source, "--k", 3, extra=STUBBORN)
    running.send(name)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "cleaning").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)
    running.send("SIGTERM")
    assert running.ended() == (128 + signal.SIGTERM, ["error: ended at once by SIGTERM"])


def test_a_repeated_sigxcpu_is_no_second_request(source: Path, tmp_path: Path) -> None:
    """The system sends it every second from the limit on."""
    running = Running(tmp_path, READ, "quantize", source, "--k", 3, extra=STUBBORN)
    running.send("SIGXCPU")
    while not (tmp_path / "cleaning").exists():
        time.sleep(0.01)
    for name in ("SIGXCPU", "SIGXCPU", "SIGUSR1"):
        time.sleep(0.3)
        running.send(name)
    assert running.ended() == (128 + signal.SIGUSR1, ["error: ended at once by SIGUSR1"])


def test_two_at_a_time_are_one_request(source: Path, tmp_path: Path) -> None:
    """``timeout`` sends its signal to the process and to its group."""
    running = Running(tmp_path, READ, "quantize", source, "--k", 3)
    running.send("SIGTERM")
    running.send("SIGTERM")
    code, err = running.ended()
    assert (code, err[0]) == (143, "error: interrupted by SIGTERM")


def test_what_was_ignored_stays_ignored(source: Path, tmp_path: Path) -> None:
    """``nohup kbitq quantize ...`` outlives its terminal."""
    out = tmp_path / "out.safetensors"
    early = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    running = Running(tmp_path, READ, "quantize", source, "--k", 3, "-o", out, "-q", pause=0.002, extra=early)
    running.send("SIGHUP")
    assert running.ended() == (0, [])
    assert out.exists()


def test_an_exception_that_python_drops_is_raised_again(source: Path, tmp_path: Path) -> None:
    """A signal that comes while ``__del__`` runs: Python prints what is raised there and goes on."""
    extra = """
import os, signal
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass
def dropping(*given, **more):
    Dropped()
    return slow(*given, **more)
setattr(place, name, dropping)
"""
    running = Running(tmp_path, READ, "quantize", source, "--k", 3, extra=extra)
    code, err = running.ended()
    assert (code, err[0]) == (143, "error: interrupted by SIGTERM")
    assert "Traceback" not in "".join(err)


@pytest.mark.slow
def test_ctrl_c_while_modules_are_imported() -> None:
    """No traceback, from the moment that this program's own code runs."""
    for delay in (0.0, 0.05, 0.1, 0.2):
        program = (
            "import threading, os, signal, sys, time\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from kbitq.cli.main import run\n"
            f"later = lambda: (time.sleep({delay} + 0.005), os.kill(os.getpid(), signal.SIGINT))\n"
            "threading.Thread(target=later).start()\n"
            "sys.exit(run())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "env"], capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n"), delay


def test_the_terminal_is_closed(source: Path, tmp_path: Path) -> None:
    """The bar cannot be removed any more: that must not hide which signal it was."""
    primary, secondary = pty.openpty()
    code = SLOWLY.format(function=READ, marker=str(tmp_path / "reached"), pause=0.05, extra="")
    leader = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    command = ("-c", leader + code, "quantize", str(source), "--k", "3")
    process = fresh.Process(command, (secondary, secondary, secondary), tmp_path, {**os.environ, "TERM": "xterm"})
    os.close(secondary)
    while not (tmp_path / "reached").exists():
        os.read(primary, 1 << 16)
    os.close(primary)
    assert process.wait(SECONDS) == 128 + signal.SIGHUP


# --- what a cut between publishing and tidying up leaves ------------------------------------------


def cut_after(final: Path) -> tuple[Path, Path]:
    """The hidden folders as such a cut leaves them."""
    staging, replaced = working_folders(final)
    (staging / "out").mkdir(parents=True)
    (staging / "journal").write_text("{}\n")
    (staging / "lock").touch()
    replaced.mkdir()
    (replaced / "model.safetensors").write_text("old")
    return staging, replaced


def test_left_over_folders_are_said_and_removed(made: Path, source: Path, kbitq: Kbitq) -> None:
    folders = cut_after(made)
    told = kbitq("verify", made)
    assert told.code == 0
    assert all(f"left over: {folder} " in told.out for folder in folders)
    code, _, err = kbitq("quantize", source, "--k", 3, "-o", made)
    assert (code, f"{made} exists" in err) == (1, True)
    assert not any(folder.exists() for folder in folders)
    assert "left over" not in kbitq("verify", made).out


def test_dequantize_removes_them_too(made: Path, source: Path, kbitq: Kbitq) -> None:
    folders = cut_after(source)
    assert kbitq("dequantize", made, "-o", source).code == 1
    assert not any(folder.exists() for folder in folders)


def test_a_killed_dequantize_is_left_over(made: Path, kbitq: Kbitq, source: Path) -> None:
    """It has no journal, so nothing goes on from what it wrote."""
    staging, _ = working_folders(source)
    (staging / "out").mkdir(parents=True)
    (staging / "out" / "source.safetensors").write_text("half")
    (staging / "lock").touch()
    assert leftovers(source) == [staging]
    assert kbitq("dequantize", made, "-o", source).code == 1
    assert not staging.exists()


Keep = Callable[[Path], object]


@pytest.mark.parametrize(
    "keep",
    [
        lambda staging: (staging / "out" / "model.safetensors").write_text("half"),
        lambda staging: (staging / "spool").write_text("fetched"),
        lambda staging: [(staging / "journal").unlink(), (staging / "parts").mkdir(), (staging / "out" / "a").touch()],
    ],
)
def test_work_to_go_on_from_is_not_left_over(keep: Keep, made: Path) -> None:
    staging, replaced = cut_after(made)
    keep(staging)
    assert leftovers(made) == [replaced]


def test_a_run_at_work_is_left_alone(made: Path) -> None:
    import fcntl

    staging, _ = cut_after(made)
    with (staging / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert leftovers(made) == []
        remove_leftovers(made)
        assert staging.exists()
    assert leftovers(made)


def test_an_output_that_waits_is_said(made: Path, kbitq: Kbitq) -> None:
    """Cut between giving the old output another name and giving the new one its own."""
    _, replaced = cut_after(made)
    made.unlink()
    code, _, err = kbitq("verify", made)
    assert (code, f"the earlier output is {replaced}" in err) == (1, True)


def test_nothing_is_left_over_without_an_output(made: Path) -> None:
    cut_after(made)
    made.unlink()
    assert leftovers(made) == []
