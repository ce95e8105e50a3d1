"""PEFT: LoRA adapters on packed linear layers. Every ``LoraConfig`` made after ``import kbitq`` knows them.

PEFT accepts a linear class that it does not know only through ``LoraConfig._register_custom_module``.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from kbitq.nn import KbitLinear


class KbitLoraLinear(nn.Module, LoraLayer):
    """A packed linear layer with low-rank adapters beside it; made by PEFT.

    Merging decodes the weight, adds the adapters, and quantizes again with the layer's own K, scale rule and codebook,
    so it costs accuracy as quantizing does. Unmerging restores the very bytes from before.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **_: Any
    ):
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._before_merge: dict[str, Tensor] | None = None
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return next(iter(base_layer.parts.values())).device, base_layer.dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args)
        if self.disable_adapters or self.merged:
            return result
        if names is not None:
            return self._mixed(x, result, names)
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                result = result + self._adapted(adapter, x, result.dtype)
        return result

    def _adapted(self, adapter: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        down: Any = self.lora_A[adapter]
        up: Any = self.lora_B[adapter]
        low = down(self.lora_dropout[adapter](self._cast_input_dtype(x, down.weight.dtype)))
        return (up(low) * self.scaling[adapter]).to(dtype)

    def _mixed(self, x: Tensor, result: Tensor, names: list[str]) -> Tensor:
        """Each row of the batch with the adapter that is named for it (inference)."""
        added = torch.zeros_like(result)
        for adapter in {n for n in names if n in self.lora_A}:
            rows = torch.tensor([n == adapter for n in names], device=x.device)
            added[rows] = self._adapted(adapter, x[rows], result.dtype)
        return result + added

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What an adapter adds to the weight, float32 ``[out, in]``."""
        down: Any = self.lora_A[adapter]
        up: Any = self.lora_B[adapter]
        return up.weight.float() @ down.weight.float() * self.scaling[adapter]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight and quantize it again.

        Args:
            safe_merge: accepted as other layers do; a result that is not finite is refused in any case.
            adapter_names: those to merge; None merges the active ones.

        Raises:
            ValueError: a LoRA bias has no bias to go to. NonFiniteError: the merged weight is not finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        base: Any = self.get_base_layer()
        ups: Any = self.lora_B
        before = {n: p.detach().clone() for n, p in base.named_parameters(recurse=False)}
        weight = base.dequantize(torch.float32)
        for name in names:
            weight += self.get_delta_weight(name).detach()
        if any(self.lora_bias[n] for n in names) and base.bias is None:
            raise ValueError("an adapter has a bias (lora_bias=True), and the layer has none to merge it into")
        base.requantize(weight)
        for name in names:
            if self.lora_bias[name]:
                base.bias.data += ups[name].bias.data.to(base.bias.dtype)
            self.merged_adapters.append(name)
        self._before_merge = self._before_merge or before

    def unmerge(self) -> None:
        """Put the weight and the bias back as they were before adapters were merged."""
        base = self.get_base_layer()
        for name, tensor in (self._before_merge or {}).items():
            getattr(base, name).data = tensor
        self._before_merge = None
        self.merged_adapters.clear()

    def __repr__(self) -> str:
        return f"lora.{super().__repr__()}"


def register() -> None:
    """Have every new ``LoraConfig`` register our layer with itself."""
    from peft.tuners.lora.config import LoraConfig

    made: Any = LoraConfig.__post_init__
    if getattr(made, "_knows_kbitq", False):
        return

    def post_init(self: Any) -> None:
        made(self)
        self._register_custom_module({KbitLinear: KbitLoraLinear})

    post_init._knows_kbitq = True  # type: ignore[attr-defined]
    LoraConfig.__post_init__ = post_init  # type: ignore[method-assign]
