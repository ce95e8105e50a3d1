"""The parameters by which a server loads the experts of a layer: empty ones that hand on what arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kbitq.integrations.serving.experts import ArrivingExperts
from kbitq.integrations.serving.linear import arriving_name, part_dtype
from kbitq.integrations.serving.matrix import fixed, waiting
from kbitq.integrations.serving.names import StoredNames

STEMS = ("w13_weight", "w2_weight")


class ExpertsLoading(ABC):
    """How a server's method for experts makes room for them. It stands before the server's own class of methods."""

    stored: StoredNames
    prefix: str

    @abstractmethod
    def shares(self, layer: Any) -> tuple[int, int]:
        """The number of devices that every expert is cut for, and which of them this is."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer empty parameters that take what the files have of its experts, and ``kbitq_dtype``."""
        devices, rank = self.shares(layer)
        sizes = num_experts, hidden_size, intermediate_size_per_partition, devices
        arriving = ArrivingExperts(self.prefix, *sizes, self.stored.codecs)
        local_id = layer._map_global_expert_id_to_local_expert_id
        register(layer, self.stored, arriving, rank, local_id, params_dtype)
        layer.kbitq_dtype = params_dtype


def register(
    layer: Any,
    stored: StoredNames,
    arriving: ArrivingExperts,
    rank: int,
    local_id: Callable[[int], int],
    dtype: torch.dtype,
) -> None:
    """Give a layer a parameter for each part, and one for an ordinary weight, which takes the guard alone.

    Args:
        layer: gets them, and ``kbitq_arriving``.
        stored: what the folder has.
        arriving: gets what they take.
        rank: which part of each expert is this device's.
        local_id: from an expert's number in the model to that on this device; negative if it is another's.
        dtype: of ordinary weights.
    """
    layer.kbitq_arriving = arriving

    def loader(part: str | None) -> Callable[..., bool | None]:
        def load(
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            taken = True
            if part is not None:
                ids = expert_id, local_id(expert_id)
                taken = arriving.take(part, shard_id, ids, loaded_weight, rank, param.device)
            elif loaded_weight.numel():
                raise ValueError(f"{weight_name}: this expert is not quantized, but others of its layer are")
            return taken if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]  # vLLM asks
        return load

    for stem in STEMS:
        for part, _ in stored.arriving():
            made: Any = fixed(waiting((0,), dtype if part is None else part_dtype(stored, part)))
            made.weight_loader = loader(part)
            layer.register_parameter(arriving_name(part, stem), made)


def forget(layer: Any) -> ArrivingExperts | None:
    """What has arrived, once; the parameters of the parts stay, empty: by them LoRA finds the device."""
    arriving: ArrivingExperts | None = layer.__dict__.pop("kbitq_arriving", None)
    for stem in STEMS if arriving is not None else ():
        delattr(layer, stem)
    return arriving
