"""A server's linear method, without the server."""

from typing import Any

import torch

from kbitq.integrations.serving.linear import PackedLinear, PartLoading


class _Parameter(PartLoading, torch.nn.Parameter):
    """In the place of vLLM's parameter classes."""

    def __new__(cls, data: torch.Tensor, weight_loader: Any = None) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: Any = None) -> None:
        self.tp_rank = 0


class Method(PackedLinear):
    parameter_class = constant_class = _Parameter
