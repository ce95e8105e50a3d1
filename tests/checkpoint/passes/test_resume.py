"""Interrupted runs: killed, unplugged, out of space. Taken up again, they end with the very same bytes."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import RLock

import pytest
import torch

from helpers import fresh
from helpers.checkpoints import Interrupting, bytes_of, gaussian, partials, write_folder
from kbitq import QuantizedTensor, load_file
from kbitq.checkpoint import QuantizeOptions, RunReport, plan_quantize, run
from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes import journal
from kbitq.errors import CheckpointError, NoSpaceError

Quantize = Callable[..., RunReport]
SMALL_TILES = 1  # bytes of --max-memory: the smallest tiles there are


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tensors of many small tiles, one with rows longer than a tile, kept ones among them."""
    tensors = {
        "model.embed_tokens.weight": gaussian(1000, 128, seed=1),
        "model.layers.0.wide.weight": gaussian(6, 70_003, seed=2, dtype=torch.float32),
        "model.layers.0.tall.weight": gaussian(3000, 128, seed=3),
        "model.layers.1.tall.weight": gaussian(2000, 160, seed=4, dtype=torch.float64),
        "model.norm.weight": torch.ones(128),
        "model.none.weight": torch.empty(0, 3),
    }
    return write_folder(tmp_path / "model", tensors)


@pytest.fixture
def sync_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile is a point to go on from."""
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)


def options(**more: object) -> QuantizeOptions:
    return QuantizeOptions(k=3, max_memory=SMALL_TILES, max_shard_size=300_000, **more)  # type: ignore[arg-type]


def go(source: Path, out: Path, stop_after: int | None = None, **more: object) -> int:
    """Run, stopping with Ctrl-C at a progress call; returns how many calls there were."""
    progress = Interrupting(stop_after)
    run(plan_quantize(source, out, options(**more)), progress)
    return progress.calls


@pytest.mark.slow
def test_interrupted_anywhere(source: Path, tmp_path: Path, sync_always: None) -> None:
    calls = go(source, tmp_path / "whole")
    expected = bytes_of(tmp_path / "whole")
    assert len([n for n in expected if n.endswith(".safetensors")]) > 2
    for stop in random.Random(0).sample(range(1, calls + 1), 12):
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "out", stop_after=stop)
        assert not (tmp_path / "out").exists()
        go(source, tmp_path / "out")
        assert bytes_of(tmp_path / "out") == expected
        assert partials(tmp_path) == []
        shutil.rmtree(tmp_path / "out")


def test_interrupted_again_and_again(source: Path, tmp_path: Path, sync_always: None) -> None:
    go(source, tmp_path / "whole")
    runs = 0
    for _ in range(200):
        runs += 1
        try:
            go(source, tmp_path / "out", stop_after=random.Random(runs).randrange(1, 40))
            break
        except KeyboardInterrupt:
            pass
    assert runs > 2
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.slow
def test_resumed_with_other_tiles(source: Path, tmp_path: Path, sync_always: None, quantize: Quantize) -> None:
    calls = go(source, tmp_path / "whole")
    for stop in range(calls // 2, calls, 5):
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "out", stop_after=stop)
        quantize(source, tmp_path / "out", max_shard_size=300_000)  # the default, large tiles
        assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_little_is_done_twice(source: Path, tmp_path: Path, sync_always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = go(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(source, tmp_path / "out", stop_after=calls - 2)
    written = []
    real = FileWriter.write

    def write(self: FileWriter, offset: int, data: torch.Tensor | bytes) -> None:
        if self.path.suffix == ".safetensors":
            written.append(len(data))
        real(self, offset, data)

    monkeypatch.setattr(FileWriter, "write", write)
    go(source, tmp_path / "out")
    assert len(written) < 12


class Unplugged(BaseException):
    """Stands for the moment the power goes."""


class PowerCut:
    """Writes that were not synced when the power goes are lost, each of them or only some, in any order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, seed: int) -> None:
        self.left, self.random, self.lock = after, random.Random(seed), RLock()  # the journal syncs in a thread
        self.undo: dict[Path, list[tuple[int, bytes]]] = {}
        self.sizes: dict[Path, int] = {}
        write, sync, append = FileWriter.write, FileWriter.sync, journal.os.write

        def writing(file: FileWriter, offset: int, data: torch.Tensor | bytes) -> None:
            with self.lock:
                self._tick()
                raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(data, torch.Tensor) else data
                before = os.pread(file._fd, len(raw), offset)
                self.undo.setdefault(file.path, []).append((offset, before))
                write(file, offset, data)

        def syncing(file: FileWriter) -> None:
            with self.lock:
                self._tick()
                before = len(self.undo.get(file.path, ()))
            sync(file)
            with self.lock:  # what was written while it was at work may not be on the disk
                self.undo[file.path] = self.undo.get(file.path, [])[before:]

        def appending(fd: int, data: bytes) -> int:
            with self.lock:
                path = Path(f"/proc/self/fd/{fd}").readlink()
                self.sizes.setdefault(path, os.fstat(fd).st_size)
                count = append(fd, data)
                self._tick()  # between the write and its fsync
                self.sizes.pop(path)
                return count

        monkeypatch.setattr(FileWriter, "write", writing)
        monkeypatch.setattr(FileWriter, "sync", syncing)
        monkeypatch.setattr(journal.os, "write", appending)

    def _tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def lose(self) -> None:
        for path, writes in self.undo.items():
            with path.open("r+b") as file:
                for offset, before in reversed(writes):
                    if self.random.random() < 0.7:
                        file.seek(offset)
                        file.write(before)
        for path, size in self.sizes.items():
            with path.open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.truncate(self.random.randint(size, file.tell()))  # cut in the middle of a line


@pytest.mark.parametrize("seed", range(8))
def test_power_cut(source: Path, tmp_path: Path, seed: int, quantize: Quantize) -> None:
    """In a process of its own, which really dies; what it had not synced is taken back first."""
    quantize(source, tmp_path / "whole", max_shard_size=300_000)
    for attempt in range(60):
        child = os.fork()
        if child == 0:
            try:
                patch = pytest.MonkeyPatch()
                patch.setattr(journal, "SYNC_BYTES", 20_000)
                PowerCut(patch, after=random.Random(f"{seed} {attempt}").randrange(1, 120), seed=seed)
                torch.set_num_threads(1)
                go(source, tmp_path / "out")
                os._exit(0)
            except BaseException:
                os._exit(3)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        if status == 0:
            break
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


PROGRAM = """
import sys
from pathlib import Path
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.passes import journal
journal.SYNC_BYTES = 200_000
print("started", flush=True)
run(plan_quantize(sys.argv[1], sys.argv[2], QuantizeOptions(k=3, max_memory=1, max_shard_size=300_000)))
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(source: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(source, tmp_path / "whole", max_shard_size=300_000)
    chance = random.Random(1)
    for _ in range(20):
        heard, said = os.pipe()
        arguments = ("-c", PROGRAM, str(source), str(tmp_path / "out"))
        with Path(os.devnull).open() as nothing, open(heard, "rb") as pipe:  # noqa: PTH123
            child = fresh.Process(arguments, (nothing.fileno(), said, 2))
            os.close(said)
            assert pipe.readline() == b"started\n"
            try:
                child.wait(timeout=chance.uniform(0.0, 0.4))
            except subprocess.TimeoutExpired:
                child.kill()
        if (tmp_path / "out").exists():
            assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
    quantize(source, tmp_path / "out", max_shard_size=300_000)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def interrupted(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(source, tmp_path / "out", stop_after=30)
    assert partials(tmp_path) == [".out.kbitq-partial"]


def test_other_options_are_refused(source: Path, tmp_path: Path, sync_always: None, quantize: Quantize) -> None:
    interrupted(source, tmp_path)
    with pytest.raises(CheckpointError, match="unfinished output of another run: k was 3 and is now 4") as e:
        quantize(source, tmp_path / "out", k=4, max_shard_size=300_000)
    assert "force=True" in (e.value.hint or "")
    quantize(source, tmp_path / "out", k=4, max_shard_size=300_000, force=True)
    quantize(source, tmp_path / "k4", k=4, max_shard_size=300_000)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "k4")


def test_a_changed_source_is_refused(source: Path, tmp_path: Path, sync_always: None) -> None:
    interrupted(source, tmp_path)
    file = source / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors of the source has changed since"):
        go(source, tmp_path / "out")


def test_force_does_not_throw_away_the_same_run(source: Path, tmp_path: Path, sync_always: None) -> None:
    calls = go(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(source, tmp_path / "out", stop_after=calls - 2, force=True)
    progress: list[object] = []
    run(plan_quantize(source, tmp_path / "out", options(force=True)), progress.append)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncate", "flip", "garbage", "empty"])
def test_a_damaged_journal_is_read_as_far_as_it_is_whole(
    source: Path, tmp_path: Path, sync_always: None, damage: str
) -> None:
    go(source, tmp_path / "whole")
    interrupted(source, tmp_path)
    path = tmp_path / ".out.kbitq-partial" / "journal"
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[:-7]
    elif damage == "flip":
        raw[len(raw) // 2] ^= 4
    elif damage == "garbage":
        raw += b"\0" * 4096
    else:
        raw = bytearray()
    path.write_bytes(raw)
    go(source, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_stopped_when_the_output_had_its_name(
    source: Path, tmp_path: Path, quantize: Quantize, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The journal is still there and tells of files that are not: the next run must not take its word."""
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", lambda staging: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / name)
    assert partials(tmp_path) == [f".{name}.kbitq-partial"]
    first = load_file(tmp_path / name)
    quantize(source, tmp_path / name, force=True)
    again = load_file(tmp_path / name)
    assert first.keys() == again.keys()
    for key, tensor in again.items():
        want = first[key]
        same = torch.equal(tensor.packed, want.packed) if isinstance(tensor, QuantizedTensor) else tensor.equal(want)
        assert same, key


def test_files_taken_away_from_an_interrupted_run(source: Path, tmp_path: Path, sync_always: None) -> None:
    """The journal's word does not do: without the files there is nothing to go on from."""
    calls = go(source, tmp_path / "whole")
    for taken in ("out", "out/model-00002-of-00004.safetensors"):
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "out", stop_after=calls - 2)
        place = tmp_path / ".out.kbitq-partial" / taken
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        go(source, tmp_path / "out")
        assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_two_runs_on_one_output(source: Path, tmp_path: Path, quantize: Quantize) -> None:
    with (
        Staging(tmp_path / "out"),
        pytest.raises(CheckpointError, match="out is being written by another run"),
    ):
        quantize(source, tmp_path / "out")


def test_disk_full_under_way(source: Path, tmp_path: Path, sync_always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that cannot reserve room, the disk fills up late; what is there is kept and gone on from."""
    go(source, tmp_path / "whole")
    room, real = 200_000, os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        count = real(fd, data[: max(room, 1)], offset)
        room -= count
        return count

    monkeypatch.setattr("kbitq.checkpoint.output.staging.os.pwrite", pwrite)
    with pytest.raises(NoSpaceError, match="no space left to write"):
        go(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    room = 1 << 40
    go(source, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


needs_mounts = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0,
    reason="unshare -rm does not work here, so no file system can be mounted for the test",
)


@needs_mounts
def test_a_small_disk(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    blind = "import shutil; shutil.disk_usage = lambda p: type('u', (), {'free': 1 << 40})"
    program = PROGRAM.replace("print(", f"{blind}\nprint(")
    listing = 'code=$?; find "$1" -name "*.safetensors"; exit $code'
    script = 'mount -t tmpfs -o size=300k none "$1" && "$2" -c "$3" "$4" "$1/out"; ' + listing
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(place), sys.executable, program, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "NoSpaceError: no space left" in done.stderr
    assert done.stdout == "started\n"  # the room that was taken is given back


@needs_mounts
def test_a_read_only_place(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    script = 'mount -t tmpfs -o ro none "$1" && "$2" -c "$3" "$4" "$1/out"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(place), sys.executable, PROGRAM, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"CheckpointError: .*/disk/\S+ cannot be written: Read-only file system", done.stderr)


def test_interruption_is_quick(source: Path, tmp_path: Path, sync_always: None) -> None:
    started = time.monotonic()
    interrupted(source, tmp_path)
    assert time.monotonic() - started < 30
