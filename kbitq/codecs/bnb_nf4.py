"""bitsandbytes' NF4 in blocks of 64 with float32 scales: the bytes that bitsandbytes writes for the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request
from kbitq.codecs.outputs import DTYPES, Output, dtype_of, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64
_ABSMAX, _MAP, _STATE = ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"


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

    def encode(self, w: Tensor, request: Request) -> dict[str, Tensor]:
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
        values = nf4.dequantize(codes, parts[_ABSMAX].view(-1), 2 * codes.numel(), BLOCK, dtype).view(-1, cols)
        return values if out is None else out.copy_(values)

    def quantization_config(self, k: int, not_converted: Sequence[str]) -> dict[str, Any]:
        """What transformers reads."""
        return {
            "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
            "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": DTYPES[self.dtype], "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(not_converted), "llm_int8_threshold": 6.0,
        }  # fmt: skip

    def _state(self, shape: Sequence[int]) -> bytes:
        table = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": DTYPES[self.dtype], "shape": list(shape)}
        return json.dumps(table).encode()


def make(name: str) -> BnbNf4:
    """The codec of a name: ``bnb-nf4``, with a dtype of the source behind it where that is not BF16."""
    stem, dtype = dtype_of(name)
    if stem != "bnb-nf4":
        raise unknown(name)
    return BnbNf4(name, dtype)
