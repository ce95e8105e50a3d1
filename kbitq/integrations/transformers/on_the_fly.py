"""Quantizing while transformers loads: each weight is replaced as it arrives, so only one is ever held dense."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import should_convert_module

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs.base import part_kinds, part_name
from kbitq.integrations.transformers.manifest import STORED
from kbitq.integrations.transformers.routes import has_packed_class, remember, replace_module, share_with_tied
from kbitq.nn import pack_experts
from kbitq.nn.packed import WeightInfo, frozen
from kbitq.quantized import QuantizedTensor, quantize


def is_quantized_here(model: Any, name: str, config: Any) -> bool:
    """Whether the weight ``name`` of the model is quantized when it arrives: what ``kbitq quantize`` would choose."""
    prefix, _, leaf = name.rpartition(".")
    module = model.get_submodule(prefix)
    parameter = module._parameters.get(leaf)
    if parameter is None:
        return False
    is_stack = fmt.is_fused_experts(name, parameter.shape)
    if not is_stack and not (has_packed_class(module) and leaf == "weight" and prefix):
        return False
    skipped = [*(config.modules_to_not_convert or ()), *(model._keep_in_fp32_modules or ())]
    if skipped and not should_convert_module(name if is_stack else prefix, skipped):
        return False
    return config.selection().verdict(name, parameter.shape, STORED.get(parameter.dtype, "opaque")).quantize


class QuantizeOnLoad(ConversionOps):
    """The loader's last operation on a weight: it puts the packed module into the model and hands nothing back.

    Args:
        config: a ``KbitqConfig``.
        merges: source patterns of the conversions that stack experts, and concatenate them by rows. Their parts are
            quantized one by one, as in a file that has them apart, so that they can be saved apart again.
    """

    def __init__(self, config: Any, merges: Collection[tuple[str, ...]] = ()) -> None:
        self.config, self.merges = config, merges

    def __deepcopy__(self, memo: Any) -> QuantizeOnLoad:
        return self

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        model, missing_keys = kwargs["model"], kwargs.get("missing_keys")
        rest: dict[str, Any] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            if not is_quantized_here(model, name, self.config):
                rest[name] = value
                continue
            if missing_keys is not None:
                tied = {t for t, s in model.all_tied_weights_keys.items() if s == name}
                missing_keys -= {name} | tied
            if tuple(source_patterns) in self.merges and fmt.is_fused_experts(name, tensor.shape):
                self._place_parts(model, name, tensor, len(source_patterns))
            else:
                self._place(model, name, tensor)
        return rest

    def _place(self, model: Any, name: str, tensor: Tensor) -> None:
        leaf = name.rpartition(".")[2]
        q = self._quantize(tensor, name)
        made = replace_module(model, name, q.k, q.codec)
        for part, value in q.parts.items():
            setattr(made, part_name(leaf, part), _loaded(value))
        remember(made, leaf, WeightInfo.of(q))
        share_with_tied(model, name, q.codec)

    def _place_parts(self, model: Any, name: str, tensor: Tensor, parts: int) -> None:
        prefix, _, leaf = name.rpartition(".")
        rows = [[self._quantize(part, name) for part in expert.chunk(parts)] for expert in tensor]
        first = rows[0][0]
        made = pack_experts(model.get_submodule(prefix), {leaf: (first.k, parts)}, first.codec)
        for part, constant in part_kinds(first.codec).items():
            join = torch.stack if constant else torch.cat
            experts = [join([q.parts[part] for q in row]) for row in rows]
            setattr(made, part_name(leaf, part), _loaded(torch.stack(experts)))
        remember(made, leaf, WeightInfo(first.dtype, first.scale, first.codebook_name, codec=first.codec))

    def _quantize(self, tensor: Tensor, name: str) -> QuantizedTensor:
        config, on_cpu = self.config, tensor.is_cuda and ops.cuda_missing() is not None
        source = tensor.cpu() if on_cpu else tensor
        q = quantize(source, config.k, scale=config.scale, codebook=config.codebook, name=name, codec=config.codec)
        return q.to(tensor.device) if on_cpu else q


def _loaded(tensor: Tensor) -> nn.Parameter:
    """A parameter that transformers does not initialise."""
    made = frozen(tensor)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made
