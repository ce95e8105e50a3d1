"""Reading from the Hub, and publishing there."""

from __future__ import annotations

from typing import Annotated

from kbitq.cli.options.panels import MAIN, Panel

_PANEL = Panel("The Hub")

Stream = Annotated[bool, _PANEL.flag("Read a repository over the network as needed; keep no copy of it.", "--stream")]
Push = Annotated[str | None, _PANEL.option("ORG/NAME", "Publish the result there.")]
Private = Annotated[bool, _PANEL.flag("Make a new repository private.", "--private")]
BaseModel = Annotated[
    str | None,
    MAIN.option("ORG/NAME", "What it was quantized from, for the model card; a commit may follow after an @."),
]
PullRequest = Annotated[bool, MAIN.flag("Open a pull request instead of committing.", "--pr")]
Revision = Annotated[str | None, MAIN.option("BRANCH", "The branch to commit to.", shown="main")]
CardOnly = Annotated[bool, _PANEL.flag("Verify, and print the model card; upload nothing.", "--dry-run")]
AutoMap = Annotated[
    bool,
    _PANEL.flag(
        "Add a Python file through which trust_remote_code=True finds kbitq, or says what to install.", "--auto-map"
    ),
]
