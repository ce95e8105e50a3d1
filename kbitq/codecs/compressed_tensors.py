"""compressed-tensors, which vLLM and transformers load: integers of 4 and 8 bits for weights alone, and 8 bits
(integers or FP8) for weights and, as they come, activations. Scales have the dtype of the source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request
from kbitq.codecs.outputs import DTYPES, WHOLE_ROW, Output, dtype_of, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHRINKS = tuple(1 - 0.03 * i for i in range(14))
"""What ``mse`` multiplies the largest magnitude of a group by; the best of them is kept."""

_FP8_MOST = 448.0  # the largest float8_e4m3fn


class CompressedTensors(Output):
    """One scale for a group of columns or a row: ``weight = code * scale``."""

    def __init__(self, name: str, output: str, group: int | None, dtype: str) -> None:
        self.name, self.output, self.group, self.dtype = name, output, group, dtype
        self.ks = (4, 8) if output == "compressed-tensors" else (8,)
        self.cut = WHOLE_ROW if group is None else group

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """Codes, scales, and of packed codes the shape."""
        rows, cols = shape[0], shape[1]
        scale = Part("scale", self.dtype, (rows, 1 if self.group is None else -(-cols // self.group)))
        if self.output == "int8":
            return scale, Part("", "I8", (rows, cols))
        if self.output == "fp8":
            return scale, Part("", "F8_E4M3", (rows, cols))
        packed = Part("packed", "I32", (rows, -(-min(cols, WHOLE_ROW) * k // 32)))
        return packed, scale, Part("shape", "I64", (2,), constant=True)

    def encode(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of whole rows, or of whole groups."""
        import torch

        from kbitq.ops.code_stream import pack_codes

        groups = w.float().reshape(-1, self.group or w.shape[1])
        scale = self._scales(groups, request).view(w.shape[0], -1)
        codes = self._codes(groups, scale.view(-1, 1).float(), request.k).view(w.shape)
        if self.output != "compressed-tensors":
            return {"scale": scale, "": codes.to(torch.int8 if self.output == "int8" else torch.float8_e4m3fn)}
        offset = (codes + (1 << request.k - 1)).to(torch.uint8)
        shape = torch.tensor(request.shape or tuple(w.shape), dtype=torch.int64)
        return {"packed": pack_codes(offset, request.k), "scale": scale, "shape": shape}

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """``code * scale``, rounded to the dtype of the scales as its readers do, then to ``dtype``."""
        import torch

        from kbitq.ops.code_stream import unpack_codes

        scale = parts["scale"]
        if "packed" in parts:
            k = parts["packed"].shape[1] * 32 // cols
            codes = unpack_codes(parts["packed"], k, cols).float() - (1 << k - 1)
        else:
            codes = parts[""].float()
        groups = codes.view(scale.numel(), -1) * scale.view(-1, 1).float()
        values = groups.view(-1, cols).to(getattr(torch, DTYPES[self.dtype])).to(dtype)
        return values if out is None else out.copy_(values)

    def quantization_config(self, k: int, not_converted: Sequence[str]) -> dict[str, Any]:
        """What compressed-tensors and vLLM read."""
        kind = "float" if self.output == "fp8" else "int"
        formats = {"compressed-tensors": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
        weights = _arguments(k, kind, "channel" if self.group is None else "group", self.group)
        inputs = None if self.output == "compressed-tensors" else _arguments(8, kind, "token", None, dynamic=True)
        return {
            "quant_method": "compressed-tensors", "format": formats[self.output],
            "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None,
                }
            },
            "ignore": list(not_converted),
        }  # fmt: skip

    def _scales(self, groups: Tensor, request: Request) -> Tensor:
        """One scale a group in the dtype that is stored, that of least squared error where ``mse`` asks for it."""
        import torch

        most = _FP8_MOST if self.output == "fp8" else (1 << request.k - 1) - 1
        dtype = getattr(torch, DTYPES[self.dtype])
        # A scale that rounds to 0, or to infinity, would lose the group.
        least, large = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        amax = groups.abs().amax(1, keepdim=True) / most
        best = torch.full_like(amax, float("inf"))
        chosen = torch.ones_like(amax).to(dtype)
        for shrink in SHRINKS if request.scale == "mse" else SHRINKS[:1]:
            scale = torch.where(amax > 0, (amax * shrink).clamp(least, large), 1.0).to(dtype)
            wide = scale.float()
            error = (self._codes(groups, wide, request.k) * wide - groups).square_().sum(1, keepdim=True)
            chosen = torch.where(error < best, scale, chosen)
            best = torch.minimum(best, error)
        return chosen

    def _codes(self, groups: Tensor, scale: Tensor, k: int) -> Tensor:
        """The nearest codes, float32."""
        import torch

        share = groups / scale
        if self.output == "fp8":
            return share.clamp_(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).float()
        return share.round_().clamp_(-(1 << k - 1), (1 << k - 1) - 1)


def _arguments(bits: int, kind: str, strategy: str, group: int | None, *, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": group,
        "dynamic": dynamic, "actorder": None, "block_structure": None,
        "observer": None if dynamic else "minmax", "observer_kwargs": {},
    }  # fmt: skip


def make(name: str) -> CompressedTensors:
    """The codec of a name: ``compressed-tensors-g128``, ``compressed-tensors-channel``, ``int8``, ``fp8``, each with a
    dtype of scales behind it where that is not BF16. Raises CodecError for another."""
    stem, dtype = dtype_of(name)
    if stem in ("int8", "fp8"):
        return CompressedTensors(name, stem, None, dtype)
    found = re.fullmatch(r"compressed-tensors(?:-channel|-g(\d{1,5}))?", stem)
    if found is None or (found[1] is not None and (int(found[1]) < 32 or int(found[1]) % 32)):
        raise unknown(name)
    group = None if stem.endswith("-channel") else int(found[1] or 128)
    return CompressedTensors(name, "compressed-tensors", group, dtype)
