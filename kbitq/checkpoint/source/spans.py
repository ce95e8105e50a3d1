"""How a matrix is cut into tiles: runs of whole rows, or of blocks where a row alone is longer than a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kbitq.format import BLOCK, block_count


@dataclass(frozen=True)
class Span:
    """Part of a tensor's matrix: ``rows x cols`` elements from ``first_block`` (counted over the whole tensor) on.

    Either whole rows, or, of a row too long for a tile, a run of blocks: then ``cols`` is 32 (or the short last block)
    and each "row" of the span is one block, which is stored no differently. ``ends_row`` marks such a row's last span.
    """

    first_element: int
    first_block: int
    rows: int
    cols: int
    whole_rows: bool
    ends_row: bool

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def blocks(self) -> int:
        return self.rows * block_count(self.cols)


def spans(rows: int, cols: int, max_elements: int, start: int = 0) -> Iterator[Span]:
    """Cut a matrix into spans of at most ``max_elements`` elements (but never less than a block).

    ``start`` is the element to begin at: where a span of some earlier cut, of tiles of any size, ended.
    """
    row, within = divmod(start, cols)
    if within:
        yield from _spans_of_row(row, cols, max_elements, within // BLOCK)
        row += 1
    if cols > max_elements:
        for index in range(row, rows):
            yield from _spans_of_row(index, cols, max_elements, 0)
        return
    step, blocks = max_elements // cols, block_count(cols)
    for index in range(row, rows, step):
        yield Span(index * cols, index * blocks, min(step, rows - index), cols, True, True)


def _spans_of_row(row: int, cols: int, max_elements: int, block: int) -> Iterator[Span]:
    """The blocks of one row from ``block`` on, in runs that fit; the short last block is a span of its own."""
    step, blocks, full, tail = max(1, max_elements // BLOCK), block_count(cols), cols // BLOCK, cols % BLOCK
    for first in range(block, full, step):
        count = min(step, full - first)
        element = row * cols + first * BLOCK
        yield Span(element, row * blocks + first, count, BLOCK, False, first + count == blocks)
    if tail:
        yield Span(row * cols + full * BLOCK, row * blocks + full, 1, tail, False, True)
