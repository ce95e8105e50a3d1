"""``kbitq push``: publish a quantized checkpoint on the Hub."""

from __future__ import annotations

import dataclasses

from kbitq.cli.console import console
from kbitq.cli.options import arguments, hub, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq push ./llama-k4 me/llama-k4 --base-model meta-llama/Llama-3.2-1B",
    "kbitq push ./llama-k4 me/llama-k4 --dry-run",
    "kbitq push ./llama-k4 me/llama-k4 --private --auto-map",
)


@spread
def command(
    path: arguments.LocalQuantized,
    repository: arguments.Repository,
    base_model: hub.BaseModel = None,
    private: hub.Private = False,
    pr: hub.PullRequest = False,
    revision: hub.Revision = None,
    auto_map: hub.AutoMap = False,
    dry_run: hub.CardOnly = False,
    *,
    talk: Printing,
) -> None:
    """Verify a quantized checkpoint and upload it to the Hub, with a model card made from it."""
    console.begin(**vars(talk))
    from kbitq.cli import publish

    target = publish.target(repository, revision)
    if dry_run:
        card, instead = publish.prepared(path, target, base_model, auto_map=auto_map)
        if talk.json:
            console.object({"repository": target.id, "card": card, "instead": sorted(instead)})
        else:
            console.write(card)
            if instead:
                console.note(f"changed or added beside it: {', '.join(sorted(instead))}")
            console.note(f"nothing was uploaded; README.md of {target.id} would be this card")
        return
    pushed = publish.publish(path, target, base=base_model, private=private, pull_request=pr, auto_map=auto_map)
    if talk.json:
        console.object(dataclasses.asdict(pushed))
    else:
        console.data(pushed.pull_request or pushed.url)
