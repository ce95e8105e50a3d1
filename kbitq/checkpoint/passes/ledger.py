"""What a folder says of how it was made: ``quantization_report.json``, and a recipe where there are many rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kbitq
from kbitq.card import is_repository
from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.output.layout import DEFAULT_SHARD_BYTES
from kbitq.checkpoint.plan.options import FITTED
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.totals import LedgerRow, kept_row
from kbitq.checkpoint.source.open import Checkpoint, read_header
from kbitq.checkpoint.source.side_files import RECIPE_FILE, WEIGHTS_SUFFIX
from kbitq.choose.knapsack import AUTO_ERROR
from kbitq.choose.recipe import recipe_text, rule_text
from kbitq.choose.selection import TensorRule
from kbitq.codecs import codebooks
from kbitq.codecs.base import output_codec
from kbitq.format import DEFAULT_CODEC, FORMAT_VERSION, coding_json

_FEW_RULES = 3  # rules that read well on a command line; more of them go into a recipe


def ledger_of(plan: Plan, totals: Mapping[str, Any], rows: Sequence[LedgerRow]) -> dict[str, Any]:
    """Where every tensor of the source went, those in files carried over included, and what makes the bytes again.

    A source on the Hub is named, with its commit. One on a disk is not, nor is a folder of another file: where they
    lie is of no use elsewhere, and must not change a byte here.
    """
    options = plan.options
    return {
        "format_version": FORMAT_VERSION,
        "kbitq": kbitq.__version__,
        **({"source": label} if is_repository(label := plan.checkpoint.storage.label) else {}),
        "options": {
            "k": options.k, **_budget_options(plan), "scale": options.scale,
            "codebook": _kind(options.codebook),
            "include": list(options.include), "exclude": list(options.exclude), "only": list(options.only),
            "keep_embeddings": options.keep_embeddings, "on_nonfinite": options.on_nonfinite,
            "rule": [rule_text(rule) for rule in _portable(options.rules)],
            **_coding_options(options.codec),
            **({"max_shard_size": options.max_shard_size} if options.max_shard_size != DEFAULT_SHARD_BYTES else {}),
        },
        **({"recipe": RECIPE_FILE} if len(options.rules) > _FEW_RULES else {}),
        **({"importance": plan.importance.sha256} if plan.importance is not None else {}),
        **({"calibration": plan.statistics.fingerprint} if plan.statistics is not None else {}),
        **({"files": files} if (files := list(_files(plan))) else {}),
        **({"budget": plan.choice.to_json()} if plan.choice is not None else {}),
        "totals": dict(totals),
        "tensors": [*rows, *_carried_tensors(plan.checkpoint)],
        "dropped": plan.checkpoint.dropped,
        **({"source_formats": plan.checkpoint.schemes} if plan.checkpoint.schemes else {}),
        "files_not_carried": plan.checkpoint.notes,
    }  # fmt: skip


def recipe_of(plan: Plan) -> str | None:
    """The rules of a run and its options, as TOML, where they are too many for a command line; else None."""
    options = plan.options
    if len(options.rules) <= _FEW_RULES:
        return None
    names = ("k", "scale", "include", "exclude", "only", "keep_embeddings", "max_shard_size", "on_nonfinite")
    given = {name: getattr(options, name) for name in names}
    given["codebook"] = _portable_name(options.codebook)
    given["codec"] = options.codec if options.codec != DEFAULT_CODEC else None
    return recipe_text(given | plan.made_with, _portable(options.rules))


def _coding_options(codec: str) -> dict[str, Any]:
    """A codec as the command line has it."""
    output = output_codec(codec)
    if output is None:
        return coding_json(codec)
    group = codec.removeprefix(output.output).removeprefix("-").removeprefix("g")
    return {"format": output.output, **({"group": group} if group else {})}


def _kind(spec: str) -> str:
    """The kind of codebook that an option names; a file is ``custom``."""
    return spec if spec in (*codebooks.BUILTIN, *FITTED) else "custom"


def _portable_name(spec: str) -> str:
    return spec if _kind(spec) == spec else Path(spec).name


def _portable(rules: Sequence[TensorRule]) -> list[TensorRule]:
    return [replace(rule, codebook=rule.codebook and _portable_name(rule.codebook)) for rule in rules]


def _files(plan: Plan) -> Iterator[dict[str, str]]:
    """The files that the command needs beside the source."""
    if plan.importance is not None:
        yield {"option": "importance", "name": plan.importance.path.name, "sha256": plan.importance.sha256}
    if plan.statistics is not None and plan.options.calibration is not None:
        name = Path(plan.options.calibration).name
        yield {"option": "calibration", "name": name, "sha256": plan.statistics.fingerprint}
    specs = [("codebook", plan.options.codebook), *(("rule", rule.codebook or "") for rule in plan.options.rules)]
    for option, spec in dict.fromkeys(specs):
        if spec and _kind(spec) != spec and Path(spec).is_file():
            yield {"option": option, "name": Path(spec).name, "sha256": sha256(Path(spec))}


def _budget_options(plan: Plan) -> dict[str, Any]:
    """A budget as the command line has it; what is the default is left out."""
    budget = plan.options.budget
    if budget is None:
        return {}
    usual = replace(budget, error=AUTO_ERROR).error_kind(calibrated=plan.statistics is not None)
    given = {
        "bpw": budget.bpw, "size": budget.size, "error": plan.error_kind if plan.error_kind != usual else None,
        "weight": [f"{pattern}={repr(factor).removesuffix('.0')}" for pattern, factor in budget.factors] or None,
        "tie": list(budget.ties) or None, "sample": budget.sample or None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _carried_tensors(checkpoint: Checkpoint) -> list[LedgerRow]:
    """Rows for the tensors of safetensors files that are carried over whole (adapters and the like)."""
    return [
        kept_row(ref.name, f"in {name}, carried over whole", ref.shape, ref.dtype, ref.nbytes)
        for name in checkpoint.carried
        if name.endswith(WEIGHTS_SUFFIX)
        for ref in read_header(checkpoint.storage, name)[0].tensors
    ]
