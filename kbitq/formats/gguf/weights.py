"""GGUF's weights. Imports torch where it decodes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbitq.format.ggml_types import BY_NAME, GgmlType
from kbitq.formats.base import Catalogue, ForeignWeight, Found, StoredValues, matrix_of
from kbitq.formats.gguf.names import Named

if TYPE_CHECKING:
    from torch import Tensor

METADATA_KEY = "gguf"
DECODED_DTYPE = "F32"  # what ggml decodes blocks to
_MOST_HEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class GgufWeight(ForeignWeight):
    """A weight in blocks, or one that llama.cpp turned round or widened.

    ``stored`` has uint8 ``[rows, bytes of a row]``, or one row for a vector.
    """

    type: GgmlType
    heads: int
    less: int
    transposed: bool

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.ops import gguf

        if self.transposed:
            return self._columns(values, first_row, rows)
        if self.heads and len(self.shape) == 1:
            return self._in_order(self._values(self._rows(values, 0, 1)).view(-1, 1)).view(1, -1)
        raw = (self._permuted if self.heads else self._rows)(values, first_row, rows)
        if out is None or self.type.plain is not None or self.less:
            return self._values(raw).view(rows, -1)
        gguf.dequantize_into(raw, self.type.name, out.view(-1))
        return out

    def _rows(self, values: StoredValues, first: int, count: int) -> Tensor:
        """Bytes of rows of the matrix; a row of a stack of matrices may be several that are stored."""
        each = math.prod(self.shape[:-1]) // matrix_of(self)[0]
        return values.rows(self.stored[0], first * each, count * each)

    def _values(self, raw: Tensor) -> Tensor:
        """Values of rows of bytes."""
        from kbitq.ops import gguf
        from kbitq.ops.dtypes import TORCH_DTYPES

        cols = raw.shape[1] // self.type.nbytes * self.type.values
        if self.type.plain is not None:
            decoded = gguf.plain(raw, self.type.name)
        else:
            decoded = gguf.dequantize(raw, self.type.name, (raw.shape[0], cols))
        decoded = decoded - self.less if self.less else decoded
        return decoded.to(TORCH_DTYPES[self.dtype])

    def _permuted(self, values: StoredValues, first: int, count: int) -> Tensor:
        """Bytes of rows in Hugging Face's order."""
        size = self.shape[0] // self.heads
        start, stop = first // size * size, -(-(first + count) // size) * size
        turned = self._in_order(values.rows(self.stored[0], start, stop - start))
        return turned[first - start : first - start + count].contiguous()

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of whole heads: of each first the even ones of llama.cpp's, then the odd ones."""
        size = self.shape[0] // self.heads
        return rows.view(-1, size // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    def _columns(self, values: StoredValues, first: int, count: int) -> Tensor:
        """Columns of the stored matrix as rows."""
        block = first // self.type.values
        blocks = -(-(first + count) // self.type.values) - block
        raw = values.columns(self.stored[0], block * self.type.nbytes, blocks * self.type.nbytes)
        at = first - block * self.type.values
        return self._values(raw)[:, at : at + count].t().contiguous()


def recognise(catalogue: Catalogue) -> Found:
    """The weights that a GGUF file's header announces (``announced``)."""
    found = Found()
    text = catalogue.metadata.get(METADATA_KEY)
    if text is None:
        return found
    for name, entry in json.loads(text).items():
        found.weights.append(_weight(catalogue, name, entry))
    return found


def _weight(catalogue: Catalogue, name: str, entry: Mapping[str, Any]) -> GgufWeight:
    kind, shape = BY_NAME[entry["type"]], tuple(entry["shape"])
    stored = catalogue.want(name, ("U8",))
    if entry["heads"] and stored.nbytes // entry["heads"] > _MOST_HEAD_BYTES:
        raise catalogue.broken(name, f"{entry['heads']} heads of it are larger than any model's")
    return GgufWeight(
        name,
        shape,
        entry["dtype"] or kind.plain or DECODED_DTYPE,
        "" if kind.plain else f"GGUF {kind.name}",
        (name,),
        kind,
        entry["heads"],
        entry["less"],
        entry["transposed"],
    )


def announced(named: Sequence[Named]) -> str:
    """What a header's metadata says of the tensors that are no ordinary ones, for ``recognise``."""
    return json.dumps(
        {
            n.name: {
                "type": n.tensor.type.name,
                "shape": n.shape,
                "heads": n.heads,
                "less": n.less,
                "transposed": n.transposed,
                "dtype": n.dtype,
            }
            for n in named
            if not n.as_it_is
        }
    )


def stored_shape(named: Named) -> tuple[int, int]:
    """Rows and bytes of a row, as the file has them."""
    rows = 1 if len(named.shape) == 1 else named.shape[-1] if named.transposed else _rows(named.shape)
    return rows, named.nbytes // rows


def _rows(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows
