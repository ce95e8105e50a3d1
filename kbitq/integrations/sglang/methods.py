"""The methods of SGLang's layers, on SGLang's base classes; what they do is in ``kbitq.integrations.serving``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import linear as sglang_linear
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.parameter import BasevLLMParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizeMethodBase
from torch import Tensor, nn

from kbitq.integrations.serving import expert_parameters, experts
from kbitq.integrations.serving.linear import PackedLinear, PartLoading
from kbitq.integrations.serving.names import StoredNames
from kbitq.integrations.serving.vocabulary import PackedVocabulary

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}


class PartParameter(PartLoading, BasevLLMParameter):
    """Takes a part that is cut where the matrix is, or an ordinary weight."""

    weight_loader = None  # SGLang's is a property that cannot be set


class ConstantParameter(PartLoading, PerTensorScaleParameter):
    """Takes a part of which there is one for the whole matrix."""

    weight_loader = None


class KbitqLinearMethod(PackedLinear, LinearMethodBase):
    """Of linear layers, fused ones included."""

    parameter_class, constant_class = PartParameter, ConstantParameter


if KbitqLinearMethod.__name__ not in sglang_linear.WEIGHT_LOADER_V2_SUPPORTED:
    sglang_linear.WEIGHT_LOADER_V2_SUPPORTED.append(KbitqLinearMethod.__name__)


class KbitqVocabularyMethod(PackedVocabulary, QuantizeMethodBase):
    """Of embeddings and output heads. A model whose head is tied has one layer for both."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **named: Any) -> None:
        """As of ``PackedVocabulary``; whether an embedding is multiplied by, too, is not said beforehand."""
        super().create_weights(layer, *sizes, **named)
        held: Any = layer
        held.kbitq_tied = True


class KbitqExpertsMethod(expert_parameters.ExpertsLoading, FusedMoEMethodBase):
    """Of a layer's experts.

    Args:
        stored: what the folder has.
        prefix: the layer's name in it.
    """

    def __init__(self, stored: StoredNames, prefix: str) -> None:
        super().__init__()
        self.stored, self.prefix = stored, prefix

    def shares(self, layer: Any) -> tuple[int, int]:
        """The number of devices that every expert is cut for, and which of them this is."""
        return layer.moe_tp_size, layer.moe_tp_rank

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Keep how the experts are run."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace what has arrived by stacks that one operator multiplies by.

        Raises:
            ValueError: the experts have an activation that is not known here.
        """
        arriving = expert_parameters.forget(layer)
        if arriving is None:
            return
        config = self.moe_runner_config
        act = _ACTIVATIONS.get(config.activation)
        if act is None:
            raise ValueError(f"{self.prefix}: experts with the activation {config.activation!r} are not served")

        def activation(hidden: Tensor) -> Tensor:
            gate, up = hidden.chunk(2, -1)
            return act(gate) * up

        made = experts.PackedExperts(
            arriving.finished(layer.kbitq_dtype), activation, config.apply_router_weight_on_input
        )
        experts.keep(self.prefix, made)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Tokens through the experts that were chosen for them."""
        weights, ids, *_ = dispatch_output.topk_output
        out = torch.ops.kbitq.experts(dispatch_output.hidden_states, weights, ids.long(), self.prefix)
        factor = self.moe_runner_config.routed_scaling_factor
        return StandardCombineInput(hidden_states=out if factor is None else out * factor)
