"""``kbitq push``: publish a quantized checkpoint on the Hub."""

from __future__ import annotations

import dataclasses

from kbitq.cli.console import console
from kbitq.cli.options import arguments as options

EPILOG = options.examples(
    "kbitq push ./llama-k4 me/llama-k4 --base-model meta-llama/Llama-3.2-1B",
    "kbitq push ./llama-k4 me/llama-k4 --private",
)


def command(
    path: options.LocalQuantized,
    repository: options.Repository,
    base_model: options.BaseModel = None,
    private: options.Private = False,
    pr: options.PullRequest = False,
    revision: options.Revision = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Verify a quantized checkpoint and upload it to the Hub, with a model card made from it."""
    console.begin(wants_json=json, quiet=quiet, debug=debug)
    from kbitq.cli import publish

    target = publish.target(repository, revision)
    pushed = publish.publish(path, target, base=base_model, private=private, pull_request=pr)
    if json:
        console.object(dataclasses.asdict(pushed))
    else:
        console.data(pushed.pull_request or pushed.url)
