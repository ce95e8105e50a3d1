"""Writing outputs: files of known size filled in place, in a hidden folder beside the final name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from kbitq.checkpoint.output.file_writer import FileWriter, sync_folder, writing
from kbitq.errors import CheckpointError, NoSpaceError, OutputExistsError

STAGING_SUFFIX = ".kbitq-partial"
_REPLACED_SUFFIX = ".kbitq-replaced"
_OUTPUT, _LOCK, _JOURNAL = "out", "lock", "journal"


def working_folders(final: Path) -> tuple[Path, Path]:
    """The hidden folders beside an output: where it is built, and where the one that it replaces waits for its end."""
    return final.parent / f".{final.name}{STAGING_SUFFIX}", final.parent / f".{final.name}{_REPLACED_SUFFIX}"


def leftovers(final: Path) -> list[Path]:
    """The hidden folders beside a complete output that a run left which was cut before it had tidied up.

    One that another run is at work in is none of them, nor one that holds work to go on from.
    """
    staging, replaced = working_folders(final)
    if not os.path.lexists(final) or _locked(staging):
        return []
    bare = not any(p.is_file() for p in staging.rglob("*") if p not in (staging / _LOCK, staging / _JOURNAL))
    spent = [staging] if bare or _has_no_journal(staging) else []
    return [f for f in [*spent, replaced] if f.is_dir() and not f.is_symlink()]


def _has_no_journal(staging: Path) -> bool:
    """Whether there is only an output in it that nothing goes on from, as a dequantize leaves that was killed."""
    names = {path.name for path in staging.iterdir()} if staging.is_dir() else set()
    journal = staging / _JOURNAL
    return _LOCK in names <= {_LOCK, _JOURNAL, _OUTPUT} and not (journal.exists() and journal.stat().st_size)


def replaced_output(final: Path) -> Path | None:
    """Where the output ``final`` waits that a run was about to replace when it was cut; None if that is not so."""
    replaced = working_folders(final)[1]
    cut = not os.path.lexists(final) and replaced.is_dir() and not replaced.is_symlink()
    return replaced if cut else None


def remove_leftovers(final: Path) -> None:
    """Remove what ``leftovers`` finds; what cannot be removed stays."""
    for folder in leftovers(final):
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> bool:
    """Whether a run is at work in a hidden folder."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


class Staging:
    """The hidden folder beside the final name in which one run at a time builds an output, renamed when all is synced.

    It holds the lock, the journal of an interrupted run, and the output so far.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.folder, self._replaced = working_folders(final)
        self.output, self.journal = self.folder / _OUTPUT, self.folder / _JOURNAL
        self._lock = -1

    def __enter__(self) -> Staging:
        with writing(self.folder):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            while self._lock < 0:
                self.folder.mkdir(exist_ok=True)
                self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder.exists() and not (self.journal.exists() and self.journal.stat().st_size):
            self.discard()  # nothing in it to go on from
        os.close(self._lock)
        self._lock = -1

    def clear(self) -> None:
        """Throw away what an earlier run left."""
        with writing(self.folder):
            self.journal.unlink(missing_ok=True)
        self.clear_output()

    def clear_output(self) -> None:
        """Throw away the output so far."""
        shutil.rmtree(self.output, ignore_errors=True)

    def check_space(self, nbytes: int) -> None:
        """Raise NoSpaceError unless the disk can hold ``nbytes`` in all, what is here already included."""
        with writing(self.folder):
            self.output.mkdir(exist_ok=True)
            here = sum(p.stat().st_blocks * 512 for p in self.output.rglob("*") if p.is_file())
            free = shutil.disk_usage(self.folder).free
        if free + here < nbytes:
            raise NoSpaceError(
                f"{self.final} needs {nbytes - here:,} bytes and its disk has {free:,} free",
                hint="free some space, or choose another disk",
                remedy="another-disk",
            )

    def path(self, name: str) -> Path:
        """Where the output's file ``name`` is built; its sub-folders are made."""
        path = self.output / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_file(self, name: str, data: bytes) -> None:
        """Write and sync a whole small file."""
        with FileWriter(self.path(name), len(data)) as writer:
            writer.write(0, data)
            writer.sync()

    def publish_file(self, name: str) -> None:
        """Give the one file built its final name."""
        with writing(self.final):
            (self.output / name).replace(self.final)
        sync_folder(self.final.parent)
        self.discard()

    def publish_folder(self, *, replace: bool) -> None:
        """Give the folder its final name. With ``replace`` an earlier output there is removed after, never before."""
        for root, _, _ in os.walk(self.output):
            sync_folder(Path(root))
        with writing(self.final):
            shutil.rmtree(self._replaced, ignore_errors=True)
            if replace and self.final.is_dir():
                self.final.rename(self._replaced)
            try:
                self.output.rename(self.final)  # onto nothing, or onto an empty folder
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                raise OutputExistsError(f"{self.final} appeared while the output was being made") from None
        sync_folder(self.final.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)
        self.discard()

    def discard(self) -> None:
        """Remove the folder and what is in it: the journal first, so that none is left that speaks of missing files."""
        with contextlib.suppress(OSError):
            self.journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _acquire(self) -> None:
        """Take the lock, unless another run has it; leaves it untaken if that run's folder just went away."""
        path = self.folder / _LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                self._lock = lock
                return
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(
                f"{self.final} is being written by another run", hint="wait for it to end, or choose another output"
            ) from None
        os.close(lock)


class SharedStaging(Staging):
    """The same folder for processes of several machines. No lock: a network file system may have none that holds.

    What they do in it is harmless if done twice; see ``kbitq.cluster``.
    """

    needed: Sequence[str] = ()
    """Files without which the output is not complete."""

    def __enter__(self) -> SharedStaging:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def take_back(self) -> None:
        """Go on from an output that a process had when it was cut before it could publish it."""
        for left in sorted(self.folder.glob(f"{_OUTPUT}-*")):
            if not self.output.exists():
                with contextlib.suppress(OSError):
                    left.rename(self.output)

    def publish_folder(self, *, replace: bool) -> None:
        """The same where several processes may do it at once: one has the folder, for the others it is gone.

        One that comes too late may have made it anew, for the small files that it writes: that one is not published.

        Raises CheckpointError in the processes that do not have it.
        """
        mine = self.folder / f"{_OUTPUT}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            self.output.rename(mine)
        if not all((mine / name).is_file() for name in self.needed):
            if not any((mine / name).is_file() for name in self.needed):
                shutil.rmtree(mine, ignore_errors=True)
            raise CheckpointError(f"{self.final} is being finished by another process", hint="it is there in a moment")
        self.output = mine
        super().publish_folder(replace=replace)

    def __exit__(self, *_: object) -> None:
        """The folder stays for the others."""
