"""``kbitq eval --tasks``: scores of a model, and of another one beside it, as a table and beside the model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.cli import cards
from kbitq.cli.console import console
from kbitq.cli.options.tasks import Wanted
from kbitq.cli.signals import at_once
from kbitq.cli.views.tables import Table
from kbitq.errors import KbitqError
from kbitq.eval.tasks import Tasks, TaskScore, harness_version
from kbitq.integrations.transformers.loading import load_tokenizer

_AGAIN = "nothing was saved; run the same command again"


def find(wanted: Wanted, *, batch: int, template: bool) -> Tasks:
    """The tasks that are asked for. Raises what ``kbitq.eval.tasks.Tasks`` raises."""
    if console.quiet or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars; read when tqdm is imported
    with _apart():
        return Tasks(
            wanted.names, folder=wanted.include_path, shots=wanted.shots, limit=wanted.limit, batch=batch,
            template=template,
        )  # fmt: skip


def evaluate(
    tasks: Tasks, folder: Path, against: Path | None, load: Callable[[Path], Any], *, trust: bool, save: bool | None
) -> None:
    """Run tasks on a model, show its scores, and save them.

    Args:
        tasks: those of ``find``.
        folder: the model.
        against: another one, which is run on the same tasks.
        load: loads a model.
        trust: run Python files that come with a tokenizer.
        save: write the scores beside the model; None: where kbitq quantized it, and if they can be written.
    """
    card = _before(folder, save)
    found = _scores(tasks, folder, load, trust)
    reference = _scores(tasks, against, load, trust) if against is not None else None
    _show(found, reference)
    if card is None:
        return
    try:
        cards.save_scores(folder, found, reference, harness_version(), card)
    except KbitqError as error:
        if save:
            raise
        console.note(f"the result is not saved: {error}")


def _before(folder: Path, save: bool | None) -> str | None:
    """The card before, or None where nothing is to be saved. What cannot be saved is said before the work."""
    if save is False or (save is None and not (folder / REPORT_FILE).is_file()):
        return None
    try:
        return cards.before_saving(folder)
    except KbitqError as error:
        if save:
            raise
        console.note(f"the result will not be saved: {error}")
        return None


def _scores(tasks: Tasks, folder: Path, load: Callable[[Path], Any], trust: bool) -> list[TaskScore]:
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    model = load(folder)
    console.note(f"running {', '.join(tasks.names)} on {folder}")
    with at_once(_AGAIN), _apart():
        return tasks.run(model, tokenizer)


def _apart() -> contextlib.AbstractContextManager[Any]:
    """What the harness prints goes to stderr: stdout has the result alone."""
    return contextlib.redirect_stdout(sys.stderr)


def _show(found: Sequence[TaskScore], reference: Sequence[TaskScore] | None) -> None:
    others = {(score.task, score.metric): score.value for score in reference or ()}
    if console.wants_json:
        rows = [{**asdict(s), **_against(others.get((s.task, s.metric)))} for s in found]
        console.object({"harness": harness_version(), "tasks": rows})
        return
    if console.quiet:
        for score in found:
            console.data(f"{score.task} {score.metric} {score.value:.4f}")
        return
    table = Table("task", "<metric", "value", "±", *(["reference"] if reference else []), "shots", "samples")
    for score in found:
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        other = [f"{others[score.task, score.metric]:.4f}"] if reference else []
        table.add_row(
            score.task, score.metric, f"{score.value:.4f}", error, *other, f"{score.shots}", f"{score.samples:,}"
        )
    console.show(table)


def _against(value: float | None) -> dict[str, float]:
    return {} if value is None else {"against": value}
