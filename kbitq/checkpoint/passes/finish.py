"""What follows the weights: the files carried over, the ledger, the index, the config, and last the checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kbitq.checkpoint.output.checksums import format_sums
from kbitq.checkpoint.output.layout import Shard, index_json, index_name
from kbitq.checkpoint.output.staging import FileWriter, Staging
from kbitq.checkpoint.passes.passes import sha256
from kbitq.checkpoint.plan.plan import FITTED, Plan
from kbitq.checkpoint.plan.totals import kept_row
from kbitq.checkpoint.source.open import Checkpoint, read_header
from kbitq.checkpoint.source.side_files import NOT_SUMMED, REPORT_FILE, SUMS_FILE, WEIGHTS_SUFFIX
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

_COPY_BYTES = 1 << 20


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


def copy_carried(checkpoint: Checkpoint, staging: Staging) -> None:
    """Copy the files that go with the weights."""
    for name in checkpoint.carried:
        file = checkpoint.storage.open(name)
        try:
            with FileWriter(staging.path(name), file.size) as writer:
                for start in range(0, file.size, _COPY_BYTES):
                    data = bytearray(min(_COPY_BYTES, file.size - start))
                    file.read_into(memoryview(data), start)
                    writer.write(start, bytes(data))
                writer.sync()
        finally:
            file.close()


def write_index(shards: Sequence[Shard], stem: str, staging: Staging) -> None:
    """Write the index that several shards need."""
    if len(shards) > 1:
        staging.write_file(index_name(stem), index_json(shards).encode())


def write_sums(staging: Staging, digests: Mapping[str, str]) -> None:
    """Write SHA256SUMS over the files of the output, as ``sha256sum -c`` reads it; ``digests`` are known already."""
    names = [p.relative_to(staging.output).as_posix() for p in staging.output.rglob("*") if p.is_file()]
    sums = {n: digests.get(n) or sha256(staging.output / n) for n in names if n not in NOT_SUMMED}
    staging.write_file(SUMS_FILE, format_sums(sums))


def json_text(value: Any) -> bytes:
    """JSON as transformers writes it to files: indented, a newline at the end; keys in the order given."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def without_quantization(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config.json without ``quantization_config``, at its top and in the parts of a composite model."""
    parts = {key: value for key, value in (config or {}).items() if key != CONFIG_KEY}
    for key, value in parts.items():
        if isinstance(value, dict) and key.endswith("_config") and CONFIG_KEY in value:
            parts[key] = {k: v for k, v in value.items() if k != CONFIG_KEY}
    return parts


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
