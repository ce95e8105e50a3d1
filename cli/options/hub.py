"""Reading from the Hub, and publishing there."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "The Hub"

Stream = Annotated[
    bool,
    typer.Option(
        "--stream", rich_help_panel=PANEL, help="Read a repository over the network as needed; keep no copy of it."
    ),
]
Push = Annotated[
    str | None,
    typer.Option(metavar="ORG/NAME", rich_help_panel=PANEL, show_default=False, help="Publish the result there."),
]
Private = Annotated[bool, typer.Option("--private", rich_help_panel=PANEL, help="Make a new repository private.")]
BaseModel = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/NAME",
        show_default=False,
        help="What it was quantized from, for the model card; a commit may follow after an @.",
    ),
]
PullRequest = Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")]
Revision = Annotated[str | None, typer.Option(metavar="BRANCH", show_default="main", help="The branch to commit to.")]
CardOnly = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=PANEL, help="Verify, and print the model card; upload nothing.")
]
AutoMap = Annotated[
    bool,
    typer.Option(
        "--auto-map",
        rich_help_panel=PANEL,
        help="Add a Python file through which trust_remote_code=True finds kbitq, or says what to install.",
    ),
]
