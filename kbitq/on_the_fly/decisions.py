"""What becomes of each weight, decided before the first one is quantized, and carried out one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kbitq import ops
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.storage import Storage
from kbitq.format import TensorMeta
from kbitq.quantized import QuantizedTensor, quantize

_NOWHERE = Path("on-the-fly")  # nothing is written


class Decisions:
    """The plan that ``kbitq quantize`` would have of the same weights, and what was made by it.

    Args:
        source: of the weights; a budget measures them.
        options: as the command would be given them.
        kept: names of weights that are left alone whatever the options say, and why.

    Attributes:
        described: of each weight that was quantized, what a file says of it.

    Raises:
        KbitqError: as :func:`kbitq.checkpoint.plan_quantize` and :func:`kbitq.checkpoint.choose`.
    """

    def __init__(self, source: Storage, options: QuantizeOptions, kept: Mapping[str, str]) -> None:
        planned = plan_quantize(source, _NOWHERE, options, dry=True)
        chosen = {t.name for t in planned.tensors if t.quantized}
        self._plan: Plan = choose(planned.with_kept({name: why for name, why in kept.items() if name in chosen}))
        self._tensors = {t.name: t for t in self._plan.tensors}
        self._metas = {n: m for s in self._plan.shards if s.meta is not None for n, m in s.meta.tensors.items()}
        self.described: dict[str, TensorMeta] = {}

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """The verdict on each weight, by name."""
        return self._tensors

    def quantize(self, name: str, tensor: Tensor) -> QuantizedTensor:
        """Quantize the weight ``name``, as was decided; where its dtype is another than its source's, these values."""
        decided, meta = self._tensors[name], self._metas[name]
        assert decided.k is not None
        importance = self._plan.importance.of(name, decided.shape) if self._plan.importance is not None else None
        on_cpu = tensor.is_cuda and ops.cuda_missing() is not None
        book = decided.codebook
        q = quantize(
            tensor.cpu() if on_cpu else tensor,
            decided.k,
            scale=decided.scale,
            codebook=book if isinstance(book, str | os.PathLike) else torch.tensor(book),
            importance=None if importance is None else torch.from_numpy(importance),
            hessian=self._hessian(decided),
            transposed=(found := self._plan.hessian(decided)) is not None and found.transposed,
            name=name,
            codec=decided.codec,
        )
        meta.sqnr_db, meta.max_abs_err = q.sqnr_db, q.max_abs_err
        self.described[name] = meta
        return q.to(tensor.device) if on_cpu else q

    def _hessian(self, decided: TensorPlan) -> Tensor | None:
        found = self._plan.hessian(decided)
        if found is None:
            return None
        made = [found.usable_triangle(expert) for expert in range(found.experts)]
        return made[0] if len(made) == 1 else torch.stack(made)
