"""How a matrix is cut into tiles: runs of whole rows, or of blocks where a row alone is longer than a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kbitq.format import BLOCK, block_count


@dataclass(frozen=True)
class Span:
    """Part of a tensor's matrix: ``rows x cols`` elements from ``first_block`` (counted over the whole tensor) on.

    Either whole rows, or, of a row too long for a tile, a run of pieces: then ``cols`` is where a codec may cut a row
    (or the short last piece) and each "row" of the span is one piece, which is stored no differently. ``ends_row``
    marks such a row's last span; ``row_length`` is the columns of the matrix.
    """

    first_element: int
    first_block: int
    rows: int
    cols: int
    whole_rows: bool
    ends_row: bool
    row_length: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def blocks(self) -> int:
        return self.rows * block_count(self.cols)

    @property
    def sums(self) -> int:
        """Rows of what ``codecs.base.span_stats`` says of it."""
        return self.rows if self.whole_rows else self.blocks

    def units(self, cut: int) -> tuple[int, int]:
        """The runs of ``cut`` columns, counted over the whole tensor, that it has: the first, and how many."""
        row, column = divmod(self.first_element, self.row_length)
        return row * -(-self.row_length // cut) + column // cut, self.rows * -(-self.cols // cut)


def spans(
    rows: int, cols: int, max_elements: int, start: int = 0, cut: int = BLOCK, together: int = 1
) -> Iterator[Span]:
    """Cut a matrix into spans of at most ``max_elements`` elements (but never less than a piece of ``cut`` columns).

    ``start`` is the element to begin at: where a span of some earlier cut, of tiles of any size, ended. ``together``:
    with more than one, spans are whole rows, never less than so many, and begin at a multiple of it.
    """
    row, within = divmod(start, cols)
    if together > 1:
        step, blocks = max(1, max_elements // (cols * together)) * together, block_count(cols)
        for index in range(row, rows, step):
            yield Span(index * cols, index * blocks, min(step, rows - index), cols, True, True, cols)
        return
    if within:
        yield from _spans_of_row(row, cols, max_elements, within // cut, cut)
        row += 1
    if cols > max_elements:
        for index in range(row, rows):
            yield from _spans_of_row(index, cols, max_elements, 0, cut)
        return
    step, blocks = max_elements // cols, block_count(cols)
    for index in range(row, rows, step):
        yield Span(index * cols, index * blocks, min(step, rows - index), cols, True, True, cols)


def _spans_of_row(row: int, cols: int, max_elements: int, piece: int, cut: int) -> Iterator[Span]:
    """One row from ``piece`` on, in runs of pieces that fit; the short last piece is a span of its own."""
    step, blocks, full = max(1, max_elements // cut), block_count(cols), cols // cut

    def span(column: int, count: int, width: int) -> Span:
        first = row * blocks + column // BLOCK
        return Span(row * cols + column, first, count, width, False, column + count * width == cols, cols)

    for first in range(piece, full, step):
        yield span(first * cut, min(step, full - first), cut)
    if cols > full * cut:
        yield span(full * cut, 1, cols - full * cut)
