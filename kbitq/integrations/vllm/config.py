"""What vLLM asks of a quantized folder: which method a layer has."""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from kbitq.integrations.serving.config import ServedConfig
from kbitq.integrations.serving.names import StoredNames, apart
from kbitq.integrations.vllm.methods import KbitqExpertsMethod, KbitqLinearMethod, KbitqVocabularyMethod

_PREPARED = ("sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache")
"""Load formats of weights that vLLM has saved after it had prepared them."""


class KbitqVllmConfig(ServedConfig, QuantizationConfig):
    """A folder that kbitq wrote, for vLLM."""

    def __repr__(self) -> str:
        return f"KbitqVllmConfig(k={self.config.get('k')}, codecs={list(self.stored.codecs)})"

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the names of the folder's tensors, on the disk or on the Hub."""
        names = get_safetensors_params_metadata(model_name, revision=revision)
        self.stored = StoredNames.of(self.config, names)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Call modules as the model does."""
        self.stored = self.stored.renamed(hf_to_vllm_mapper.apply_list)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops the guard."""
        guard = self.stored.guard
        return WeightsMapper(orig_to_new_regex={} if guard is None else {re.compile(f"^{re.escape(guard)}$"): None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; None where vLLM's own will do.

        A layer that the folder has under no such name may be quantized or not: kbitq's methods take either.
        """
        quantized = self.stored.is_quantized(prefix, self.packed_modules_mapping)
        server = get_current_vllm_config_or_none()
        dummy = server is not None and _is_dummy(server)
        if isinstance(layer, LinearBase):
            if quantized is False:
                return UnquantizedLinearMethod()
            own = (apart(prefix, self.packed_modules_mapping) or [prefix]) if dummy else ()
            return KbitqLinearMethod(self.stored, prefix, own)
        if isinstance(layer, VocabParallelEmbedding):
            head = isinstance(layer, ParallelLMHead)
            return None if quantized is False else KbitqVocabularyMethod(self.stored, prefix, head, dummy)
        if isinstance(layer, RoutedExperts):
            name = prefix.removesuffix(".routed_experts")
            if not self.stored.has_experts(name):
                return None
            if server is not None:
                _check_experts(name, server)
            return KbitqExpertsMethod(self.stored, name, layer, dummy)
        return None


def _is_dummy(server: VllmConfig) -> bool:
    """Whether weights are to be made up. Raises ValueError for a way of loading that a kbitq folder cannot be for."""
    wanted = str(getattr(server.load_config.load_format, "value", server.load_config.load_format))
    if wanted in _PREPARED:
        raise ValueError(
            f"load format {wanted}: it is for weights as vLLM has prepared and saved them; those of a folder of kbitq "
            "are prepared anew each time, and load as safetensors"
        )
    return wanted == "dummy"


def _check_experts(name: str, server: VllmConfig) -> None:
    """Raise ValueError for what vLLM cannot do with quantized experts."""
    if server.parallel_config.enable_eplb:
        raise ValueError(
            f"{name}: quantized experts stay on the device that loaded them; expert parallel load balancing (EPLB) "
            "would move them"
        )
    lora: Any = server.lora_config
    if lora is not None and (lora.target_modules is None or name.rpartition(".")[2] in lora.target_modules):
        raise ValueError(
            f"{name}: vLLM adds LoRA to experts within kernels of its own, which do not read quantized ones; give "
            "lora_target_modules without the experts"
        )
