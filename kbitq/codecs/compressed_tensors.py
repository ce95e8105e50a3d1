"""compressed-tensors, which vLLM and transformers load: integers of 4 and 8 bits for weights alone, and 8 bits
(integers or FP8) for weights and, as they come, activations. Scales have the dtype of the source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request
from kbitq.codecs.integer_groups import IntegerGroups
from kbitq.codecs.outputs import WHOLE_ROW, dtype_of, unknown

if TYPE_CHECKING:
    from torch import Tensor

FP8_BLOCK = 128
"""Rows and columns of a block of ``fp8-block``."""

_FP8_MOST = 448.0  # the largest float8_e4m3fn
_FP8_NORMAL = 2.0**-6  # the least of its numbers with a full mantissa
_FP8_ABOVE = 1.5 * 2.0**20  # a float32 of this many units in the first place of a value has three bits below it
_EXPONENT = 0x7F800000  # of a float32's bits
_PACKED = "compressed-tensors"


class CompressedTensors(IntegerGroups):
    """Integers: packed into words, or of 8 bits in bytes."""

    def __init__(self, name: str, output: str, group: int | None, dtype: str) -> None:
        super().__init__(name, group, dtype, (4, 8) if output == _PACKED else (8,))
        self.output = output
        if output == _PACKED:
            self.takes = frozenset((*self.takes, "rules", "budget"))

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """Codes, scales, and of packed codes the shape."""
        rows, cols = shape[0], shape[1]
        scale = Part("scale", self.dtype, (rows, 1 if self.group is None else -(-cols // self.group)))
        if self.output != _PACKED:
            return scale, Part("", "I8", (rows, cols))
        packed = Part("packed", "I32", (rows, -(-min(cols, WHOLE_ROW) * k // 32)))
        return packed, scale, Part("shape", "I64", (2,), constant=True)

    def assemble(self, codes: Tensor, scale: Tensor, request: Request) -> dict[str, Tensor]:
        """As of a codec of integers."""
        import torch

        from kbitq.ops.code_stream import pack_codes

        if self.output != _PACKED:
            return {"scale": scale, "": codes.to(torch.int8)}
        offset = (codes + (1 << request.k - 1)).to(torch.uint8)
        shape = torch.tensor(request.shape or tuple(codes.shape), dtype=torch.int64)
        return {"packed": pack_codes(offset, request.k), "scale": scale, "shape": shape}

    def take_apart(self, parts: Mapping[str, Tensor], cols: int) -> tuple[Tensor, Tensor]:
        """As of a codec of integers."""
        from kbitq.ops.code_stream import unpack_codes

        if "packed" not in parts:
            return parts[""].float(), parts["scale"]
        k = parts["packed"].shape[1] * 32 // cols
        return unpack_codes(parts["packed"], k, cols).float() - (1 << k - 1), parts["scale"]

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """What compressed-tensors and vLLM read."""
        strategy = "channel" if self.group is None else "group"
        inputs = None if self.output == _PACKED else _arguments(8, "int", "token", dynamic=True)
        schemes = {k: (_arguments(k, "int", strategy, self.group), inputs) for k in sorted(set(ks.values()))}
        form = "pack-quantized" if self.output == _PACKED else "int-quantized"
        return _config(form, schemes, ks, not_converted)


class Fp8(IntegerGroups):
    """FP8 (E4M3) with a scale for a row, and activations with a scale for a token."""

    output = "fp8"
    takes = frozenset(("importance",))

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name, None, dtype, (8,))

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """Scales and codes."""
        return Part("scale", self.dtype, (shape[0], 1)), Part("", "F8_E4M3", (shape[0], shape[1]))

    def assemble(self, codes: Tensor, scale: Tensor, request: Request) -> dict[str, Tensor]:
        """As of a codec of integers."""
        import torch

        return {"scale": scale, "": codes.to(torch.float8_e4m3fn)}

    def take_apart(self, parts: Mapping[str, Tensor], cols: int) -> tuple[Tensor, Tensor]:
        """As of a codec of integers."""
        return parts[""].float(), parts["scale"]

    def most(self, k: int) -> float:
        """As of a codec of integers."""
        return _FP8_MOST

    def codes(self, groups: Tensor, scale: Tensor, k: int) -> Tensor:
        """The nearest values of FP8, float32."""
        import torch

        return (groups / scale).clamp_(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).float()

    def round_(self, values: Tensor, k: int) -> Tensor:
        """As of a codec of integers: what a conversion does, quicker, but without the sign of zeros."""
        import torch

        values.clamp_(-_FP8_MOST, _FP8_MOST)
        # Added to a value, this leaves no bits below those that FP8 has at the value's power of two.
        above = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=_FP8_NORMAL).mul_(_FP8_ABOVE)
        return values.add_(above).sub_(above)

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """What compressed-tensors and vLLM read."""
        scheme = _arguments(8, "float", "channel"), _arguments(8, "float", "token", dynamic=True)
        return _config("float-quantized", {8: scheme}, ks, not_converted)


class Fp8Block(Fp8):
    """FP8 with a scale for 128 rows and 128 columns, and activations with a scale for 128 values of a token."""

    output = "fp8-block"

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name, dtype)
        self.cut = FP8_BLOCK

    def rows_together(self, cols: int) -> int:
        """As of an output codec."""
        return FP8_BLOCK

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """Scales of blocks, of which those of the last rows may be shorter, and codes."""
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        return Part("scale", self.dtype, blocks), Part("", "F8_E4M3", (shape[0], shape[1]))

    def encode_rows(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of rows that are whole blocks, or the last of a matrix."""
        tall = _in_blocks(w.float())
        weights = request.importance
        if weights is not None:
            weights = _in_blocks(weights[:1].expand(len(w), -1)).view(-1, FP8_BLOCK**2)
        scale = self.best_scales(tall.view(-1, FP8_BLOCK**2), request, weights)
        codes = self.codes(tall, scale.view(*tall.shape[:2], 1, 1).float(), request.k)
        return self.assemble(_in_rows(codes)[: len(w)], scale.view(tall.shape[:2]), request)

    def take_apart(self, parts: Mapping[str, Tensor], cols: int) -> tuple[Tensor, Tensor]:
        """Codes, and the scale of each row and group of columns."""
        codes = parts[""].float()
        return codes, parts["scale"].repeat_interleave(FP8_BLOCK, 0)[: len(codes)]

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """What compressed-tensors and vLLM read."""
        weights = _arguments(8, "float", "block") | {"block_structure": [FP8_BLOCK, FP8_BLOCK]}
        scheme = weights, _arguments(8, "float", "group", FP8_BLOCK, dynamic=True)
        return _config("float-quantized", {8: scheme}, ks, not_converted)


def _in_blocks(w: Tensor) -> Tensor:
    """``[rows, cols]`` as ``[blocks down, blocks across, 128, 128]``, filled up with zeros below."""
    import torch

    padded = torch.nn.functional.pad(w, (0, 0, 0, -len(w) % FP8_BLOCK))
    return padded.view(-1, FP8_BLOCK, w.shape[1] // FP8_BLOCK, FP8_BLOCK).transpose(1, 2).contiguous()


def _in_rows(blocks: Tensor) -> Tensor:
    """The reverse."""
    down, across = blocks.shape[:2]
    return blocks.transpose(1, 2).reshape(down * FP8_BLOCK, across * FP8_BLOCK)


_Scheme = tuple[dict[str, Any], "dict[str, Any] | None"]


def _config(
    form: str, schemes: Mapping[int, _Scheme], ks: Mapping[str, int], not_converted: Sequence[str]
) -> dict[str, Any]:
    """With several K, each has a group that names its modules; else there is one group of all Linear layers."""
    groups = {}
    for number, (k, (weights, inputs)) in enumerate(schemes.items()):
        mine = ["Linear"] if len(schemes) == 1 else sorted(name for name, its in ks.items() if its == k)
        groups[f"group_{number}"] = {
            "targets": mine, "weights": weights, "input_activations": inputs, "output_activations": None,
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "global_compression_ratio": None, "kv_cache_scheme": None, "config_groups": groups,
        "ignore": list(not_converted),
    }  # fmt: skip


def _arguments(
    bits: int, kind: str, strategy: str, group: int | None = None, *, dynamic: bool = False
) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": group,
        "dynamic": dynamic, "actorder": None, "block_structure": None,
        "observer": None if dynamic else "minmax", "observer_kwargs": {},
    }  # fmt: skip


def make(name: str) -> IntegerGroups:
    """The codec of a name: ``compressed-tensors-g128``, ``compressed-tensors-channel``, ``int8``, ``fp8`` or
    ``fp8-block``, each with a dtype of scales behind it where that is not BF16. Raises CodecError for another."""
    stem, dtype = dtype_of(name)
    if stem == "int8":
        return CompressedTensors(name, stem, None, dtype)
    if stem in ("fp8", "fp8-block"):
        return Fp8(name, dtype) if stem == "fp8" else Fp8Block(name, dtype)
    found = re.fullmatch(r"compressed-tensors(?:-channel|-g(\d{1,5}))?", stem)
    if found is None or (found[1] is not None and (int(found[1]) < 32 or int(found[1]) % 32)):
        raise unknown(name)
    group = None if stem.endswith("-channel") else int(found[1] or 128)
    return CompressedTensors(name, _PACKED, group, dtype)
