"""Tasks of the lm-evaluation-harness (the package lm-eval), run on a model that is loaded already."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbitq.errors import BuildError, KbitqError
from kbitq.eval.failures import told

_STDERR = "_stderr"  # what the harness puts between a metric and its filter, for the error of the mean
_NO_FILTER = "none"


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    Attributes:
        task: the name of a task, or of a group whose metrics are means over its tasks.
        metric: the harness's name, with its filter if there is one: ``acc``, ``exact_match,strict-match``.
        value: of the metric, in its own unit.
        stderr: standard error of the value, where the harness knows it.
        samples: how many samples were read.
        shots: examples in front of each.
        version: of the task.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int
    shots: int
    version: str


class Tasks:
    """Tasks that were found, to be run on one model after another.

    Args:
        names: of tasks or groups of tasks; ``mmlu_*`` is a pattern.
        folder: of further tasks, as YAML files.
        shots: examples in front of each sample; None: as many as the task says.
        limit: samples of each task that are read; None: all.
        batch: samples read at once.
        template: put what is asked into the model's chat template.

    Raises:
        BuildError: lm-eval is not installed.
        KbitqError: there is no task of a name.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        folder: Path | None = None,
        shots: int | None = None,
        limit: int | None = None,
        batch: int = 1,
        template: bool = False,
    ) -> None:
        self._harness = _harness()
        with told("lm-eval cannot list its tasks"):
            self._manager = self._harness.tasks.TaskManager(include_path=str(folder) if folder else None)
            self.names = _matched(names, self._manager)
        self._shots, self._limit, self._batch, self._template = shots, limit, batch, template

    def run(self, model: Any, tokenizer: Any) -> list[TaskScore]:
        """Scores of a causal language model of transformers and its tokenizer.

        Raises:
            KbitqError: the harness fails, as where a data set cannot be had.
        """
        with told("lm-eval fails"):
            found = self._harness.simple_evaluate(
                model=_wrapped(model, tokenizer, self._batch),
                tasks=self.names, num_fewshot=self._shots, limit=self._limit, batch_size=self._batch,
                task_manager=self._manager, apply_chat_template=self._template, log_samples=False,
            )  # fmt: skip
        return scores(found, self.names)


def harness_version() -> str:
    """``lm-eval 0.4.13``."""
    return f"lm-eval {_harness().__version__}"


def scores(found: Mapping[str, Any], names: Iterable[str]) -> list[TaskScore]:
    """The scores in what ``lm_eval.simple_evaluate`` returns, for the tasks and groups of the given names.

    A group that has no metrics of its own stands for its tasks.
    """
    return [score for name in names for task in _with_metrics(found, name) for score in _scores(found, task)]


def _scores(found: Mapping[str, Any], task: str) -> Iterable[TaskScore]:
    row = found["results"][task]
    for key, value in row.items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith(_STDERR) or not _is_number(value):
            continue
        error = row.get(f"{metric}{_STDERR},{kind}")
        yield TaskScore(
            task,
            metric if kind == _NO_FILTER else key,
            float(value),
            float(error) if _is_number(error) else None,
            sum(found["n-samples"][leaf]["effective"] for leaf in _leaves(found, task) if leaf in found["n-samples"]),
            max((found["n-shot"].get(leaf) or 0 for leaf in _leaves(found, task)), default=0),
            str(found["versions"].get(task)),
        )


def _with_metrics(found: Mapping[str, Any], name: str) -> list[str]:
    """The name itself if it has metrics; else the nearest below it that do."""
    if any("," in key for key in found["results"].get(name, ())):
        return [name]
    below = found.get("group_subtasks", {}).get(name, ())
    return [task for part in below for task in _with_metrics(found, part)]


def _leaves(found: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group, and of its groups; of a task, itself."""
    below = found.get("group_subtasks", {}).get(name, ())
    return [leaf for part in below for leaf in _leaves(found, part)] if below else [name]


def _matched(names: Sequence[str], manager: Any) -> list[str]:
    """The tasks that names or patterns stand for, each once."""
    result: dict[str, None] = {}
    for name in names:
        matched = manager.match_tasks([name])
        if not matched:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"near it are {', '.join(near)}" if near else "python -m lm_eval ls tasks lists all"
            raise KbitqError(f"lm-eval has no task {name!r}", hint=hint)
        result.update(dict.fromkeys(sorted(matched)))
    return list(result)


def _harness() -> Any:
    try:
        import lm_eval
        import lm_eval.tasks
    except ModuleNotFoundError as error:
        sentence = "tasks are those of the lm-evaluation-harness, which is not installed"
        if error.name != "lm_eval":
            sentence = f"the lm-evaluation-harness lacks the package {error.name}"
        raise BuildError(sentence, hint="pip install 'lm-eval[hf]'") from None
    return lm_eval


def _wrapped(model: Any, tokenizer: Any, batch: int) -> Any:
    """A model as the harness takes it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
