"""Quantizing while transformers loads: each weight is replaced as it arrives, so only one is ever held dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import should_convert_module

from kbitq import format as fmt
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.checkpoint.source.storage import Storage
from kbitq.codecs.base import bits_per_weight, part_kinds, part_name
from kbitq.errors import OptionError
from kbitq.integrations.transformers.routes import has_packed_class, remember, replace_module, share_with_tied
from kbitq.integrations.transformers.ways import Way, find_ways
from kbitq.nn import pack_experts
from kbitq.nn.packed import WeightInfo, frozen
from kbitq.on_the_fly.decisions import Decisions
from kbitq.on_the_fly.sources import ModelFiles, TensorStorage
from kbitq.quantized import QuantizedTensor

NO_FORM = "no packed form of its module"


class OnTheFly:
    """What becomes of each weight of a model while it is loaded, decided before.

    With safetensors files at hand it is what ``kbitq quantize`` decides of them, by the names in them. Without, it is
    decided by the model's own names and shapes.

    Args:
        model: as it was built, on the meta device.
        files: paths of its weight files; None where tensors come without files.
        config: a ``KbitqConfig``.

    Raises:
        OptionError: a budget is to be measured, and there are no files to measure in.
        KbitqError: as of the command.
    """

    def __init__(self, model: Any, files: Sequence[str] | None, config: Any) -> None:
        self._skipped = [*(config.modules_to_not_convert or ()), *(model._keep_in_fp32_modules or ())]
        options = config.quantize_options()
        paths = files if files and all(str(file).endswith(".safetensors") for file in files) else None
        if paths is None and options.budget is not None:
            raise OptionError(
                "bpw measures all weights before the first is loaded, so it takes a folder of safetensors files",
                argument="bpw",
            )
        source: Storage = ModelFiles(paths) if paths else TensorStorage(dict(model.named_parameters()))
        tensors = open_checkpoint(source).tensors
        ways = [Way(name, tensor.shape, [[name]]) for name, tensor in tensors.items()]
        self._ways = find_ways(model, tensors) if paths else ways
        self._sources = {way.name: way for way in self._ways if self._has_form(model, way)}
        mine = {source for way in self._sources.values() for part in way.parts for source in part}
        with _ordinary_defaults():
            self.decisions = Decisions(source, options, {name: NO_FORM for name in tensors if name not in mine})
        for way in self._sources.values():
            self._check_alike(way)

    def quantizes(self, name: str) -> bool:
        """Whether the parameter ``name`` of the model is quantized when it arrives."""
        return name in self._sources and self._first(name).quantized

    def bits(self, name: str) -> float:
        """Bits of an element of such a parameter, codebooks apart."""
        first = self._first(name)
        return bits_per_weight(first.codec, first.name, first.shape, first.k or 0)

    def parts(self, name: str, tensor: Tensor) -> list[list[QuantizedTensor]]:
        """The parameter quantized: one tensor, or for each expert of a stack those that are concatenated by rows."""
        way = self._sources[name]
        if not way.stacked:
            return [[self.decisions.quantize(way.parts[0][0], tensor)]]
        rows = [expert.chunk(len(way.parts)) for expert in tensor]
        return [
            [self.decisions.quantize(sources[e], part) for sources, part in zip(way.parts, of_expert, strict=True)]
            for e, of_expert in enumerate(rows)
        ]

    def described(self, name: str) -> WeightInfo:
        """What a file says of a parameter that was quantized and is one tensor there."""
        return WeightInfo.described(self.decisions.described[self._first(name).name])

    def is_stacked(self, name: str) -> bool:
        """Whether the files have the experts of a stack one by one."""
        return self._sources[name].stacked

    def kept(self) -> dict[str, str]:
        """Why tensors of the files are not quantized."""
        return {t.name: t.reason for t in self.decisions.tensors.values() if not t.quantized}

    def _first(self, name: str) -> TensorPlan:
        return self.decisions.tensors[self._sources[name].parts[0][0]]

    def _has_form(self, model: Any, way: Way) -> bool:
        """Whether a parameter has a packed form, and is not to be left alone."""
        prefix, _, leaf = way.name.rpartition(".")
        module = model.get_submodule(prefix)
        if leaf not in module._parameters:
            return False
        is_stack = fmt.is_fused_experts(way.name, way.shape)
        if not is_stack and not (has_packed_class(module) and leaf == "weight" and prefix):
            return False
        return not self._skipped or bool(should_convert_module(way.name if is_stack else prefix, self._skipped))

    def _check_alike(self, way: Way) -> None:
        """Raise OptionError for experts of one stack that would be coded in different ways."""
        decided = [self.decisions.tensors[source] for part in way.parts for source in part]
        if len({(t.codec, t.k) for t in decided}) > 1:
            raise OptionError(
                f"{way.name}: its experts would have different K or codecs, and a stack has one",
                hint="a rule or pattern for all experts of a layer, or kbitq quantize, whose folders load nevertheless",
            )


@contextmanager
def _ordinary_defaults() -> Iterator[None]:
    """transformers makes models with the meta device and their own dtype as torch's defaults; measuring has values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


class QuantizeOnLoad(ConversionOps):
    """The loader's last operation on a weight: it puts the packed module into the model and hands nothing back.

    Args:
        decided: what becomes of each weight. Stacks of experts that files have one by one are quantized one by one, so
            that they can be saved apart again.
    """

    def __init__(self, decided: OnTheFly) -> None:
        self.decided = decided

    def __deepcopy__(self, memo: Any) -> QuantizeOnLoad:
        return self

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        model, missing_keys = kwargs["model"], kwargs.get("missing_keys")
        rest: dict[str, Any] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            if not self.decided.quantizes(name):
                rest[name] = value
                continue
            if missing_keys is not None:
                tied = {t for t, s in model.all_tied_weights_keys.items() if s == name}
                missing_keys -= {name} | tied
            made = self.decided.parts(name, tensor)
            if self.decided.is_stacked(name):
                _place_parts(model, name, made)
            else:
                _place(model, name, made[0][0], self.decided)
        return rest


def _place(model: Any, name: str, q: QuantizedTensor, decided: OnTheFly) -> None:
    leaf = name.rpartition(".")[2]
    made = replace_module(model, name, q.k, q.codec)
    for part, value in q.parts.items():
        setattr(made, part_name(leaf, part), _loaded(value))
    remember(made, leaf, decided.described(name))
    share_with_tied(model, name, q.codec)


def _place_parts(model: Any, name: str, rows: Sequence[Sequence[QuantizedTensor]]) -> None:
    prefix, _, leaf = name.rpartition(".")
    first, parts = rows[0][0], len(rows[0])
    made = pack_experts(model.get_submodule(prefix), {leaf: (first.k, parts)}, first.codec)
    for part, constant in part_kinds(first.codec).items():
        join = torch.stack if constant else torch.cat
        experts = [join([q.parts[part] for q in row]) for row in rows]
        setattr(made, part_name(leaf, part), _loaded(torch.stack(experts)))
    remember(made, leaf, WeightInfo(first.dtype, first.scale, first.codebook_name, codec=first.codec))


def _loaded(tensor: Tensor) -> nn.Parameter:
    """A parameter that transformers does not initialise."""
    made = frozen(tensor)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made
