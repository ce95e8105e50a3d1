"""rich's console, with every piece of text made printable after it was laid out and before it is written."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kbitq.text_safety import printable


class SafeConsole(Console):
    """Whatever is shown with it cannot drive the terminal; only rich's own commands can."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's: the segments of a renderable. Line ends are rich's own, since it cuts texts into lines first."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text, keep="\n"), style)
