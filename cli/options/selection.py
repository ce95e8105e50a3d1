"""Which tensors are quantized."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kbitq.cli.options import parsing

PANEL = "Which tensors"
_EMBEDDINGS = "Embeddings"  # a panel of its own: the two long names would squeeze the help of their neighbours

Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=PANEL,
        show_default=False,
        help="Quantize these too. P: a glob on tensor names, or re:REGEX. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=PANEL,
        show_default=False,
        help="Keep these as they are; wins over --include. Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=PANEL,
        show_default=False,
        help="Quantize these and nothing else. Repeatable.",
    ),
]
KeepEmbeddings = Annotated[
    bool,
    typer.Option(
        "--keep-embeddings/--no-keep-embeddings", rich_help_panel=_EMBEDDINGS, help="Leave embeddings as they are."
    ),
]
OnNonfinite = Annotated[
    Literal["error", "keep"],
    typer.Option(rich_help_panel=PANEL, help="A tensor with NaN or Inf: stop, or keep it as it is and say so."),
]
MinCoverage = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        parser=parsing.share,
        rich_help_panel=PANEL,
        help="Refuse a run that would quantize less than this share of the parameters.",
    ),
]
