"""A bound on the divergence from the source, instead of a budget: ``quantize`` only, since it runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files, parsing, running
from kbitq.cli.options.budget import PANEL

Kl = Annotated[
    float | None,
    PANEL.option(
        "X",
        "The smallest model whose predictions on --text diverge from the source's by at most X nats on average: "
        "--bpw is bisected, and each step quantizes and evaluates.",
        parser=parsing.nats,
    ),
]
TextFile = Annotated[Path | None, files.READ, PANEL.file("For --kl: a text in UTF-8.", "--text")]
TokenFile = Annotated[
    Path | None,
    files.READ,
    PANEL.file("For --kl, instead of --text: token ids, little-endian uint16 or uint32.", "--tokens"),
]
Window = Annotated[int, PANEL.option("N", "For --kl: tokens read together.", min=2)]
Windows = Annotated[int | None, PANEL.option("N", "For --kl: windows of the text to read.", min=1, shown="all")]


@dataclass(frozen=True)
class Divergence:
    """How far from the source the model may be, and on what text."""

    kl: Kl = None
    text: TextFile = None
    tokens: TokenFile = None
    window: Window = 512
    windows: Windows = None
    trust_remote_code: running.TrustRemoteCode = False

    def check(self, *, dry_run: bool, stream: bool, cluster: bool) -> None:
        """Raise BadParameter for options that do not go together."""
        if self.kl is None:
            if self.text is not None or self.tokens is not None:
                raise typer.BadParameter("--text and --tokens are for --kl.")
            return
        if (self.text is None) == (self.tokens is None):
            raise typer.BadParameter("--kl needs the text to measure on: --text FILE or --tokens FILE, one of them.")
        for flag, given in (("--dry-run", dry_run), ("--stream", stream), ("--cluster", cluster)):
            if given:
                raise typer.BadParameter(f"--kl and {flag} cannot go together: --kl runs the model here.")
