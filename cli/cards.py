"""The model card of what lies on the disk: read from its files, for ``card``, ``push`` and ``eval --save``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbitq import checkpoint
from kbitq.card import Subject, model_card, source_in
from kbitq.checkpoint.output.extra_output import check_extra_output, write_extra_output
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.side_files import CARD_FILE, EVALUATION_FILE, REPORT_FILE
from kbitq.checkpoint.written.stored import open_quantized
from kbitq.cli.console import console
from kbitq.errors import CheckpointError
from kbitq.eval.record import read_evaluations, read_tasks, save_evaluation, save_tasks
from kbitq.format import CONFIG_FILE

if TYPE_CHECKING:
    from kbitq.eval.perplexity import Evaluation
    from kbitq.eval.tasks import TaskScore

_ROW_KEYS = frozenset(("name", "verdict", "k", "scale", "codebook", "sqnr_db"))


def card_of(path: Path, *, repository: str | None = None, base: str | None = None, more: Collection[str] = ()) -> str:
    """The card of a quantized folder or file.

    Args:
        path: what ``kbitq quantize`` wrote.
        repository: where it will be published, as ``org/name``.
        base: the source as ``org/name[@revision]``, where that is known better.
        more: names of files that will be beside those of the folder.

    Raises:
        CheckpointError: it is not quantized, or what lies beside it cannot be read; FormatError.
    """
    subject = subject_of(path, more)
    title = repository.rpartition("/")[2] if repository else None
    if path.is_dir():
        return model_card(subject, title=title, place=repository or ".", base=base)
    return model_card(subject, title=title or path.stem, place=repository or path.name, base=base, out=path.name)


def subject_of(path: Path, more: Collection[str] = ()) -> Subject:
    """What the card of a folder or file is about; ``more`` as for ``card_of``."""
    if not path.is_dir():
        return Subject(_found(path))
    ledger = _ledger(path / REPORT_FILE) if (path / REPORT_FILE).is_file() else _found(path)
    readme, config, source = path / CARD_FILE, path / CONFIG_FILE, ledger.get("source")
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else None
    return Subject(
        ledger,
        source if isinstance(source, str) else source_in(text or ""),
        parse_json_object(config.read_bytes(), str(config)) if config.is_file() else None,
        sorted({*(entry.name for entry in path.iterdir()), *more}),
        read_evaluations(path),
        text,
        read_tasks(path),
    )


def before_saving(folder: Path, text: Path | None = None) -> str:
    """The card before a result on ``text`` is saved. Raises CheckpointError where ``kbitq eval --save`` cannot save.

    What is written may not be the text, nor a link to a file elsewhere.
    """
    if not (folder / REPORT_FILE).is_file():
        raise CheckpointError(
            f"{folder} is not a folder that kbitq quantized, so --save has no place for the result",
            hint="leave --save; --json prints the result as data",
        )
    for name in (EVALUATION_FILE, CARD_FILE):
        check_extra_output(folder / name, [text] if text is not None else [], force=True)
    return card_of(folder)


def save(folder: Path, result: Evaluation, text: Path | None, before: str) -> None:
    """Write a result beside a model, and its card anew where README.md still is the one made ``before``."""
    assert text is not None
    save_evaluation(folder, result, text)
    _renew(folder, before, [text])


def save_scores(
    folder: Path, scores: Sequence[TaskScore], against: Sequence[TaskScore] | None, harness: str, before: str
) -> None:
    """The same with scores of tasks, those of a reference, and what made them."""
    save_tasks(folder, scores, against, harness)
    _renew(folder, before, [])


def _renew(folder: Path, before: str, inputs: Sequence[Path]) -> None:
    readme = folder / CARD_FILE
    if readme.is_file() and readme.read_text(encoding="utf-8", errors="replace") == before:
        write_extra_output(readme, card_of(folder), inputs, force=True)
        console.note(f"the result is in {folder / EVALUATION_FILE} and in the model card, {readme}")
        return
    console.note(f"the result is in {folder / EVALUATION_FILE}")
    console.note(f"{readme} has been edited and stays as it is; kbitq card {folder} prints the card with the result")


def _ledger(path: Path) -> dict[str, Any]:
    """What quantize wrote beside the model."""
    ledger = parse_json_object(path.read_bytes(), str(path))
    rows = ledger.get("tensors")
    whole = isinstance(ledger.get("totals"), dict) and isinstance(rows, list)
    if not whole or not all(isinstance(row, dict) and row.keys() >= _ROW_KEYS for row in rows or []):
        raise CheckpointError(f"{path} is not as kbitq quantize writes it", hint=f"kbitq verify {path.parent}")
    return ledger


def _found(path: Path) -> dict[str, Any]:
    """What a checkpoint without a ledger tells of itself: of its options, those that its tensors show."""
    report = checkpoint.inspect(path)
    if not report.quantized:
        raise CheckpointError(f"{path} is not quantized by kbitq", hint=f"kbitq quantize {path} --k 3")
    ledger: dict[str, Any] = {"totals": report.totals, "tensors": report.tensors, "options": _options(report.tensors)}
    digests = {tensor.meta.importance for tensor in open_quantized(path).tensors.values()}
    named = [{"option": "importance", "name": "IMPORTANCE", "sha256": digest} for digest in digests if digest]
    return {**ledger, "files": named}


def _options(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    quantized = [row for row in rows if row["verdict"] == "quantized"]
    found = {key: {row[key] for row in quantized} for key in ("k", "scale", "codebook")}
    return {key: values.pop() for key, values in found.items() if len(values) == 1}
