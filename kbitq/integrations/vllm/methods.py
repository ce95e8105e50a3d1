"""The methods of vLLM's layers, on vLLM's base classes; what they do is in ``kbitq.integrations.serving``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.parameter import BasevLLMParameter, PerTensorScaleParameter

from kbitq.integrations.serving import expert_parameters, experts
from kbitq.integrations.serving.linear import PackedLinear, PartLoading
from kbitq.integrations.serving.matrix import fixed
from kbitq.integrations.serving.names import StoredNames
from kbitq.integrations.serving.vocabulary import PackedVocabulary


class PartParameter(PartLoading, BasevLLMParameter):
    """Takes a part that is cut where the matrix is, or an ordinary weight."""


class ConstantParameter(PartLoading, PerTensorScaleParameter):
    """Takes a part of which there is one for the whole matrix."""


@register_weight_loader_v2_supported_method
class KbitqLinearMethod(PackedLinear, LinearMethodBase):
    """Of linear layers, fused ones included."""

    parameter_class, constant_class = PartParameter, ConstantParameter


class KbitqVocabularyMethod(PackedVocabulary, QuantizeMethodBase):
    """Of embeddings and output heads."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """As of :class:`PackedVocabulary`; an empty ``weight`` stays, by which LoRA finds device and dtype."""
        super().process_weights_after_loading(layer)
        if "weight" not in layer._parameters:
            device = next(layer.parameters()).device
            layer.register_parameter("weight", fixed(torch.empty(0, dtype=layer.kbitq_dtype, device=device)))


class KbitqExpertsMethod(expert_parameters.ExpertsLoading, FusedMoEMethodBase):
    """Of a layer's experts.

    Args:
        stored: what the folder has.
        prefix: the layer's name in it.
        layer: the layer.
        dummy: whether weights are to be made up and not loaded.
    """

    def __init__(self, stored: StoredNames, prefix: str, layer: Any, dummy: bool = False) -> None:
        super().__init__(layer.moe_config)
        self.stored, self.prefix, self.dummy = stored, prefix, dummy

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """True: :meth:`apply` runs shared experts. vLLM would use a stream of their own, but in a recorded graph
        only one stream at a time may multiply by tiles (``kbitq.ops.tiled_linear``)."""
        return True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        """The sizes as they are: the weights come as files have them."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: that is for vLLM's own kernels."""
        return

    def shares(self, layer: Any) -> tuple[int, int]:
        """The number of devices that every expert is cut for, and which of them this is."""
        return max(self.moe.tp_size, 1), self.moe.tp_rank

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace what has arrived by stacks that one operator multiplies by."""
        held = layer._parameters.get(expert_parameters.STEMS[1])
        arriving = expert_parameters.forget(layer)
        if arriving is None or held is None:
            return
        act, gated = layer.activation, layer.moe_config.is_act_and_mul
        if self.dummy:
            arriving.make_up(self.stored.coding_below(self.prefix), gated, self.moe.tp_rank, held.device)

        def activation(hidden: Tensor) -> Tensor:
            out = hidden.new_empty((hidden.shape[0], hidden.shape[1] // (2 if gated else 1)))
            return apply_moe_activation(act, out, hidden.contiguous())

        made = experts.PackedExperts(
            arriving.finished(layer.params_dtype), activation, layer.apply_router_weight_on_input
        )
        experts.keep(self.prefix, made)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Tokens through the experts that were chosen for them; ``[tokens, hidden]``. Shared ones keep their output."""
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        ids = topk_ids.long()
        if layer.expert_map is not None:
            ids = layer.expert_map[ids].long()
        return torch.ops.kbitq.experts(x, topk_weights, ids, self.prefix)
