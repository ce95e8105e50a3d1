"""``kbitq generate``: text from a model, to see that it still speaks, how fast, and in how much memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments, parsing, running
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from kbitq.eval.generation import Generation, Memory

EPILOG = parsing.examples(
    'kbitq generate ./llama-k4 "The capital of France is"',
    'kbitq generate ./llama-k4 "Once upon a time" --max-tokens 200 --temperature 0.8',
    'kbitq generate ./llama-k4 "Why is the sky blue?" --chat',
)


@spread
def command(
    model: arguments.Model,
    prompt: arguments.Prompt,
    max_tokens: running.MaxTokens = 100,
    temperature: running.Temperature = 0.0,
    seed: running.Seed = 0,
    chat: running.UseTemplate = False,
    system: running.System = None,
    *,
    loading: running.Loading,
    talk: Printing,
) -> None:
    """Continue a prompt: the text goes to stdout as it comes, speed and memory to stderr.

    With --chat, answer it.
    """
    console.begin(**vars(talk))
    from kbitq.cli import sources
    from kbitq.eval.generation import check_request, generate, memory_of
    from kbitq.integrations.transformers.loading import load_model, load_tokenizer

    check_request(prompt, temperature, seed)
    if system is not None and not chat:
        raise typer.BadParameter("--system goes with --chat.")
    folder = sources.local(model)
    speaker = load_model(folder, **vars(loading))
    tokenizer = load_tokenizer(folder, trust_remote_code=loading.trust_remote_code)
    if not talk.json and not chat:
        console.write(prompt)
    made = generate(
        speaker, tokenizer, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed,
        on_text=None if talk.json else console.write, template=chat, system=system,
    )  # fmt: skip
    if talk.json:
        console.object(_ledger(prompt, made, memory_of(speaker)))
        return
    console.write("\n")
    if not talk.quiet:
        console.note(_speed(made, memory_of(speaker)))


def _ledger(prompt: str, made: Generation, memory: Memory) -> dict[str, object]:
    return {
        "prompt": prompt, "text": made.text, "tokens": made.tokens, "prompt_tokens": made.prompt_tokens,
        "prefill_seconds": made.prefill_seconds, "decode_seconds": made.decode_seconds,
        "tokens_per_second": made.tokens_per_second, "weight_bytes": memory.weights, "peak_bytes": memory.peak,
    }  # fmt: skip


def _speed(made: Generation, memory: Memory) -> str:
    from kbitq.cli.views.text import seconds_text, size_text

    prefill = seconds_text(made.prefill_seconds)
    speed = f"{made.tokens} tokens, {made.tokens_per_second:.1f} tokens/s after {prefill} for the prompt"
    sizes = f"weights {size_text(memory.weights)}, peak {size_text(memory.peak)}"
    return f"{speed}; {sizes}"
