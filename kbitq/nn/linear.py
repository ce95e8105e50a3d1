"""A linear layer that multiplies by its packed weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kbitq import format as fmt
from kbitq.codecs.base import get_codec
from kbitq.nn.packed import PackedMatrix
from kbitq.ops import tiled_linear
from kbitq.ops.linear import autocast
from kbitq.quantized import QuantizedTensor, quantize


class KbitLinear(PackedMatrix):
    """``torch.nn.Linear`` with a weight of k + 0.25 bits an element.

    Parameters (without gradient, named as in a quantized file): ``weight_packed`` int32 ``[out, nblk * k]``,
    ``weight_absmax`` uint8 ``[out, nblk]``, ``weight_codebook`` float32 ``[2^k]``, or ``[G, 2^k]``: a codebook for each
    of G equal groups of rows (fused projections). ``bias`` is an ordinary parameter. On a GPU the first product
    replaces the first two by ``weight_tiles`` (:mod:`kbitq.nn.tiled`); attributes, ``state_dict`` and copies have them
    as before.

    Args:
        in_features: of any size; the last block of a row may be short.
        out_features: rows of the weight.
        k: bits of an index, 2 to 8.
        bias: whether there is one.
        device: of the parameters, which are not initialised: load them, or use :meth:`from_linear`.
        dtype: of the bias and of :meth:`dequantize`; the default dtype if None.
        codec: how the weight is coded.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        k: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        codec: str = fmt.DEFAULT_CODEC,
    ) -> None:
        super().__init__(out_features, in_features, k, device=device, dtype=dtype, codec=codec)
        self.in_features, self.out_features = in_features, out_features
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=self.dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, module: nn.Linear, k: int, **options: Any) -> KbitLinear:
        """Quantize a linear layer.

        Args:
            module: the layer; its bias is shared, not copied.
            k: bits of an index.
            options: of :func:`kbitq.quantize`.
        """
        return cls.from_quantized(quantize(module.weight, k, **options), module.bias, dtype=module.weight.dtype)

    @classmethod
    def from_quantized(
        cls, q: QuantizedTensor, bias: nn.Parameter | None = None, dtype: torch.dtype | None = None
    ) -> KbitLinear:
        """A layer around a quantized matrix.

        Args:
            q: ``[out, in]``; its memory is shared.
            bias: ``[out]``, shared too.
            dtype: of :meth:`dequantize`; that of the matrix' source by default.
        """
        rows, cols = q.shape
        made = cls(cols, rows, q.k, bias=False, device="meta", dtype=dtype or q.dtype, codec=q.codec)
        made.set_quantized(q)
        made.bias = bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.in_features:  # the packed words cannot tell 63 columns from 64
            raise ValueError(f"input: has {input.shape[-1]} features, needs {self.in_features}")
        bias = self._parameters["bias"]  # without the search that getattr makes
        if self.tile_weight("weight", input):
            tiles, x = self.tiles_of("weight"), autocast(input)
            assert tiles is not None
            return tiled_linear.linear(x, tiles, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))
        return get_codec(self.info.codec).linear(input, self.parts_of("weight"), bias)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """An ordinary layer with the decoded weight."""
        weight = self.dequantize(dtype)
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=weight.dtype)
        made.weight = nn.Parameter(weight)
        bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(weight.dtype))
        made.register_parameter("bias", bias)
        return made.train(self.training)

    def __format__(self, spec: str) -> str:
        """PEFT formats a layer that it does not know into its error, which says nothing of a way out."""
        return f"{self!s} (for LoRA: kbitq.integrations.peft.for_packed(config))"

    def extra_repr(self) -> str:
        books = "" if self.groups == 1 else f", codebooks={self.groups}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, k={self.k}"
        return f"{sizes}{books}, bias={self.bias is not None}"
