"""PEFT: LoRA adapters on packed linear layers, and merging them.

PEFT accepts a linear class that it does not know only through the config of the adapter, so tell the config:

config = for_packed(LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
model = get_peft_model(model, config)
...
merged = merge(model, k=6)
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from kbitq.errors import KbitqError
from kbitq.format import K_MAX, K_MIN
from kbitq.nn import KbitLinear
from kbitq.nn.packed import WeightInfo

KEPT_AT_LEAST = 0.5
"""A merge that keeps less of an update than this warns."""

_Config = TypeVar("_Config")


class LostUpdateWarning(UserWarning):
    """Merging lost most of a LoRA update."""


@dataclass(frozen=True)
class UpdateLoss:
    """What is left of a LoRA update D after merging it into a packed weight W and quantizing again, giving M.

    Attributes:
        k: bits of an index of the merged weight.
        kept: how much of D is in M - W, by projection: 1 is all of it, 0 nothing. An update below the quantization
            step is rounded away, since W lies on the levels already.
        error: ``|M - (W + D)| / |D|``, Frobenius norms. Above 1 quantizing changes more than the update did.
        size: ``|D| / |W|``.
    """

    k: int
    kept: float
    error: float
    size: float

    @classmethod
    def of(cls, weight: Tensor, update: Tensor, merged: Tensor, k: int) -> UpdateLoss:
        """Measure a merge. An update of zeros is kept.

        Args:
            weight: W, float32 ``[out, in]``.
            update: D, likewise.
            merged: M, likewise.
            k: bits of an index of M.
        """
        change, length = merged - weight, float(update.norm())
        if length == 0:
            return cls(k, 1.0, 0.0, 0.0)
        kept = float((change * update).sum()) / length**2
        size = length / float(weight.norm()) if weight.any() else math.inf
        return cls(k, kept, float((change - update).norm()) / length, size)

    @property
    def is_lost(self) -> bool:
        """Whether too little is left to be worth the merge."""
        return self.kept < KEPT_AT_LEAST


class KbitLoraLinear(nn.Module, LoraLayer):
    """A packed linear layer with low-rank adapters beside it; made by PEFT, given :func:`for_packed`.

    Merging decodes the weight, adds the adapters, and quantizes again with the layer's scale rule and codebook, so it
    costs accuracy as quantizing does: into ``merge_k`` bits, None the layer's own, and ``loss`` says what was lost.
    Unmerging restores the very bytes from before.
    """

    merge_k: int | None = None
    loss: UpdateLoss | None = None

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **_: Any
    ):
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._before_merge: tuple[dict[str, Tensor], WeightInfo, int] | None = None
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return base_layer.device, base_layer.dtype

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
        """Add adapters to the weight and quantize it again; warns where less than half of the update is left.

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
        if any(self.lora_bias[n] for n in names) and base.bias is None:
            raise ValueError("an adapter has a bias (lora_bias=True), and the layer has none to merge it into")
        before = {n: p.detach().clone() for n, p in base.named_parameters(recurse=False)}, base.info, base.k
        self.loss = _requantize(base, self._update(names), self.merge_k)
        ups: Any = self.lora_B
        for name in names:
            if self.lora_bias[name]:
                base.bias.data += ups[name].bias.data.to(base.bias.dtype)
            self.merged_adapters.append(name)
        self._before_merge = self._before_merge or before
        if self.loss.is_lost:
            warnings.warn(_lost_sentence(self.loss.k), LostUpdateWarning, stacklevel=2)

    def merge_loss(self, k: int | None = None, adapter_names: list[str] | None = None) -> UpdateLoss | None:
        """What merging into ``k`` bits would lose (None: the layer's own K). Changes nothing; None without adapter."""
        names = [n for n in adapter_names or self.active_adapters if n in self.lora_A]
        if not names:
            return None
        trial = copy.copy(self.get_base_layer())
        trial._parameters = dict(trial._parameters)  # they are replaced there, not written to
        return _requantize(trial, self._update(names), k)

    def _update(self, names: Sequence[str]) -> Tensor:
        first, *others = (self.get_delta_weight(name).detach() for name in names)
        return sum(others, first)

    def unmerge(self) -> None:
        """Put the weight and the bias back as they were before adapters were merged."""
        base: Any = self.get_base_layer()
        if self._before_merge is not None:
            parameters, base.info, base.k = self._before_merge
            for name, tensor in parameters.items():
                getattr(base, name).data = tensor
        self._before_merge = None
        self.merged_adapters.clear()

    def __repr__(self) -> str:
        return f"lora.{super().__repr__()}"


def for_packed(config: _Config) -> _Config:
    """Let a ``LoraConfig`` know packed layers, and return it.

    Args:
        config: of any origin: made by hand, or by ``PeftConfig.from_pretrained(folder)``. What is saved stays the same.

    Raises:
        KbitqError: it is not of LoRA.
    """
    if not isinstance(config, LoraConfig):
        raise KbitqError(f"packed layers take LoRA adapters, not {type(config).__name__}: give a peft.LoraConfig")
    config._register_custom_module({KbitLinear: KbitLoraLinear})
    return config


def merge(model: Any, k: int | None = None, adapter_names: list[str] | None = None) -> Any:
    """Merge LoRA adapters into the packed weights and take them out: PEFT's ``merge_and_unload``, into ``k`` bits.

    Args:
        model: of ``get_peft_model`` or ``PeftModel.from_pretrained``.
        k: bits of an index of the merged layers, 2 to 8; None keeps each layer's own, where small updates are lost.
        adapter_names: those to merge; None merges the active ones.

    Returns:
        The model without adapters, as PEFT returns it. A ``LostUpdateWarning`` says in how many layers less than half
        of the update is left, if there are any.

    Raises:
        KbitqError: the model has no adapter on a packed layer or is not PEFT's, or ``k`` is not 2 to 8.
        ValueError: a LoRA bias has no bias to go to. NonFiniteError: a merged weight is not finite.
    """
    if not hasattr(model, "merge_and_unload"):
        raise KbitqError(f"{type(model).__name__} cannot be merged: give the model that peft.get_peft_model returns")
    layers = _lora_layers(model, k).values()
    for layer in layers:
        layer.merge_k = k
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostUpdateWarning)
        merged = model.merge_and_unload(adapter_names=adapter_names)
    lost = [layer.loss for layer in layers if layer.loss is not None and layer.loss.is_lost]
    if lost:
        sentence = f"in {len(lost)} of {len(layers)} layers, {_lost_sentence(min(loss.k for loss in lost))}"
        warnings.warn(sentence, LostUpdateWarning, stacklevel=2)
    return merged


def merge_losses(model: Any, k: int | None = None, adapter_names: list[str] | None = None) -> dict[str, UpdateLoss]:
    """What :func:`merge` would lose, by layer; the model is not changed.

    Args:
        model: with LoRA adapters on packed layers, not merged.
        k: as of :func:`merge`.
        adapter_names: as of :func:`merge`.

    Raises:
        KbitqError: the model has no adapter on a packed layer, or ``k`` is not 2 to 8.
    """
    found = {name: layer.merge_loss(k, adapter_names) for name, layer in _lora_layers(model, k).items()}
    return {name: loss for name, loss in found.items() if loss is not None}


def _lora_layers(model: nn.Module, k: int | None) -> dict[str, KbitLoraLinear]:
    if k is not None and (isinstance(k, bool) or k not in range(K_MIN, K_MAX + 1)):
        raise KbitqError(f"k must be a whole number from {K_MIN} to {K_MAX}, not {k!r}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, KbitLoraLinear)}
    if not layers:
        raise KbitqError("the model has no LoRA adapter on a packed layer: use get_peft_model with for_packed(config)")
    return layers


def _requantize(layer: Any, update: Tensor, k: int | None) -> UpdateLoss:
    """Add an update to a packed layer's weight, and say what is left of it."""
    weight = layer.dequantize(torch.float32)
    layer.requantize(weight + update, k)
    return UpdateLoss.of(weight, update, layer.dequantize(torch.float32), layer.k)


def _lost_sentence(k: int) -> str:
    way = "merge into more bits with kbitq.integrations.peft.merge(model, k=...)" if k < K_MAX else "keep the adapter"
    return f"merging into {k} bits lost more than half of a LoRA update, which is below the quantization step: {way}"
