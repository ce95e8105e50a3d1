"""bitsandbytes as transformers saves it: NF4 and FP4 with plain or quantized scales, and int8 with a scale a row.

4 bits: ``X`` uint8 ``[n / 2, 1]``, codes in row-major order, the first in a byte's high half; ``X.absmax`` a scale for
each block of codes; ``X.quant_map`` the 16 levels; ``X.quant_state.bitsandbytes__nf4`` (or fp4) a JSON object with
shape, dtype and block size. Nested: absmax is uint8, and means
``X.nested_quant_map[code] * X.nested_absmax[block] + nested_offset``.
int8: ``X`` int8 and ``SCB``, the largest magnitude of each row: ``code * SCB / 127`` in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbitq.format import element_count, is_shape, matrix_shape
from kbitq.formats.base import FLOAT_DTYPES, Catalogue, ForeignWeight, Found, StoredValues

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_OF_127 = 7.874015718698502e-3  # bitsandbytes multiplies by this where it means / 127


@dataclass(frozen=True)
class Nested:
    """Scales that are quantized: levels and scales of blocks of ``block`` of them, and what is added to all."""

    levels: str
    absmax: str
    block: int
    offset: float


@dataclass(frozen=True)
class Bnb4(ForeignWeight):
    """A weight of 4 bits in blocks of ``block`` elements that run on over rows."""

    block: int
    nested: Nested | None

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.formats import affine
        from kbitq.ops.dtypes import TORCH_DTYPES

        cols = matrix_shape(self.name, self.shape)[1]
        first, count = first_row * cols, rows * cols
        start = first // self.block * self.block
        data = values.raw(self.stored[0], start // 2, -(-(first + count - start) // 2))
        blocks = -(-(first + count - start) // self.block)
        scale, levels = self._scales(values, start // self.block, blocks), values.whole(self.stored[2])
        place = out.view(-1) if out is not None and start == first else None
        decoded = affine.decode_flat(
            data, first + count - start, 4, scale, self.block, levels, TORCH_DTYPES[self.dtype], place
        )
        return out if out is not None and place is not None else decoded[first - start :].view(rows, cols)

    def _scales(self, values: StoredValues, first: int, count: int) -> Tensor:
        """Scales of some blocks, float32 ``[count]``."""
        import torch

        stored = values.elements(self.stored[1], first, count)
        if self.nested is None:
            return stored
        nested = self.nested
        block = torch.arange(first, first + count) // nested.block
        scale = values.elements(nested.absmax, int(block[0]), int(block[-1] - block[0]) + 1)
        levels = values.whole(nested.levels)[stored.long()]
        return levels * scale[block - block[0]] + torch.tensor(nested.offset, dtype=torch.float32)


@dataclass(frozen=True)
class BnbInt8(ForeignWeight):
    """A weight of 8 bits with a scale for each row."""

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.formats.tables import table
        from kbitq.ops.code_stream import decode_codes

        codes = values.rows(self.stored[0], first_row, rows)
        scale = values.elements(self.stored[1], first_row, rows)
        return decode_codes(codes, 8, self.shape[1], scale[:, None], scale.dtype, table=table("int8"), out=out).mul_(
            _OF_127
        )


def recognise(catalogue: Catalogue) -> Found:
    """bitsandbytes' weights. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for kind in KINDS:
        for name, _ in catalogue.ending(_STATE + kind):
            found.weights.append(_four_bits(catalogue, name, kind))
    for stem, scales in catalogue.ending("SCB"):
        codes = catalogue.tensors.get(stem + "weight")
        if codes is None or codes.dtype != "I8" or len(codes.shape) != 2:
            continue
        catalogue.want(scales.name, ("F32",), codes.shape[:1])
        layout = catalogue.tensors.get(stem + "weight_format")
        if layout is not None:
            if any(catalogue.peek(layout.name)):
                raise catalogue.broken(layout.name, "only the layout by rows (0) is read here")
            found.dropped[layout.name] = f"says the layout of {codes.name}"
        scheme = "bitsandbytes, 8 bits, a scale for each row"
        found.weights.append(BnbInt8(codes.name, codes.shape, "F32", scheme, (codes.name, scales.name)))
    return found


def _four_bits(catalogue: Catalogue, name: str, kind: str) -> Bnb4:
    state_name = f"{name}{_STATE}{kind}"
    state = catalogue.json(state_name)
    shape, block, dtype = state.get("shape"), state.get("blocksize"), FLOAT_DTYPES.get(str(state.get("dtype")))
    if not isinstance(shape, list) or not is_shape(shape) or len(shape) < 2 or block not in BLOCKS or dtype is None:
        raise catalogue.broken(state_name, "shape, blocksize or dtype in it are not those of a weight")
    count = element_count(shape)
    codes = catalogue.want(name, ("U8", "I8", "BF16", "F16", "F32"))  # bnb_4bit_quant_storage
    if codes.nbytes != -(-count // 2):
        raise catalogue.broken(name, f"its {codes.nbytes:,} bytes are not those of {count:,} codes of 4 bits")
    blocks = -(-count // block)
    nested = _nested(catalogue, name, state, blocks) if f"{name}.nested_absmax" in catalogue.tensors else None
    catalogue.want(f"{name}.absmax", ("U8",) if nested else ("F32",), (blocks,))
    catalogue.want(f"{name}.quant_map", ("F32",), (16,))
    parts = [name, f"{name}.absmax", f"{name}.quant_map", state_name]
    scheme = f"bitsandbytes, {kind.upper()}, blocks of {block}"
    if nested is not None:
        parts += [nested.absmax, nested.levels]
        scheme += " with quantized scales"
    return Bnb4(name, tuple(shape), dtype, scheme, tuple(parts), block, nested)


def _nested(catalogue: Catalogue, name: str, state: dict[str, Any], blocks: int) -> Nested:
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not isinstance(block, int) or not 1 <= block <= BLOCKS[-1] or not isinstance(offset, int | float):
        raise catalogue.broken(name, "nested_blocksize or nested_offset of its state are not numbers that fit")
    catalogue.want(f"{name}.nested_absmax", ("F32",), (-(-blocks // block),))
    catalogue.want(f"{name}.nested_quant_map", ("F32",), (256,))
    return Nested(f"{name}.nested_quant_map", f"{name}.nested_absmax", block, float(offset))
