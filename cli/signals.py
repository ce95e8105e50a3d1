"""Signals that end the program. The first asks for an orderly end, the second ends the process at once.

Standard library only, and little of it: this is in place before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, TextIO

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR1)
INTERRUPTED = 128 + signal.SIGINT

# What comes closer together was asked once: `timeout` signals a process and its group, shell and kernel both hang up.
_ONE_REQUEST_SECONDS = 0.2
_AFTER_A_BAR = "\n\x1b[?25h"  # a bar has the line, and hides the cursor
_SOON = 0.01  # seconds
_END, _DROPPED = 0, 255  # what this module writes where signals write their numbers


class Stopped(BaseException):
    """A signal other than Ctrl-C, as an exception: like KeyboardInterrupt it must run everything that cleans up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """For the length of a ``with`` block, listens for signals that end the program.

    At first, while modules are being imported, and within ``at_once`` a signal ends the process after a sentence. After
    ``unwind`` it raises KeyboardInterrupt or ``Stopped`` in the main thread. A signal that was ignored before, as by
    ``nohup``, stays so.

    A thread counts signals as they arrive: the main thread does not hear them while it is in a long call.
    """

    current: Signals | None = None

    def __init__(self, *, own_process: bool) -> None:
        """``own_process``: the process ends with the block, so that no handler needs to come back."""
        self._own_process = own_process
        self.heard: int | None = None  # the signal that was raised as an exception
        self._before: dict[int, Any] = {}
        self._raises = self._raised = self._in_parts = False
        self._hint: str | None = None
        self._dropped = self._again = 0  # the signal to be sent anew; how many times that was done
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python takes handlers from the main thread only
        self._outer, Signals.current = Signals.current, self
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, end == self._pipe[0])
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in HEARD:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._heard)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._thread = threading.Thread(target=self._count, name="kbitq-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is None:
            return
        Signals.current = self._outer
        for number, handler in self._before.items():
            # Nothing is left to clean up: Python's own handler would print a traceback from within its shutdown.
            signal.signal(number, signal.SIG_DFL if self._own_process else handler)
        signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)
        sys.unraisablehook = self._hook_before
        os.write(self._pipe[1], bytes([_END]))
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def unwind(self) -> None:
        """From now on a signal raises, so that whatever is unfinished is put in order."""
        self._raises = True

    @contextlib.contextmanager
    def at_once(self, hint: str) -> Iterator[None]:
        """Within the block nothing needs to be put in order, and what runs may take long to end by itself."""
        before = self._raises, self._hint
        self._raises, self._hint = False, hint
        try:
            yield
        finally:
            self._raises, self._hint = before

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """Within the block Ctrl-C ends a part of the work, not the program: it raises KeyboardInterrupt each time."""
        self._in_parts = True
        try:
            yield
        finally:
            self._in_parts = False

    def hand_over(self) -> None:
        """Another program goes on in this process after the block: it gets the handlers that it would find."""
        self._own_process = False
        self._before = {n: getattr(handler, "stands_for", handler) for n, handler in self._before.items()}

    def end(self, code: int) -> None:
        """The program has done what it had to do. After a signal, threads that are still busy are not waited for.

        Nor may Python try once more to write to a terminal that is gone: its exit code would be another.
        """
        if not self._raised or not self._own_process:
            return
        busy = any(not t.daemon and t is not threading.main_thread() for t in threading.enumerate())
        if busy | (not _flushed(sys.stdout)) | (not _flushed(sys.stderr)):
            os._exit(code)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, in the main thread between two steps of it."""
        if self._in_parts and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._raised:
            return  # the other thread counts
        if not self._raises:
            _end(number, f"interrupted{by(number)}", self._hint)
        self._raised, self.heard = True, number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(number)

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """The exception was raised where Python drops all exceptions, as in ``__del__``: raise it again elsewhere."""
        if isinstance(what.exc_value, KeyboardInterrupt | Stopped):
            self._dropped = what.exc_value.number if isinstance(what.exc_value, Stopped) else signal.SIGINT
            os.write(self._pipe[1], bytes([_DROPPED]))  # sent anew by the other thread: not from within this hook
        else:
            self._hook_before(what)

    def _count(self) -> None:
        """Wait for signals in a thread of its own, and end the process at the second."""
        first = None
        while True:
            (number,) = os.read(self._pipe[0], 1)
            if number == _END:
                return
            if number == _DROPPED:
                time.sleep(_SOON)
                self._again, self._raised = self._again + 1, False
                os.kill(os.getpid(), self._dropped)
            if number not in self._before:
                continue
            if self._again:
                self._again -= 1
            elif self._in_parts and number == signal.SIGINT:
                continue
            elif first is None:
                first = time.monotonic()
            elif time.monotonic() - first > _ONE_REQUEST_SECONDS and number != signal.SIGXCPU:
                _end(number, f"ended at once{by(number)}")


@contextlib.contextmanager
def at_once(hint: str) -> Iterator[None]:
    """``Signals.at_once`` of the program that runs, if one does."""
    if Signals.current is None:
        yield
        return
    with Signals.current.at_once(hint):
        yield


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """``Signals.in_parts`` of the program that runs, if one does."""
    with Signals.current.in_parts() if Signals.current is not None else contextlib.nullcontext():
        yield


def by(number: int) -> str:
    """`` by SIGTERM``; nothing for Ctrl-C, which a reader knows of."""
    return "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"


def _flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def _end(number: int, sentence: str, hint: str | None = None) -> None:
    """End the process with a sentence, whatever it is doing."""
    with contextlib.suppress(OSError):
        lines = f"error: {sentence}\n" + (f"hint: {hint}\n" if hint else "")
        os.write(2, (_AFTER_A_BAR + lines if os.isatty(2) else lines).encode())
    os._exit(128 + number)
