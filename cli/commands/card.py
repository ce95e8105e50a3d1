"""``kbitq card``: the model card, as ``kbitq push`` would publish it."""

from __future__ import annotations

from kbitq.cli.console import console
from kbitq.cli.options import arguments, hub, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq card ./llama-k4",
    "kbitq card ./llama-k4 --base-model meta-llama/Llama-3.2-1B > card.md",
)


@spread
def command(
    path: arguments.LocalQuantized,
    base_model: hub.BaseModel = None,
    *,
    talk: Printing,
) -> None:
    """Print the model card of a quantized checkpoint: what it is, what it costs, how to load it and make it again."""
    console.begin(**vars(talk))
    from kbitq.cli import cards

    text = cards.card_of(path, base=base_model)
    if talk.json:
        console.object({"card": text})
    else:
        console.write(text)
