"""The program ``kbitq``: the one try/except around everything, imports included. It decides nothing.

Only what is needed to hear a signal is imported at the top: Ctrl-C may come while the rest is being imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from kbitq.cli.signals import INTERRUPTED, Signals, Stopped


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program on ``arguments`` (default: those of the process) and return its exit code.

    0: done. 1: an error, told in a sentence on stderr. 2: the command line was not understood. 128 + n: stopped by
    signal n (130: Ctrl-C), with everything unfinished removed, but for what the same command goes on from.
    """
    with Signals(own_process=arguments is None) as signals:
        done = _run(arguments, signals)
        if isinstance(done, int):
            signals.end(done)
            return done
        signals.hand_over()
    return done()


def _run(arguments: Sequence[str] | None, signals: Signals) -> int | Callable[[], int]:
    """The exit code, or the program that ``kbitq run`` found, to be called when nothing of ours is in its way."""
    from kbitq.cli.app import app
    from kbitq.cli.console import console
    from kbitq.cli.errors import explain, report

    console.reset()
    try:
        signals.unwind()
        code = app(args=arguments, prog_name="kbitq", standalone_mode=False)
        if code == INTERRUPTED:  # Typer turns Ctrl-C into this code without a word
            raise KeyboardInterrupt
        console.flush()
        if callable(code):
            console.hand_over()
            return cast(Callable[[], int], code)
        return code or 0
    except (Exception, KeyboardInterrupt, Stopped) as raised:
        error: BaseException = raised
        if signals.heard is not None and isinstance(raised, Exception):
            error = Stopped(signals.heard)  # where the terminal is gone, cleaning up ends in an error of its own
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal to say it on
            report(error)
        return explain(error).exit_code


if __name__ == "__main__":
    raise SystemExit(run())
