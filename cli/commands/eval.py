"""``kbitq eval``: what a quantization is worth, measured on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments, parsing, running
from kbitq.cli.options import tasks as task_options
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.eval.perplexity import Evaluation

EPILOG = parsing.examples(
    "kbitq eval ./llama-k4 --text wiki.txt",
    "kbitq eval ./llama-k4 --text wiki.txt --against ./Llama-3.2-1B --windows 40",
    "kbitq eval ./llama-k4 --text wiki.txt --against ./Llama-3.2-1B --save",
    "kbitq eval ./llama-k4 --tokens ids.bin --json",
    "kbitq eval ./llama-k4 --tasks arc_easy,hellaswag --limit 100 --against ./Llama-3.2-1B",
)


@spread
def command(
    model: arguments.Model,
    text: running.TextFile = None,
    tokens: running.TokenFile = None,
    against: running.Reference = None,
    window: running.Window = 512,
    windows: running.Windows = None,
    batch: running.Batch = 1,
    *,
    loading: running.Loading,
    save: running.Save = None,
    chat: running.UseTemplate = False,
    wanted: task_options.Wanted,
    talk: Printing,
) -> None:
    """Measure the perplexity of a causal language model; with --against, how far its predictions are from another's.

    The text is cut into windows from its start, and each is read on its own.
    With --tasks, measure its scores on tasks instead.
    """
    console.begin(**vars(talk))
    _check(wanted, text, tokens, chat=chat)
    from kbitq.cli import cards, evaluating, sources
    from kbitq.integrations.transformers.loading import load_model

    def load(folder: Path) -> Any:
        return load_model(folder, **vars(loading))

    folder = sources.local(model)
    trusted = loading.trust_remote_code
    if wanted.tasks is not None:
        from kbitq.cli import tasks

        found = tasks.find(wanted, batch=batch, template=chat)
        tasks.evaluate(found, folder, against and sources.local(against), load, trust=trusted, save=save)
        return
    # Now: what cannot be saved, or is no text, is refused before the work.
    card = cards.before_saving(folder, text or tokens) if save else ""
    ids = evaluating.text_ids(folder, text, trusted) if text is not None else None
    measured = load(folder)
    original = load(sources.local(against)) if against else None
    cut = evaluating.windows(measured, ids, tokens, window, windows)
    result = evaluating.evaluated(measured, cut, original, batch)
    _show(result)
    if save:
        cards.save(folder, result, text or tokens, card)


def _check(wanted: task_options.Wanted, text: Path | None, tokens: Path | None, *, chat: bool) -> None:
    """A usage error unless there is one thing to measure on, and what goes with it."""
    if wanted.tasks is None and (text is None) == (tokens is None):
        raise typer.BadParameter(
            "Give the text to measure on: --text FILE or --tokens FILE, one of them; or tasks: --tasks NAME,..."
        )
    if wanted.tasks is not None and (text or tokens) is not None:
        raise typer.BadParameter("--tasks NAME,... takes the place of --text FILE and --tokens FILE.")
    if chat and wanted.tasks is None:
        raise typer.BadParameter("--chat goes with --tasks; a text is read as it is.")
    wanted.check()


def _show(result: Evaluation) -> None:
    from dataclasses import asdict

    found = result.divergence
    if console.wants_json:
        console.object({**asdict(result), "tokens": result.tokens})
        return
    if console.quiet:
        console.data(f"{result.perplexity:.4f}")
        return
    from kbitq.cli.views.tables import facts
    from kbitq.cli.views.text import seconds_text, share_text

    rate = result.tokens / max(result.seconds, 1e-9)
    lines = [
        ("perplexity", f"{result.perplexity:.3f}" + (f" (reference {found.reference_perplexity:.3f})" if found else ""))
    ]
    if found is not None:
        lines.append(
            ("KL divergence", f"mean {found.mean:.4f}, median {found.median:.4f}, 99 % below {found.p99:.4f} nats")
        )
        lines.append(("same top token", share_text(found.same_top1, 1.0)))
    lines.append(("measured on", f"{result.windows} windows of {result.window} tokens"))
    lines.append(("time", f"{seconds_text(result.seconds)} ({rate:.0f} tokens/s)"))
    console.show(facts(lines))
