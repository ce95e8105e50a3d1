"""What a transformers model with packed weights answers differently: on its own class, so that no other model changes.

transformers asks a model's parameters for its dtype and its size, and the parameters of a packed weight are words.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from kbitq.integrations.transformers.saving import guard_config_file
from kbitq.nn import KbitEmbedding, KbitExperts
from kbitq.nn.packed import PackedModule


class PackedModel:
    """Goes before a model's class. ``ordinary_class`` is that class; its name, module and behaviour stay."""

    ordinary_class: type

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating parameter which is no part of a packed weight; else of a packed layer."""
        model: Any = self
        for module in model.modules():
            parts = _element_counts(module)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype.is_floating_point and name not in parts:
                    return parameter.dtype
        return next((m.dtype for m in model.modules() if isinstance(m, PackedModule)), torch.float32)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of weights, as of the ordinary model: a packed weight counts its elements, not its words.

        Args:
            only_trainable: count those with a gradient only; packed weights have none.
            exclude_embeddings: leave the tables of embeddings out.
        """
        model: Any = self
        count, seen = 0, set()
        for module in model.modules():
            sizes = _element_counts(module)
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                is_table = isinstance(module, nn.Embedding | KbitEmbedding) and name.startswith("weight")
                if (exclude_embeddings and is_table) or (only_trainable and not parameter.requires_grad):
                    continue
                count += sizes.get(name, parameter.numel())
        return count

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the ordinary model, with the guard in config.json."""
        saved = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        guard_config_file(save_directory)
        return saved

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        guard_config_file(working_dir)  # ``push_to_hub=True`` uploads while it saves
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """transformers' own way to PEFT, for packed layers too."""
        super().add_adapter(_for_packed(adapter_config), adapter_name)  # type: ignore[misc]

    def load_adapter(
        self, peft_model_id: Any = None, adapter_name: str | None = None, peft_config: Any = None, *args: Any, **kw: Any
    ) -> Any:
        """transformers' own way to PEFT, for packed layers too."""
        if peft_config is None and peft_model_id is not None:
            from peft import PeftConfig

            download = getattr(kw.get("load_config"), "download_kwargs", None) or kw.get("download_kwargs") or {}
            options = {**download, **(kw.get("adapter_kwargs") or {})}
            peft_config = PeftConfig.from_pretrained(peft_model_id, **options)
        return super().load_adapter(  # type: ignore[misc]
            peft_model_id, adapter_name, _for_packed(peft_config), *args, **kw
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles: the class is made, not found by its name, which is the ordinary one's."""
        reduced: Any = super().__reduce_ex__(protocol)  # (function, arguments, state, ...)
        return (_empty, (self.ordinary_class,), *reduced[2:])


def mark_packed(model: nn.Module) -> None:
    """Give a model, and the models in it, that hold packed weights the class that knows of them."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, PackedModel) and _holds_packed(module):
            ordinary: Any = type(module)
            module.__class__ = _packed_class(ordinary)  # as pack_experts does for experts


def mark_ordinary(model: nn.Module) -> None:
    """Give models their own class back once they hold no packed weight any more."""
    for module in model.modules():
        if isinstance(module, PackedModel) and not _holds_packed(module):
            module.__class__ = module.ordinary_class


def _for_packed(config: Any) -> Any:
    """A LoRA config that knows packed layers; any other as it is."""
    from peft import LoraConfig

    from kbitq.integrations.peft import for_packed

    return for_packed(config) if isinstance(config, LoraConfig) else config


@cache
def _packed_class(ordinary: Any) -> Any:
    names = ("__module__", "__qualname__", "__doc__")
    return type(ordinary.__name__, (PackedModel, ordinary), {
        **{name: getattr(ordinary, name) for name in names}, "ordinary_class": ordinary,
    })  # fmt: skip


def _empty(ordinary: type) -> Any:
    made: Any = _packed_class(ordinary)
    return made.__new__(made)


def _holds_packed(module: Any) -> bool:
    return any(isinstance(m, PackedModule) for m in module.modules())


def _element_counts(module: nn.Module) -> dict[str, int]:
    """For the parameters of packed weights: the elements of the weight under the first part, 0 under the others."""
    if not isinstance(module, PackedModule):
        return {}
    counts: dict[str, int] = {}
    for leaf in module.packed_names():
        shape: Any = module.stack(leaf).shape if isinstance(module, KbitExperts) else module.shape
        first, *others = module.held_names(leaf)
        counts.update({first: prod(shape), **dict.fromkeys(others, 0)})
    return counts
