"""``kbitq chat``: a conversation with a model, in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from kbitq.cli.console import console
from kbitq.cli.options import arguments, parsing, running
from kbitq.cli.options.printing import Debug, Quiet
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from kbitq.eval.conversation import Conversation
    from kbitq.eval.generation import Generation

EPILOG = parsing.examples(
    "kbitq chat ./llama-k4",
    'kbitq chat ./llama-k4 --system "Answer in one sentence." --temperature 0.7',
)
_HELP = "/clear forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer; a line that ends in \\ goes on"


@spread
def command(
    model: arguments.Model,
    system: running.System = None,
    max_tokens: running.MaxTokens = 1000,
    temperature: running.OwnTemperature = None,
    seed: running.Seed = 0,
    *,
    loading: running.Loading,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Talk with a language model: a line is a message, the answer comes as it is made.

    The chat template is the model's own; a base model without one continues a transcript.
    Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation.
    """
    console.begin(quiet=quiet, debug=debug)
    from kbitq.cli import sources
    from kbitq.cli.signals import in_parts
    from kbitq.eval.conversation import Conversation
    from kbitq.eval.generation import check_request
    from kbitq.integrations.transformers.loading import load_model, load_tokenizer

    check_request(system or " ", temperature or 0.0, seed)
    folder = sources.local(model)
    tokenizer = load_tokenizer(folder, trust_remote_code=loading.trust_remote_code)
    speaker = load_model(folder, **vars(loading))
    conversation = Conversation(speaker, tokenizer, system)
    if not conversation.has_template:
        console.note("the tokenizer has no chat template: a base model, which is given a transcript to continue")
    if sys.stdin.isatty():
        console.note(_HELP)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() has a history and keys to edit a line with
    with in_parts():
        while (text := _message()) is not None:
            if text.strip() == "/clear":
                conversation.clear()
            elif text.strip():
                _answer(conversation, text, max_tokens, temperature, seed)


def _message() -> str | None:
    """The next message, or None where the conversation ends. Raises KeyboardInterrupt at the second Ctrl-C in a row."""
    warned = False
    while True:
        try:
            text = _line("> ")
            while text.endswith("\\"):
                text = text[:-1] + "\n" + _line(". ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if warned or not sys.stdin.isatty():
                raise
            console.write("\n")
            console.note("once more, Ctrl-D or /exit ends the conversation")
            warned = True
            continue
        return None if text.strip() == "/exit" else text


def _line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _answer(conversation: Conversation, text: str, max_tokens: int, temperature: float | None, seed: int) -> None:
    """Say an answer, as far as it comes."""
    from kbitq.errors import KbitqError

    forgotten = conversation.forgotten
    try:
        made = conversation.answer(
            text, max_tokens=max_tokens, temperature=temperature, seed=seed, on_text=console.write
        )
    except KeyboardInterrupt:
        console.write("\n")
        console.note("stopped")
        return
    except KbitqError as error:
        console.error(str(error))
        return
    console.write("\n")
    if conversation.forgotten > forgotten:
        console.note(f"the context is full: the first {conversation.forgotten} messages are forgotten")
    console.note(_speed(made))


def _speed(made: Generation) -> str:
    from kbitq.cli.views.text import seconds_text

    return f"{made.tokens} tokens, {made.tokens_per_second:.1f} tokens/s after {seconds_text(made.prefill_seconds)}"
