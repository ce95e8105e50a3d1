"""Quantizing a model that is in memory, layer by layer, and turning it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kbitq import format as fmt
from kbitq.choose.selection import Selection
from kbitq.codecs.base import part_name
from kbitq.errors import SelectionError
from kbitq.nn.embedding import KbitEmbedding
from kbitq.nn.experts import KbitExperts, quantize_experts
from kbitq.nn.linear import KbitLinear
from kbitq.nn.packed import PackedMatrix
from kbitq.ops.dtypes import STORED_NAMES
from kbitq.quantized import quantize


def replace_linears(
    model: nn.Module,
    k: int,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_embeddings: bool = True,
    **options: Any,
) -> dict[str, str]:
    """Replace the linear layers (and fused experts) of a model, in place, by packed ones.

    Weights are chosen as ``kbitq quantize`` chooses them: norms, embeddings, output heads and routers stay. Layers that
    share one weight go on sharing it. Only layers whose class is exactly ``torch.nn.Linear`` or ``torch.nn.Embedding``
    are replaced, since a subclass may compute something else.

    Args:
        model: any module.
        k: bits of an index, 2 to 8.
        include: patterns of weight names to quantize as well: globs, or ``re:`` and a regular expression.
        exclude: patterns of weight names to leave alone; wins over ``include``.
        keep_embeddings: leave embeddings as they are.
        options: of :func:`kbitq.quantize`: ``scale``, ``codebook``.

    Returns:
        For every weight that was considered, why it was replaced or kept.

    Raises:
        SelectionError: a pattern matches no weight, or nothing is left to replace.
    """
    selection = Selection(k, include, exclude, keep_embeddings=keep_embeddings)
    weights = list(_weights(model))
    selection.check_patterns(name for name, _, _ in weights)
    reasons: dict[str, str] = {}
    made: dict[int, nn.Module] = {}  # id of a dense weight -> the first layer that replaced it
    chosen = []
    for name, module, weight in weights:
        verdict = selection.verdict(name, weight.shape, STORED_NAMES.get(weight.dtype, "opaque"))
        reasons[name] = f"{verdict.word}: {verdict.reason}"
        if verdict.quantize:
            chosen.append((name, module, weight))
    if not chosen:
        raise SelectionError("nothing to replace: the model has no linear layer that the patterns select")
    for name, module, weight in chosen:
        _replace(model, name, module, weight, k, options, made)
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
    model: nn.Module, name: str, module: nn.Module, weight: nn.Parameter, k: int, options: Any, made: dict[int, Any]
) -> None:
    prefix, _, leaf = name.rpartition(".")
    if type(module) not in (nn.Linear, nn.Embedding):
        if leaf in module._parameters:  # a module listed twice is packed once
            quantize_experts(module, {leaf: quantize(weight, k, name=name, **options)})
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
    layer = build(first.quantized() if first is not None else quantize(weight, k, name=name, **options))
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
