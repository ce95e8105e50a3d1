"""Tables that fit the terminal: every column keeps its width but the name, which is cut in the middle."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kbitq.cli.views.text import shorten
from kbitq.text_safety import printable

_LEAST_NAME = 16  # columns a name keeps on the narrowest terminal


class Name:
    """A tensor name, after an optional lead, cut in the middle to whatever room there is."""

    def __init__(self, name: str, lead: str = "", style: str = "") -> None:
        self.name, self.lead, self.style = printable(name), lead, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.lead + shorten(self.name, max(options.max_width - len(self.lead), 0))
        yield Text(text, style=self.style, no_wrap=True, overflow="crop", end="")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = len(self.lead) + len(self.name)
        least = len(self.lead) + min(_LEAST_NAME, len(self.name))
        return Measurement(least, longest).with_maximum(options.max_width)


def reason(text: str) -> Text:
    """The words of a verdict, cut at their end where there is no room."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def table(*columns: str) -> Table:
    """A plain table: a first column of names, the others numbers. A column named '<x' is left-aligned."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    first, *others = columns
    made.add_column(first)
    for title in others:
        left = title.startswith("<")
        made.add_column(title.lstrip("<"), justify="left" if left else "right", no_wrap=True)
    return made


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Lines of 'label   value'."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    for label, value in rows:
        made.add_row(label, value)
    return made
