"""What follows the weights: the files carried over, the ledger, the index, the config, and last the checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kbitq.checkpoint.output.folder import (
    copy_carried,
    json_text,
    without_quantization,
    write_index,
    write_sums,
)
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.plan.options import FITTED
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.totals import kept_row
from kbitq.checkpoint.source.open import Checkpoint, read_header
from kbitq.checkpoint.source.side_files import REPORT_FILE, WEIGHTS_SUFFIX
from kbitq.choose.knapsack import Budget
from kbitq.choose.recipe import rule_text
from kbitq.codecs import codebooks
from kbitq.format import (
    CONFIG_FILE,
    CONFIG_KEY,
    FORMAT_VERSION,
    build_quantization_config,
    is_fused_experts,
    module_name,
    stored_dtype,
)


def finish_folder(
    plan: Plan, staging: Staging, totals: Mapping[str, Any], rows: Sequence[Any], digests: Mapping[str, str]
) -> None:
    """Complete a folder of quantized weights and publish it. ``digests``: SHA-256 of the weight files, by name."""
    copy_carried(plan.checkpoint, staging)
    staging.write_file(REPORT_FILE, json_text(_ledger(plan, totals, rows)))
    write_index(plan.shards, plan.stem, staging)
    config = {**without_quantization(plan.checkpoint.config), CONFIG_KEY: _quantization_config(plan)}
    staging.write_file(CONFIG_FILE, json_text(config))
    write_sums(staging, digests)
    staging.publish_folder(replace=plan.options.force)


def _quantization_config(plan: Plan) -> dict[str, Any]:
    tensors = {n: m for s in plan.shards if s.meta is not None for n, m in s.meta.tensors.items()}
    not_converted = [
        module_name(t.name)
        for t in plan.tensors
        if not t.quantized
        and len(t.shape) >= 2
        and stored_dtype(t.dtype).kind in ("float", "opaque")
        and (t.name.endswith(".weight") or is_fused_experts(t.name, t.shape))
    ]
    return build_quantization_config(tensors, not_converted)


def _ledger(plan: Plan, totals: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """``quantization_report.json``: where every tensor of the source went, those in files carried over included."""
    options = plan.options
    return {
        "format_version": FORMAT_VERSION,
        "options": {
            "k": options.k, **_budget_options(options.budget), "scale": options.scale,
            "codebook": codebook_kind(options.codebook),
            "include": list(options.include), "exclude": list(options.exclude), "only": list(options.only),
            "keep_embeddings": options.keep_embeddings, "on_nonfinite": options.on_nonfinite,
            "rule": [rule_text(replace(r, codebook=r.codebook and codebook_kind(r.codebook))) for r in options.rules],
        },
        **({"importance": plan.importance.sha256} if plan.importance is not None else {}),
        **({"budget": plan.choice.to_json()} if plan.choice is not None else {}),
        "totals": dict(totals),
        "tensors": [*rows, *_carried_tensors(plan.checkpoint)],
        "dropped": plan.checkpoint.dropped,
        "files_not_carried": plan.checkpoint.notes,
    }  # fmt: skip


def codebook_kind(spec: str) -> str:
    """The kind of codebook that an option names: a path, which is of no use elsewhere, is ``custom``."""
    return spec if spec in (*codebooks.BUILTIN, *FITTED) else "custom"


def _budget_options(budget: Budget | None) -> dict[str, Any]:
    """A budget as the command line has it; what is the default is left out."""
    if budget is None:
        return {}
    given = {
        "bpw": budget.bpw, "size": budget.size, "error": budget.error if budget.error != "relative" else None,
        "weight": [f"{pattern}={factor:g}" for pattern, factor in budget.factors] or None,
        "tie": list(budget.ties) or None, "sample": budget.sample or None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _carried_tensors(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Rows for the tensors of safetensors files that are carried over whole (adapters and the like)."""
    return [
        kept_row(ref.name, f"in {name}, carried over whole", ref.shape, ref.dtype, ref.nbytes)
        for name in checkpoint.carried
        if name.endswith(WEIGHTS_SUFFIX)
        for ref in read_header(checkpoint.storage, name)[0].tensors
    ]
