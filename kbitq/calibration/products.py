"""The functions of torch that multiply inputs by weights, and where in their arguments these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Where the input and the weight are among the arguments, and what they are called. The weight of all but the first is
# [in, out], as GPT-2 and the experts of gpt-oss store it, unless it is another one turned round.
_BY_ROWS = {nn.functional.linear: ((0, "input"), (1, "weight"))}
_BY_COLUMNS: dict[Callable[..., Any], tuple[tuple[int, str], tuple[int, str]]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), ((0, "input"), (1, "other"))),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), ((0, "input"), (1, "mat2"))),
    **dict.fromkeys((torch.addmm, Tensor.addmm), ((1, "mat1"), (2, "mat2"))),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), ((1, "batch1"), (2, "batch2"))),
}
PRODUCTS: Mapping[Callable[..., Any], tuple[tuple[int, str], tuple[int, str]]] = {**_BY_ROWS, **_BY_COLUMNS}


def operands(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The input ``[..., in]`` and the weight as ``[out, in]`` (stacks ``[E, out, in]``) of a call of ``PRODUCTS``.

    Something else where the arguments are no such thing.
    """
    x, weight = (args[at] if at < len(args) else kwargs.get(name) for at, name in PRODUCTS[func])
    if func in _BY_COLUMNS:
        weight = weight.mT if isinstance(weight, Tensor) and weight.dim() >= 2 else None
    return x, weight
