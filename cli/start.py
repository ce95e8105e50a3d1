"""Where the program starts: Ctrl-C is heard from here on, and only then is anything imported.

Before this are Python's own start, the script that pip wrote, and ``kbitq/__init__``.
"""

import _signal  # signal itself imports enum, which takes as long as all of this
import os

_SAID = b"error: interrupted\n"


def _end(number: int, frame: object) -> None:
    """Nothing is unfinished yet. ``Signals`` takes the place of this."""
    os.write(2, _SAID)
    os._exit(128 + number)


# Whoever looks for the handler that this one replaced, finds it here (``Signals.hand_over``).
_end.stands_for = _signal.default_int_handler  # type: ignore[attr-defined]

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end)


def run() -> int:
    """The program, on the arguments of the process; returns its exit code."""
    from kbitq.cli.main import run as program

    return program()


if __name__ == "__main__":
    raise SystemExit(run())
