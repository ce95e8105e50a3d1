"""The results of evaluations beside a model: ``quantization_evaluation.json``, without time, path or machine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbitq.checkpoint.output.extra_output import write_extra_output
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.side_files import EVALUATION_FILE
from kbitq.errors import KbitqError

if TYPE_CHECKING:
    from kbitq.eval.perplexity import Evaluation
    from kbitq.eval.tasks import TaskScore

Row = dict[str, Any]
_DIGITS = 6  # significant ones: more differ between machines
_READ_BYTES = 1 << 20
_NUMBERS = ("perplexity", "loss", "windows", "window")
_COMPARED = ("kl_mean", "kl_median", "kl_p99", "same_top1", "reference_perplexity")


def read_evaluations(folder: Path) -> list[Row]:
    """The results on texts beside a model, in the order in which they were saved; none where there is no such file.

    Raises:
        KbitqError: the file is not what ``save_evaluation`` writes.
    """
    path = folder / EVALUATION_FILE
    return parse_evaluations(path.read_bytes(), str(path)) if path.is_file() else []


def read_tasks(folder: Path) -> list[Row]:
    """The scores of tasks beside a model, as ``read_evaluations``: a row for each metric of each task."""
    path = folder / EVALUATION_FILE
    return parse_tasks(path.read_bytes(), str(path)) if path.is_file() else []


def parse_evaluations(text: bytes, where: str) -> list[Row]:
    """The results in the text of a file; ``where`` names it. Raises KbitqError as ``read_evaluations`` does."""
    return _rows(parse_json_object(text, where).get("evaluations"), _is_result, where)


def parse_tasks(text: bytes, where: str) -> list[Row]:
    """The scores of tasks in the text of a file; ``where`` names it. Raises KbitqError as ``read_tasks`` does."""
    return _rows(parse_json_object(text, where).get("tasks", []), _is_score, where)


def _rows(found: Any, fits: Callable[[Any], bool], where: str) -> list[Row]:
    if not isinstance(found, list) or not all(map(fits, found)):
        hint = f"remove {where}, and run kbitq eval --save again"
        raise KbitqError(f"{where} does not hold results of kbitq eval", hint=hint)
    return found


def save_evaluation(folder: Path, result: Evaluation, text: Path) -> None:
    """Add a result to those beside a model; an earlier one on the same windows of the same text gives way.

    Args:
        folder: a folder that kbitq quantized.
        result: what was measured.
        text: the file of text or of tokens that it was measured on; its name and SHA-256 are written.

    Raises:
        KbitqError: the file of results is another's, is ``text`` or a link, or it cannot be written.
    """
    new = _result(result, text)
    others = [row for row in read_evaluations(folder) if _subject(row) != _subject(new)]
    _write(folder, [*others, new], read_tasks(folder), [text])


def save_tasks(folder: Path, scores: Sequence[TaskScore], against: Sequence[TaskScore] | None, harness: str) -> None:
    """Add scores to those beside a model; earlier ones of the same tasks, samples and shots give way.

    Args:
        folder: a folder that kbitq quantized.
        scores: the model's.
        against: the reference's on the same tasks, if there is one.
        harness: what made them, with its version.

    Raises:
        KbitqError: the file of results is another's or a link, or it cannot be written.
    """
    reference = {(score.task, score.metric): _rounded(score.value) for score in against or ()}
    new = []
    for score in scores:
        row = {key: value for key, value in vars(score).items() if value is not None}
        row |= {key: _rounded(row[key]) for key in ("value", "stderr") if key in row}
        if (found := reference.get((score.task, score.metric))) is not None:
            row["against"] = found
        new.append({**row, "harness": harness})
    made = set(map(_task, new))
    others = [row for row in read_tasks(folder) if _task(row) not in made]
    _write(folder, read_evaluations(folder), [*others, *new], [])


def _write(folder: Path, evaluations: list[Row], tasks: list[Row], inputs: list[Path]) -> None:
    path = folder / EVALUATION_FILE
    rows = {"evaluations": evaluations, **({"tasks": tasks} if tasks else {})}
    try:
        write_extra_output(path, json.dumps(rows, indent=2) + "\n", inputs, force=True)
    except OSError as error:
        raise KbitqError(f"{path} cannot be written ({error.strerror})") from None


def _task(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["samples"], row["shots"]


def _result(result: Evaluation, text: Path) -> Row:
    compared, found = {}, result.divergence
    if found is not None:
        values = (found.mean, found.median, found.p99, found.same_top1, found.reference_perplexity)
        compared = {"against": dict(zip(_COMPARED, map(_rounded, values), strict=True))}
    return {
        "text": {"name": text.name, "sha256": _digest(text)},
        "windows": result.windows, "window": result.window,
        "perplexity": _rounded(result.perplexity), "loss": _rounded(result.loss), **compared,
    }  # fmt: skip


def _subject(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the results of one evaluation from another's."""
    return row["text"]["sha256"], row["windows"], row["window"]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _is_result(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("text"), dict):
        return False
    text, compared = row["text"], row.get("against", dict.fromkeys(_COMPARED, 0))
    named = isinstance(text.get("name"), str) and isinstance(text.get("sha256"), str)
    return (
        named
        and all(_is_number(row.get(key)) for key in _NUMBERS)
        and isinstance(compared, dict)
        and all(_is_number(compared.get(key)) for key in _COMPARED)
    )


def _is_score(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("task", "metric", "harness")):
        return False
    counts = all(isinstance(row.get(key), int) for key in ("samples", "shots"))
    return counts and all(_is_number(row.get(key, 0)) for key in ("stderr", "against")) and _is_number(row.get("value"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
