"""Quantizing a model that is in memory, layer by layer, and turning it back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kbitq import format as fmt
from kbitq.choose.selection import TensorRule
from kbitq.codecs.base import part_name
from kbitq.errors import SelectionError
from kbitq.nn.embedding import KbitEmbedding
from kbitq.nn.experts import KbitExperts, quantize_experts
from kbitq.nn.linear import KbitLinear
from kbitq.nn.packed import PackedMatrix, WeightInfo
from kbitq.on_the_fly.decisions import Decisions
from kbitq.on_the_fly.options import OPTIONS, quantize_options, refuse_unknown
from kbitq.on_the_fly.sources import TensorStorage


def replace_linears(
    model: nn.Module,
    k: int | None = None,
    *,
    scale: str = "mse",
    codebook: Any = "optimal",
    codec: str = fmt.DEFAULT_CODEC,
    scale_block: int | None = None,
    bpw: float | None = None,
    rules: Sequence[str | TensorRule] = (),
    importance: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_embeddings: bool = True,
    **unknown: Any,
) -> dict[str, str]:
    """Replace the linear layers (and fused experts) of a model, in place, by packed ones.

    Weights are chosen and coded as ``kbitq quantize`` does it: norms, embeddings, output heads and routers stay, and
    the defaults need no data. Layers that share one weight go on sharing it. Only layers whose class is exactly
    ``torch.nn.Linear`` or ``torch.nn.Embedding`` are replaced, since a subclass may compute something else.

    Args:
        model: any module.
        k: bits of an index, 2 to 8; 4 where neither it nor ``bpw`` is given.
        scale: ``"mse"`` or ``"absmax"``, as in :func:`kbitq.quantize`.
        codebook: ``"optimal"``, ``"nf"``, ``"fit"`` (fitted to each weight), a file, or 2^k levels.
        codec: how weights are coded, as in :func:`kbitq.quantize`; with ``bpw`` also ``"auto"``.
        scale_block: columns that share a scale, of the codec ``trellis``: 32 or 128.
        bpw: bits per weight, on average, that K is chosen within for each weight.
        rules: of K, scale, codebook and codec by name, as the command line has them: ``"*.down_proj.weight=k4"``.
        importance: a file of error weights by column, or a folder of ``kbitq calibrate``; its names are the model's.
        calibration: a folder of ``kbitq calibrate``: weights are quantized with error feedback.
        include: patterns of weight names to quantize as well: globs, or ``re:`` and a regular expression.
        exclude: patterns of weight names to leave alone; wins over ``include``.
        keep_embeddings: leave embeddings as they are.
        unknown: no option; the error names the nearest that there is.

    Returns:
        For every weight that was considered, why it was replaced or kept.

    Raises:
        OptionError: there is no such option, or it does not take the value.
        SelectionError: a pattern matches no weight, or nothing is left to replace.
        BudgetError: the smallest K take more than ``bpw``.
    """
    refuse_unknown("replace_linears", unknown, OPTIONS)
    given = (
        k, scale, codebook, codec, scale_block, bpw, rules, importance, calibration, include, exclude, keep_embeddings,
    )  # fmt: skip
    options = quantize_options(**dict(zip(OPTIONS, given, strict=True)))
    weights = list(_weights(model))
    if not weights:
        raise SelectionError("nothing to replace: the model has no linear layer")
    decisions = Decisions(TensorStorage({name: weight for name, _, weight in weights}), options, {})
    made: dict[int, nn.Module] = {}  # id of a dense weight -> the first layer that replaced it
    reasons: dict[str, str] = {}
    for name, module, weight in weights:
        decided = decisions.tensors[name]
        reasons[name] = f"{decided.verdict}: {decided.reason}"
        if decided.quantized:
            _replace(model, name, module, weight, decisions, made)
    return reasons


def dequantize_modules(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Put ordinary layers with decoded weights back, in place; weights that were shared are shared again.

    Args:
        model: any module.
        dtype: of the decoded weights; each layer's own by default.

    Returns:
        The number of layers put back.
    """
    shared: dict[int, Any] = {}
    count = 0
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, KbitExperts):
            module.unpack(dtype)
        elif isinstance(module, KbitLinear | KbitEmbedding):
            dense = module.to_linear(dtype) if isinstance(module, KbitLinear) else module.to_embedding(dtype)
            held = getattr(module, module.held_names("weight")[0])
            dense.weight = shared.setdefault(id(held), dense.weight)
            model.set_submodule(name, dense)
        else:
            continue
        count += 1
    return count


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every weight that has a packed form, with its name: of exact linear and embedding layers, and 3-D experts."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            is_layer = type(module) in (nn.Linear, nn.Embedding) and leaf == "weight" and prefix
            if is_layer or fmt.is_fused_experts(name, parameter.shape):
                yield name, module, parameter


def _replace(
    model: nn.Module, name: str, module: nn.Module, weight: nn.Parameter, decisions: Decisions, made: dict[int, Any]
) -> None:
    prefix, _, leaf = name.rpartition(".")
    if type(module) not in (nn.Linear, nn.Embedding):
        if leaf in module._parameters:  # a module listed twice is packed once
            stack = quantize_experts(module, {leaf: decisions.quantize(name, weight)})
            stack.info[leaf] = WeightInfo.described(decisions.described[name])
        return
    if type(model.get_submodule(prefix)) is not type(module):
        return
    build: Callable[..., KbitLinear | KbitEmbedding]
    if isinstance(module, nn.Linear):
        build = lambda q: KbitLinear.from_quantized(q, module.bias, weight.dtype)  # noqa: E731
    else:
        padding = module.padding_idx
        build = lambda q: KbitEmbedding.from_quantized(q, padding, weight.dtype)  # type: ignore[arg-type]  # noqa: E731
    first = made.get(id(weight))
    layer = build(first.quantized() if first is not None else decisions.quantize(name, weight))
    layer.info = WeightInfo.described(decisions.described[name]) if first is None else first.info
    if first is not None:
        share_weight(first, layer)
    made.setdefault(id(weight), layer)
    model.set_submodule(prefix, layer.train(module.training))


def share_weight(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` hold the very parameters of ``source``'s packed weight (tied embeddings)."""
    assert isinstance(source, PackedMatrix)
    source.untile()
    for part, held in source.parts.items():
        setattr(target, part_name("weight", part), held)
