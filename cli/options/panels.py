"""How options are made: what a help page shows together is one panel, which every option is made by."""

from __future__ import annotations

from typing import Any

import typer

from kbitq.cli.options import parsing


class Panel:
    """A box of the help page.

    Every method makes what stands in the ``Annotated`` type of an option. ``names`` are its flags, without them the one
    that the parameter's name gives; ``how`` goes to ``typer.Option``; ``shown`` stands in the place of its default.
    """

    def __init__(self, title: str | None = None) -> None:
        self._title = title

    def option(self, metavar: str | None, help: str, *names: str, shown: str | bool = True, **how: Any) -> Any:
        """An option with a value, which ``metavar`` stands for; without it help lists the words of its type."""
        return typer.Option(*names, metavar=metavar, rich_help_panel=self._title, show_default=shown, help=help, **how)

    def path(self, metavar: str, help: str, *names: str, **how: Any) -> Any:
        """One whose value is a path, or stands for one: completed as such."""
        return self.option(metavar, help, *names, autocompletion=parsing.complete_path, **how)

    def file(self, help: str, *names: str) -> Any:
        """One whose value is a file that must be there."""
        return self.option("FILE", help, *names, exists=True, dir_okay=False)

    def flag(self, help: str, *names: str, **how: Any) -> Any:
        """One without a value."""
        return self.option(None, help, *names, **how)


MAIN = Panel()
"""The box without a title of its own."""
