"""What follows the weights: the files carried over, ledger, recipe, index, config, card, and last the checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.card import Subject, model_card
from kbitq.checkpoint.output.folder import (
    copy_carried,
    json_text,
    read_readme,
    without_quantization,
    write_checksums,
    write_index,
)
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.ledger import ledger_of, recipe_of
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.totals import LedgerRow
from kbitq.checkpoint.source.side_files import CARD_FILE, RECIPE_FILE, REPORT_FILE
from kbitq.format import (
    CONFIG_FILE,
    CONFIG_KEY,
    build_quantization_config,
    guarded_config,
    is_fused_experts,
    module_name,
    stored_dtype,
)


def finish_folder(
    plan: Plan, staging: Staging, totals: Mapping[str, Any], rows: Sequence[LedgerRow], digests: Mapping[str, str]
) -> None:
    """Complete a folder of quantized weights and publish it. ``digests``: SHA-256 of the weight files, by name."""
    output = plan.output
    copy_carried(plan.checkpoint, staging, but=CARD_FILE)
    ledger = ledger_of(plan, totals, rows)
    staging.write_file(REPORT_FILE, json_text(ledger))
    if (recipe := recipe_of(plan)) is not None:
        staging.write_file(RECIPE_FILE, recipe.encode())
    write_index(plan.shards, plan.stem, staging)
    config = without_quantization(plan.checkpoint.config)
    if output is None:
        staging.write_file(CONFIG_FILE, json_text(guarded_config(config, _quantization_config(plan))))
    else:
        ks = {module_name(t.name): t.k for t in plan.tensors if t.k is not None}
        quantization = output.quantization_config(ks, sorted(set(_not_converted(plan))))
        staging.write_file(CONFIG_FILE, json_text({**config, CONFIG_KEY: quantization}))
    _write_card(plan, staging, ledger)
    write_checksums(staging, digests)
    staging.publish_folder(replace=plan.options.force)


def _write_card(plan: Plan, staging: Staging, ledger: dict[str, Any]) -> None:
    source, readme = plan.checkpoint.storage.label, read_readme(plan.checkpoint)
    card = model_card(Subject(ledger, source, plan.checkpoint.config, plan.checkpoint.carried, readme=readme))
    staging.write_file(CARD_FILE, card.encode())


def _quantization_config(plan: Plan) -> dict[str, Any]:
    tensors = {n: m for s in plan.shards if s.meta is not None for n, m in s.meta.tensors.items()}
    return build_quantization_config(tensors, _not_converted(plan))


def _not_converted(plan: Plan) -> list[str]:
    """The modules whose weights are left as they are."""
    return [
        module_name(t.name)
        for t in plan.tensors
        if not t.quantized
        and len(t.shape) >= 2
        and stored_dtype(t.dtype).kind in ("float", "opaque")
        and (t.name.endswith(".weight") or is_fused_experts(t.name, t.shape))
    ]
