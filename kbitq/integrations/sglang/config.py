"""What SGLang asks of a quantized folder: which method a layer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from kbitq.format import QUANT_METHOD
from kbitq.integrations.serving.names import StoredNames
from kbitq.integrations.sglang.methods import KbitqExpertsMethod, KbitqLinearMethod, KbitqVocabularyMethod

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Where a model does not say what it fuses."""


class KbitqSglangConfig(QuantizationConfig):
    """A folder that kbitq wrote. SGLang does not say where it lies, so its config tells what is kept.

    Args:
        config: its ``quantization_config``.

    Raises:
        FormatError: the config is of a format that this kbitq does not know.
        CodecError: it names a codec that this kbitq does not have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.stored = StoredNames.of(config)

    def get_name(self) -> str:
        """``kbitq``."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those that the operators multiply in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU: 8.0, for which kbitq has fused kernels."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it stands in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KbitqSglangConfig:
        """From the ``quantization_config`` of config.json."""
        return cls(config)

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
