"""The one output object. Data goes to stdout, talk to stderr; rich is imported only when something is shown with it.

All that is printed leaves through here and is made safe here (``kbitq.text_safety``): a name in a hostile file must not
reach the terminal as a command.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from kbitq.cli.views.text import size_text
from kbitq.text_safety import printable, prose

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType

_ODD_NAMES: list[str | None] = ["backslashreplace"] * 2  # what stdout and stderr do with what they cannot encode
_UNCUT = 10_000  # columns of a table that goes to a file or a pipe: nothing is shortened there


class Console:
    """Where every command writes. ``begin`` is called once by each command with what its options ask for."""

    def __init__(self) -> None:
        self._errors_before = _ODD_NAMES
        self.reset()

    def reset(self) -> None:
        """Back to the state in which the program starts. No name or path, however odd, may break a print."""
        self.wants_json = self.quiet = self.debug = False
        self.unfinished: str | None = None
        before = _reconfigure(_ODD_NAMES)
        if before != _ODD_NAMES:  # else they are ours already
            self._errors_before = before

    def hand_over(self) -> None:
        """Another program goes on in this process: the streams are as it would find them."""
        _reconfigure(self._errors_before)

    def begin(
        self, *, json: bool = False, quiet: bool = False, debug: bool = False, unfinished: str | None = None
    ) -> None:
        """Take over the options of the command that runs. ``unfinished``: what is said if it is interrupted."""
        self.wants_json, self.quiet, self.debug, self.unfinished = json, quiet, debug, unfinished
        if quiet or not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the Hub's client reads it when it is imported

    # -- stdout: data -------------------------------------------------------------------------------------------------

    def data(self, line: str) -> None:
        """A line of data."""
        print(printable(line), file=sys.stdout)

    def write(self, text: str) -> None:
        """A piece of text that goes on: shown at once, no line end added."""
        print(prose(text), end="", file=sys.stdout, flush=True)

    def object(self, value: Mapping[str, Any]) -> None:
        """One JSON object; a number that is not finite becomes null, as in the format's own header."""
        print(json.dumps(_finite(value), indent=2, allow_nan=False), file=sys.stdout)

    def show(self, *renderables: RenderableType) -> None:
        """Tables and text for a reader, on stdout."""
        out = _rich(sys.stdout)
        if out.is_terminal:
            out.print(*renderables, sep="\n")
            return
        with out.capture() as captured:
            out.print(*renderables, sep="\n")
        for line in captured.get().splitlines():
            self.data(line.rstrip())

    def flush(self) -> None:
        """Make a closed pipe or a full disk behind stdout show itself now, while it can be reported."""
        sys.stdout.flush()

    # -- stderr: talk -------------------------------------------------------------------------------------------------

    def note(self, sentence: str) -> None:
        """Something worth knowing that is not the result."""
        if not self.quiet:
            self._talk("note", "yellow", sentence)

    def error(self, sentence: str, hint: str | None = None) -> None:
        """What went wrong, and on a line of its own what to do."""
        self._talk("error", "bold red", sentence)
        if hint:
            self._talk("hint", "bold cyan", hint)

    def traceback(self, error: BaseException) -> None:
        """The traceback, for --debug."""
        text = "".join(traceback.format_exception(error))
        if "huggingface_hub" in sys.modules:
            from kbitq.hub.problems import redacted

            text = redacted(text)
        print(prose(text), end="", file=sys.stderr)

    def _talk(self, label: str, style: str, sentence: str) -> None:
        sentence = printable(sentence)
        if sys.stderr.isatty():
            from rich.text import Text

            _rich(sys.stderr).print(Text.assemble((f"{label}: ", style), sentence))
        else:
            print(f"{label}: {sentence}", file=sys.stderr)

    @contextmanager
    def progress(self, verb: str, amount: Callable[[float], str] = size_text) -> Iterator[Callable[[Any], None] | None]:
        """A bar on a terminal, a line now and then elsewhere, nothing when quiet. Yields the callback.

        ``amount`` says how much work is done in a second, given as a number; by default bytes.
        """
        if self.quiet:
            yield None
            return
        from kbitq.cli.views import progress

        view: progress.Bar | progress.Lines
        if sys.stderr.isatty():
            view = progress.Bar(_rich(sys.stderr), verb, amount)
        else:
            view = progress.Lines(sys.stderr, verb, amount)
        with view:
            yield view.update


def _reconfigure(errors: Sequence[str | None]) -> list[str | None]:
    """Set ``errors`` of stdout and stderr; returns what they were."""
    before: list[str | None] = []
    for stream, wanted in zip((sys.stdout, sys.stderr), errors, strict=True):
        before.append(stream.errors)
        if isinstance(stream, TextIOWrapper) and wanted is not None:
            stream.reconfigure(errors=wanted)
    return before


def _rich(stream: Any) -> RichConsole:
    from kbitq.cli.views.safe_console import SafeConsole

    made = SafeConsole(file=stream, highlight=False, emoji=False, markup=False)
    if not made.is_terminal:
        made = SafeConsole(file=stream, highlight=False, emoji=False, markup=False, width=_UNCUT)
    return made


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


console = Console()
