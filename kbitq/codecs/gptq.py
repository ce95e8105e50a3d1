"""GPTQ as GPTQModel, transformers and vLLM load it: integers of 4 and 8 bits, symmetric, in the order of the columns.

``qweight`` has the codes of a column of the weight below each other, eight or four in a word. ``qzeros`` has the zero
point of every row and group, always 2^(K-1), less one as version 1 of the format wants it. Scales are half precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request
from kbitq.codecs.integer_groups import IntegerGroups
from kbitq.codecs.outputs import WHOLE_ROW, dtype_of, unknown

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = (32, 64, 128, 256, 512, 1024)
_CODES, _SCALES, _ZEROS, _INDEX = "/qweight", "/scales", "/qzeros", "/g_idx"
_DAMPING = 0.01
_IN_LAYERS = re.compile(r"\.\d+\.")


class Gptq(IntegerGroups):
    """See the module. ``group`` None: one scale a row."""

    output = "gptq"

    def __init__(self, name: str, group: int | None, dtype: str) -> None:
        super().__init__(name, group, dtype, (4, 8))

    def of_dtype(self, dtype: str) -> str:
        """As of an output codec: readers take half precision only."""
        return super().of_dtype(dtype if dtype in ("F16", "BF16") else "F16")

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """Codes and scales are turned; zero points and the groups of the columns are the same whatever the values."""
        rows, cols = shape[0], shape[1]
        groups = 1 if self.group is None else -(-cols // self.group)
        return (
            Part(_CODES, "I32", (-(-min(cols, WHOLE_ROW) * k // 32), rows), turned=True),
            Part(_SCALES, self.dtype, (groups, rows), turned=True),
            Part(_ZEROS, "I32", (groups, rows * k // 32), constant=True, counted=True),
            Part(_INDEX, "I32", (cols,), constant=True, counted=True),
        )

    def assemble(self, codes: Tensor, scale: Tensor, request: Request) -> dict[str, Tensor]:
        """As of a codec of integers; words and scales with the matrix's rows first."""
        import torch

        from kbitq.ops.code_stream import pack_codes

        rows, cols = request.shape or tuple(codes.shape)
        words = pack_codes((codes + (1 << request.k - 1)).to(torch.uint8), request.k)
        return {_CODES: words, _SCALES: scale, **_constants(rows, cols, request.k, self.group or cols)}

    def take_apart(self, parts: Mapping[str, Tensor], cols: int) -> tuple[Tensor, Tensor]:
        """As of a codec of integers."""
        from kbitq.ops.code_stream import unpack_codes

        k = parts[_CODES].shape[1] * 32 // cols
        return unpack_codes(parts[_CODES], k, cols).float() - (1 << k - 1), parts[_SCALES]

    def refusal(self, name: str, shape: Sequence[int]) -> str | None:
        """As of an output codec."""
        if (reason := super().refusal(name, shape)) is not None:
            return reason
        if not name.endswith(".weight") or _IN_LAYERS.search(name) is None:
            return "is not the weight of one of the model's layers, and readers of GPTQ look for no others"
        if shape[1] % 32 or shape[0] % 8:
            return f"is {shape[0]} x {shape[1]}, and GPTQ packs rows by 8 and columns by 32"
        return None

    def quantization_config(self, ks: Mapping[str, int], not_converted: Sequence[str]) -> dict[str, Any]:
        """What GPTQModel, transformers and vLLM read."""
        config = {
            "quant_method": "gptq", "bits": min(ks.values()), "group_size": self.group or -1, "desc_act": False,
            "sym": True, "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32", "static_groups": False,
            "true_sequential": False, "damp_percent": _DAMPING,
        }  # fmt: skip
        if left := [name for name in not_converted if _IN_LAYERS.search(name)]:
            config["modules_in_block_to_quantize"] = [sorted(ks)]
            config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in left}
        return config


@lru_cache(maxsize=1)  # for the next rows of the tensor
def _constants(rows: int, cols: int, k: int, width: int) -> dict[str, Tensor]:
    """The parts that do not depend on the values."""
    import torch

    zero = sum(((1 << k - 1) - 1) << shift for shift in range(0, 32, k))
    zeros = torch.full((-(-cols // width), rows * k // 32), zero, dtype=torch.int32)
    return {_ZEROS: zeros, _INDEX: torch.arange(cols, dtype=torch.int32) // width}


def make(name: str) -> Gptq:
    """The codec of a name: ``gptq``, ``gptq-g64``, ``gptq-channel``, with a dtype of scales behind it where that is not
    BF16. Raises CodecError for another."""
    stem, dtype = dtype_of(name)
    found = re.fullmatch(r"gptq(?:-channel|-g(\d{1,5}))?", stem)
    if found is None or dtype == "F32" or (found[1] is not None and int(found[1]) not in GROUPS):
        raise unknown(name)
    return Gptq(name, None if stem.endswith("-channel") else int(found[1] or 128), dtype)
