"""Gradients of the products with a coded weight: to x and the bias, never to the weight.

The dispatcher's autograd key is implemented directly: the helper of torch.library adds ten microseconds to every call,
also to those that need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbitq.ops import codec

_after_autograd = torch._C._after_autograd_keyset
_below_autograd = torch._C._AutoDispatchBelowAutograd


@dataclass(frozen=True)
class Products:
    """A pair of operators: ``product(x, *weight, bias, *sizes, codec)`` and ``back(grad, *weight, cols, codec)``.

    Attributes:
        product: name of the operator that gives x W^T.
        back: name of the one that gives grad W.
        takes_rows: whether ``product`` takes the rows of W, because its tensors do not tell them.
    """

    product: str
    back: str
    takes_rows: bool = False

    def arguments(self, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, rows: int, coding: str) -> Any:
        """Those of ``product``."""
        return (x, *weight, bias, rows, coding) if self.takes_rows else (x, *weight, bias, coding)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keyset: Any, pair: Products, x: Tensor, bias: Tensor | None, rows: int, coding: str, *weight: Tensor
    ) -> Tensor:
        codec.check_rows("x", x)
        ctx.save_for_backward(*weight)
        ctx.pair, ctx.cols, ctx.coding = pair, x.shape[-1], coding
        with _below_autograd():
            op = getattr(torch.ops.kbitq, pair.product).default
            return op.redispatch(keyset & _after_autograd, *pair.arguments(x, weight, bias, rows, coding))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_x = to_bias = None
        if ctx.needs_input_grad[2]:
            to_x = getattr(torch.ops.kbitq, ctx.pair.back)(grad, *ctx.saved_tensors, ctx.cols, ctx.coding)
        if ctx.needs_input_grad[3]:
            to_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return None, None, to_x, to_bias, None, None, *(None for _ in ctx.saved_tensors)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, pair: Products, grad: Tensor, cols: int, coding: str, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        ctx.pair, ctx.rows, ctx.coding = pair, grad.shape[-1], coding
        with _below_autograd():
            op = getattr(torch.ops.kbitq, pair.back).default
            return op.redispatch(keyset & _after_autograd, grad, *weight, cols, coding)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        arguments = ctx.pair.arguments(again, ctx.saved_tensors, None, ctx.rows, ctx.coding)
        to_grad = getattr(torch.ops.kbitq, ctx.pair.product)(*arguments)
        return None, None, to_grad, None, None, *(None for _ in ctx.saved_tensors)


def add_gradients(pair: Products, product: Callable[..., Any], back: Callable[..., Any]) -> None:
    """Implement the autograd key of both operators.

    Args:
        pair: the operators' names.
        product: takes the keyset and the arguments of ``pair.product``; calls :func:`product_with_gradient`.
        back: takes the keyset and the arguments of ``pair.back``; calls :func:`back_with_gradient`.
    """
    codec.library.impl(pair.product, product, "Autograd", with_keyset=True)
    codec.library.impl(pair.back, back, "Autograd", with_keyset=True)


def product_with_gradient(
    keyset: Any, pair: Products, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, rows: int, coding: str
) -> Tensor:
    """``x W^T (+ bias)``, recorded where x or the bias has a gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(keyset, pair, x, bias, rows, coding, *weight)
    with _below_autograd():
        op = getattr(torch.ops.kbitq, pair.product).default
        return op.redispatch(keyset & _after_autograd, *pair.arguments(x, weight, bias, rows, coding))


def back_with_gradient(
    keyset: Any, pair: Products, grad: Tensor, weight: tuple[Tensor, ...], cols: int, coding: str
) -> Tensor:
    """``grad W``, recorded where ``grad`` itself has a gradient."""
    if torch.is_grad_enabled() and grad.requires_grad:
        return _Back.apply(keyset, pair, grad, cols, coding, *weight)
    with _below_autograd():
        op = getattr(torch.ops.kbitq, pair.back).default
        return op.redispatch(keyset & _after_autograd, grad, *weight, cols, coding)
