"""Tables that fit the terminal: names are cut so that they stay apart, and columns that have no room go below."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from kbitq.cli.views.text import shorten
from kbitq.report.groups import sparkline
from kbitq.text_safety import printable

_LEAST_NAME = 16  # columns a name keeps on the narrowest terminal
_LEAST_BARS, _MOST_BARS = 16, 64
_GAP = 2  # columns between two columns of a table


class Cell(Protocol):
    """A cell whose text depends on the room there is."""

    least: int
    longest: int

    def fit(self, width: int) -> str:
        """The text in at most ``width`` columns."""


class Name:
    """A tensor name, after an optional lead, cut in the middle to whatever room there is."""

    def __init__(self, name: str, lead: str = "", style: str = "") -> None:
        self.name, self.lead, self.style = printable(name), lead, style
        self.longest = len(self.name)
        self.least = min(_LEAST_NAME, self.longest)

    def fit(self, width: int) -> str:
        """The name alone."""
        return shorten(self.name, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.lead)
        if self.lead and room < self.least:  # the lead above, the name on a line of its own
            yield Text(self.lead.rstrip(), style=self.style)
            room, lead = options.max_width, ""
        else:
            lead = self.lead
        yield Text(lead + self.fit(max(room, 0)), style=self.style, no_wrap=True, overflow="crop", end="")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lead = len(self.lead)
        return Measurement(lead + self.least, lead + self.longest).with_maximum(options.max_width)


class Words:
    """The words of a verdict, cut at their end where there is no room."""

    def __init__(self, text: str) -> None:
        self.text = printable(text)
        self.longest = len(self.text)
        self.least = min(_LEAST_NAME, self.longest)

    def fit(self, width: int) -> str:
        return self.text if self.longest <= width else self.text[: max(width - 1, 0)] + "…"


class Bars:
    """A bar for each value, a blank for None; neighbours share one, of their mean, where room is short.

    ``span``: the values of the lowest and of the highest bar; by default 0 and the largest value that is shown.
    """

    def __init__(self, values: Sequence[float | None], span: tuple[float, float] | None = None) -> None:
        self.values, self.span = values, span
        self.longest = min(len(values), _MOST_BARS)
        self.least = min(_LEAST_BARS, self.longest)

    def fit(self, width: int) -> str:
        count = max(min(width, self.longest), 1)
        ends = [i * len(self.values) // count for i in range(count + 1)]
        means = [_mean(self.values[a:b]) for a, b in itertools.pairwise(ends)]
        return sparkline(means, *(self.span or (0.0, max(m for m in means if m is not None))))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Length:
    """A share from 0 to 1 as the length of a bar."""

    def __init__(self, share: float, longest: int) -> None:
        self.share, self.longest, self.least = share, longest, min(_LEAST_BARS, longest)

    def fit(self, width: int) -> str:
        return "█" * max(1, round(min(width, self.longest) * self.share)) if self.share else ""


class Table:
    """A plain table: a first column of names, the others numbers. A column named '<x' is left-aligned.

    Where the columns do not fit beside each other, those that are left over follow in a table of their own with the
    same first column, so that none is lost.
    """

    def __init__(self, *titles: str) -> None:
        self.titles: list[str] = []
        self.left: list[bool] = []
        self.rows: list[tuple[str | Cell, ...]] = []
        for title in titles:
            self.add_column(title)

    def add_column(self, title: str) -> None:
        """Add a column, before any row."""
        self.left.append(not self.titles or title.startswith("<"))
        self.titles.append(title.lstrip("<"))

    def add_row(self, *cells: str | Cell) -> None:
        """Add a row, a cell for each title."""
        self.rows.append(tuple(printable(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, band in enumerate(self._bands(options.max_width)):
            if number:
                yield Text("")
            yield self._shown(band)

    def _bands(self, width: int) -> list[dict[int, tuple[int, int]]]:
        """The columns of each table that is shown, by number, each with its room and the width its cells are cut to."""
        longest = [self._longest(i) for i in range(len(self.titles))]
        if sum(longest) + _GAP * (len(longest) - 1) <= width:
            return [{i: (room, room) for i, room in enumerate(longest)}]
        least = [self._least(i, longest[i]) for i in range(len(self.titles))]
        bands = [[0]]
        for i in range(1, len(self.titles)):
            if len(bands[-1]) > 1 and sum(least[j] + _GAP for j in bands[-1]) + least[i] > width:
                bands.append([0])
            bands[-1].append(i)
        return [_rooms({i: (least[i], longest[i]) for i in band}, width) for band in bands]

    def _shown(self, band: dict[int, tuple[int, int]]) -> rich_table.Table:
        made = rich_table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_edge=False)
        for i, (room, _) in band.items():
            made.add_column(self.titles[i], justify="left" if self.left[i] else "right", width=room, overflow="fold")
        for row in self.rows:
            made.add_row(*(Text(_text(row[i], cut)) for i, (_, cut) in band.items()))
        return made

    def _longest(self, column: int) -> int:
        cells = (row[column] for row in self.rows)
        return max([len(self.titles[column]), *(len(c) if isinstance(c, str) else c.longest for c in cells)])

    def _least(self, column: int, longest: int) -> int:
        """The least room in which the cells of a column are whole; of the first column, can be told apart."""
        cells = [row[column] for row in self.rows]
        cut = [c for c in cells if not isinstance(c, str)]
        least = max([len(self.titles[column]), *(len(c) for c in cells if isinstance(c, str)), *(c.least for c in cut)])
        if column or not cut:
            return least
        whole = len({c.fit(c.longest) for c in cut})
        widths = range(least, longest + 1)
        return widths[bisect.bisect_left(widths, True, key=lambda width: len({c.fit(width) for c in cut}) == whole)]


def _rooms(columns: dict[int, tuple[int, int]], width: int) -> dict[int, tuple[int, int]]:
    """The room of each column in ``width``: its least, and what is left over from the left on, up to its longest.

    Where not even one column has room beside the names, both go on in the next line, and are cut to their least only.
    """
    rooms = {i: least for i, (least, _) in columns.items()}
    spare = width - sum(rooms.values()) - _GAP * (len(rooms) - 1)
    if spare < 0:
        first, last = min(rooms), max(rooms)
        rooms[first] = max(rooms[first] + spare, min(rooms[first], _LEAST_NAME))
        rooms[last] = min(rooms[last], max(width - _GAP - rooms[first], 1)) if last != first else width
    for i, (_, longest) in columns.items():
        more = max(min(spare, longest - rooms[i]), 0)
        rooms[i], spare = rooms[i] + more, spare - more
    return {i: (rooms[i], max(rooms[i], least)) for i, (least, _) in columns.items()}


def _text(cell: str | Cell, width: int) -> str:
    return cell if isinstance(cell, str) else cell.fit(width)


def facts(rows: Iterable[tuple[str, RenderableType]]) -> rich_table.Table:
    """Lines of 'label   value'."""
    made = rich_table.Table.grid(padding=(0, _GAP, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    for label, value in rows:
        made.add_row(label, value)
    return made
