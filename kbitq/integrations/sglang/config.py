"""What SGLang asks of a quantized folder: which method a layer has."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from kbitq.integrations.serving.config import ServedConfig
from kbitq.integrations.sglang.methods import KbitqExpertsMethod, KbitqLinearMethod, KbitqVocabularyMethod

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Where a model does not say what it fuses."""


class KbitqSglangConfig(ServedConfig, QuantizationConfig):
    """A folder that kbitq wrote. SGLang does not say where it lies, so its config tells what is kept."""

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Call modules as the model does."""
        self.stored = self.stored.renamed(hf_to_sglang_mapper.apply_list)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; None where SGLang's own will do. kbitq's methods take kept weights too."""
        kept = self.stored.is_quantized(prefix, self.packed_modules_mapping or _FUSED) is False
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if kept else KbitqLinearMethod(self.stored, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return None if kept else KbitqVocabularyMethod(self.stored, prefix, isinstance(layer, ParallelLMHead))
        if isinstance(layer, FusedMoE) and self.stored.has_experts(prefix):
            return KbitqExpertsMethod(self.stored, prefix)
        return None
