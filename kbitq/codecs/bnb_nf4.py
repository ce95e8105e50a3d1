"""bitsandbytes' NF4 in blocks of 64: the bytes that bitsandbytes writes for the same weights.

Scales are float32, or, with ``double`` in the name, quantized themselves (:mod:`kbitq.codecs.nested_scales`).

The mean of a tensor's scales is a number in a text beside them, so the size of that text depends on all of its values.
It is found before anything is written, and stands in the codec's name from then on: ``bnb-nf4-double:0.0123``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request
from kbitq.codecs.outputs import DTYPES, Output, dtype_of, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64
_NESTED_BLOCK = 256
_ABSMAX, _MAP, _STATE = ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"
_NESTED_ABSMAX, _NESTED_MAP = ".nested_absmax", ".nested_quant_map"
_USUAL_OFFSET = 0.012345678910111213  # for sizes before the mean is known: most means have as many digits


class BnbNf4(Output):
    """Codes of 4 bits over the flattened matrix, two in a byte, and a scale for 64 neighbours."""

    output = "bnb-nf4"
    ks = (4,)
    cut = BLOCK

    def __init__(self, name: str, dtype: str) -> None:
        self.name, self.dtype = name, dtype

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """As QuantState.as_dict(packed=True) of bitsandbytes names them."""
        count = shape[0] * shape[1]
        return (
            Part(_ABSMAX, "F32", (count // BLOCK,)),
            Part("", "U8", (count // 2, 1)),
            Part(_MAP, "F32", (16,), constant=True),
            Part(_STATE, "U8", (len(self._state(shape)),), constant=True),
        )

    def encode_rows(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of whole rows, or of whole blocks."""
        import torch

        from kbitq.ops import nf4

        codes, scales = nf4.quantize(w, BLOCK)
        state = self._state(request.shape or tuple(w.shape))
        return {
            _ABSMAX: scales,
            "": codes,
            _MAP: torch.tensor(nf4.LEVELS),
            _STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8),
        }

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Level times scale, rounded once."""
        from kbitq.ops import nf4

        codes = parts[""].view(-1)
        values = nf4.dequantize(codes, self._scales(parts), 2 * codes.numel(), BLOCK, dtype).view(-1, cols)
        return values if out is None else out.copy_(values)

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """What transformers reads."""
        return {
            "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
            "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": self.settles,
            "bnb_4bit_compute_dtype": DTYPES[self.dtype], "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(not_converted), "llm_int8_threshold": 6.0,
        }  # fmt: skip

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[_ABSMAX].view(-1)

    def _state(self, shape: Sequence[int]) -> bytes:
        return json.dumps(self._said(shape)).encode()

    def _said(self, shape: Sequence[int]) -> dict[str, Any]:
        return {"quant_type": "nf4", "blocksize": BLOCK, "dtype": DTYPES[self.dtype], "shape": list(shape)}


class BnbNf4Double(BnbNf4):
    """The same with scales of one byte. ``offset``: their mean, of a codec for one tensor."""

    output = "bnb-nf4-double"
    settles = True

    def __init__(self, name: str, dtype: str, offset: float | None) -> None:
        super().__init__(name, dtype)
        self.offset = offset

    @property
    def base(self) -> str:
        """As of an output codec."""
        return self.output

    def rows_together(self, cols: int) -> int:
        """Rows that end where 256 scales do."""
        together = BLOCK * _NESTED_BLOCK
        return together // math.gcd(cols, together)

    def settle(self, spans: Iterable[Tensor]) -> str | None:
        """The name with the mean of the scales in it. One float32 is held for 64 values."""
        import torch

        from kbitq.codecs.nested_scales import mean
        from kbitq.ops import nf4

        scales = torch.cat([nf4.quantize(w, BLOCK)[1] for w in spans])
        return f"{self.of_dtype(self.dtype)}:{mean(scales).item()!r}"

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """As QuantState.as_dict(packed=True) of bitsandbytes names them."""
        blocks = shape[0] * shape[1] // BLOCK
        scales, codes, *constants = super().parts(name, shape, k)
        return (
            Part(scales.name, "U8", scales.shape),
            codes,
            Part(_NESTED_ABSMAX, "F32", (-(-blocks // _NESTED_BLOCK),)),
            Part(_NESTED_MAP, "F32", (256,), constant=True),
            *constants,
        )

    def encode_rows(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of rows that end where 256 scales do, or with the matrix."""
        import torch

        from kbitq.codecs.nested_scales import dynamic_map, nest

        made = super().encode_rows(w, request)
        scales, largest = nest(made[_ABSMAX], torch.tensor(self._offset))
        return {**made, _ABSMAX: scales, _NESTED_ABSMAX: largest, _NESTED_MAP: dynamic_map(w.device)}

    @property
    def _offset(self) -> float:
        return _USUAL_OFFSET if self.offset is None else self.offset

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        from kbitq.codecs.nested_scales import unnest

        return unnest(parts[_ABSMAX].view(-1), parts[_NESTED_ABSMAX].view(-1), torch.tensor(self._offset))

    def _said(self, shape: Sequence[int]) -> dict[str, Any]:
        nested = {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": self._offset}
        return {**super()._said(shape), **nested}


def make(name: str) -> BnbNf4:
    """The codec of a name: ``bnb-nf4`` or ``bnb-nf4-double``, with a dtype of the source behind it where that is not
    BF16; of the latter for one tensor, with the mean of its scales. Raises CodecError for another."""
    known, _, mean = name.partition(":")
    stem, dtype = dtype_of(known)
    if stem == "bnb-nf4" and known == name:
        return BnbNf4(name, dtype)
    try:
        offset = float(mean) if known != name else None
    except ValueError:
        raise unknown(name) from None
    if stem != "bnb-nf4-double" or (offset is not None and not 0 <= offset < math.inf):
        raise unknown(name)
    return BnbNf4Double(name, dtype, offset)
