"""Totals over the tensors of a plan, a run or an inspection, and the rows that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.codecs.base import coded_nbytes, constant_nbytes
from kbitq.format import DEFAULT_CODEC, TensorMeta, element_count


class _LedgerRow(TypedDict):
    name: str
    verdict: str
    reason: str
    shape: list[int]
    dtype: str
    k: int | None
    bits_per_weight: float | None
    scale: str | None
    codebook: str | None
    sqnr_db: float | None
    max_abs_err: float | None
    bytes: int


class LedgerRow(_LedgerRow, total=False):
    """What is told of one tensor: in the ledger of an output, in reports of runs and of inspections.

    ``verdict`` is ``quantized`` or ``kept`` and ``reason`` says why. From ``k`` to ``max_abs_err`` all is None for a
    tensor that is kept. ``bits_per_weight`` leaves constant parts out, ``bytes`` has them in. ``sqnr_db`` is in dB.
    ``codec`` is there for another codec than the default one; ``calibrated`` and ``importance``, fingerprints, where
    error feedback or weights of the columns were used. ``would`` is there where a source is inspected: what each
    K would give, ``sqnr_db`` and ``bytes``; None for a tensor that would be kept.
    """

    codec: str
    calibrated: str
    importance: str
    would: dict[int, dict[str, Any]] | None


def quantized_row(name: str, meta: TensorMeta, reason: str = "") -> LedgerRow:
    """The row of a quantized tensor."""
    size = coded_nbytes(meta.codec, name, meta.shape, meta.k)
    row: LedgerRow = {
        "name": name, "verdict": "quantized", "reason": reason, "shape": list(meta.shape), "dtype": meta.dtype,
        "k": meta.k, "bits_per_weight": 8 * size / element_count(meta.shape), "scale": meta.scale,
        "codebook": meta.codebook, "sqnr_db": meta.sqnr_db, "max_abs_err": meta.max_abs_err,
        "bytes": size + constant_nbytes(meta.codec, name, meta.shape, meta.k),
    }  # fmt: skip
    if meta.codec != DEFAULT_CODEC:
        row["codec"] = meta.codec
    if meta.calibrated is not None:
        row["calibrated"] = meta.calibrated
    if meta.importance is not None:
        row["importance"] = meta.importance
    return row


def kept_row(name: str, reason: str, shape: Sequence[int], dtype: str, nbytes: int) -> LedgerRow:
    """The row of a tensor that is stored as it was."""
    row = dict.fromkeys(_LedgerRow.__annotations__) | {
        "name": name, "verdict": "kept", "reason": reason, "shape": list(shape), "dtype": dtype, "bytes": nbytes,
    }  # fmt: skip
    return cast("LedgerRow", row)


def codec_of(row: Mapping[str, Any]) -> str:
    """How the tensor of a row is coded; rows of the default codec do not say it."""
    return str(row.get("codec", DEFAULT_CODEC))


def totals(rows: Sequence[LedgerRow], bytes_in: int | None, sqnr_db: float | None) -> dict[str, Any]:
    """Totals of rows. ``bytes_in``: of the source, if known; ``sqnr_db``: over all quantized elements, if known.

    ``mean_sqnr_db`` is the SQNR of the relative error averaged over the quantized weights: it needs no source.
    """
    quantized = [r for r in rows if r["verdict"] == "quantized"]
    weights = sum(element_count(r["shape"]) for r in quantized)
    coded = [(codec_of(r), r["name"], r["shape"], r["k"]) for r in rows if r["k"] is not None]
    stored = sum(coded_nbytes(codec, name, shape, k) for codec, name, shape, k in coded)
    size = sum(r["bytes"] for r in rows)
    parameters = sum(element_count(r["shape"]) for r in rows)
    sqnrs = [(r["sqnr_db"], r["name"]) for r in quantized if r["sqnr_db"] is not None]
    worst = min(sqnrs, key=lambda pair: pair[0], default=None)
    errors = [r["max_abs_err"] for r in quantized if r["max_abs_err"] is not None]
    return {
        "tensors": len(rows), "quantized": len(quantized), "kept": len(rows) - len(quantized),
        "parameters": parameters, "quantized_parameters": weights,
        "coverage": weights / parameters if parameters else 0.0,
        "bytes_in": bytes_in, "bytes_out": size, "bytes": size,
        "compression": bytes_in / size if bytes_in and size else None,
        "bits_per_weight": 8 * stored / weights if weights else None,
        "codebook_bytes": sum(constant_nbytes(codec, name, shape, k) for codec, name, shape, k in coded),
        "sqnr_db": sqnr_db, "mean_sqnr_db": _mean_sqnr_db(quantized),
        "worst": {"name": worst[1], "sqnr_db": worst[0]} if worst else None,
        "max_abs_err": max(errors, default=None),
    }  # fmt: skip


def plan_totals(tensors: Iterable[TensorPlan]) -> dict[str, Any]:
    """Totals of a plan: the same keys, without what only a run measures."""
    rows = []
    bytes_in = 0
    for t in tensors:
        bytes_in += t.bytes_stored
        if t.k is None:
            rows.append(kept_row(t.name, t.reason, t.shape, t.dtype, t.bytes_out))
        else:
            rows.append(quantized_row(t.name, TensorMeta(t.k, t.shape, t.dtype, "", "", codec=t.codec), t.reason))
    return totals(rows, bytes_in, None)


def _mean_sqnr_db(rows: Iterable[LedgerRow]) -> float | None:
    weights = noise = 0.0
    for row in rows:
        if (sqnr_db := row["sqnr_db"]) is not None:
            count = element_count(row["shape"])
            weights += count
            noise += count * 10 ** (-sqnr_db / 10)
    return 10 * math.log10(weights / noise) if noise > 0 else None
