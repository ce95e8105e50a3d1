"""How far a long command is: a bar on a terminal, plain lines elsewhere. Both go to stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kbitq.cli.views.tables import Name
from kbitq.cli.views.text import left_text

_FIRST_LINE, _NEXT_LINES = 5.0, 10.0  # seconds: a short run says nothing, a long one speaks every ten seconds


class _TensorColumn(ProgressColumn):
    def render(self, task: Task) -> Name:
        return Name(task.fields["tensor"], style="dim")


class _RateColumn(ProgressColumn):
    """Share of the work, work a second, time left."""

    max_refresh = 0.2

    def __init__(self, amount: Callable[[float], str]) -> None:
        super().__init__()
        self._amount = amount

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        speed = f"{self._amount(rate)}/s" if rate else "-"
        left = f"{left_text(task.time_remaining)} left" if task.time_remaining is not None else ""
        return Text(f"{task.percentage:>3.0f}% {speed:>9} {left:>9}", no_wrap=True)


class Bar:
    """A live line of at most the terminal's width; it disappears when done, for the summary says it all."""

    def __init__(self, console: Console, verb: str, amount: Callable[[float], str]) -> None:
        console.width -= 3  # room for the terminal's echo of Ctrl-C, which would push the line up and leave it behind
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            _RateColumn(amount),
            _TensorColumn(table_column=Column(ratio=1, no_wrap=True)),
            console=console,
            transient=True,
            expand=True,
            speed_estimate_period=10.0,
        )
        self._task = self._progress.add_task(verb, total=None, tensor="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def update(self, state: Any) -> None:
        """Takes a ``kbitq.checkpoint.Progress``."""
        self._progress.update(
            self._task, completed=state.bytes_done, total=state.bytes_total, tensor=state.tensor or ""
        )


class Lines:
    """A plain line every ten seconds, for logs."""

    def __init__(self, stream: TextIO, verb: str, amount: Callable[[float], str]) -> None:
        self._stream, self._verb, self._amount = stream, verb, amount
        self._start: tuple[float, int] | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        return

    def update(self, state: Any) -> None:
        """Takes a ``kbitq.checkpoint.Progress``."""
        now = time.monotonic()
        if self._start is None:  # only here, since what comes before is the import of torch
            self._start, self._next = (now, state.bytes_done), now + _FIRST_LINE
        seconds, done = now - self._start[0], state.bytes_done - self._start[1]
        if now < self._next or not done:
            return
        self._next = now + _NEXT_LINES
        rate = done / seconds
        left = left_text((state.bytes_total - state.bytes_done) / rate)
        share = 100 * state.bytes_done // state.bytes_total
        print(f"{self._verb}: {share}%, {self._amount(rate)}/s, {left} left", file=self._stream, flush=True)
