"""What the codecs of other tools' formats share: parts that are cut by rows or groups, decoded values, error sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kbitq.codecs.base import Part, Request, SpanLike, part_kinds
from kbitq.errors import CodebookError, CodecError, FormatError
from kbitq.format import BLOCK, is_fused_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes that a format's scales may have, and torch's names of them."""

STRIP = 1 << 18
"""Values that are coded at once."""

WHOLE_ROW = 1 << 40
"""As a ``cut``: rows are not cut."""


class Output:
    """A codec of another tool's format. Subclasses say ``name``, ``output``, ``ks``, ``cut``, parts and values."""

    name: str
    output: str
    ks: Sequence[int]
    cut: int
    dtype: str = "BF16"
    settles = False
    takes: frozenset[str] = frozenset()

    @property
    def base(self) -> str:
        """As of an output codec."""
        return self.name.removesuffix(f"-{self.dtype}")

    def rows_together(self, cols: int) -> int:
        """As of an output codec."""
        return 1

    def settle(self, spans: Iterable[Tensor]) -> str | None:
        """As of an output codec."""
        return None

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        """As of a codec; every subclass defines it."""
        raise NotImplementedError  # abstract: the layout of a format

    def encode_rows(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of some rows, as of a codec; subclasses define it. ``request`` has the whole tensor's shape."""
        raise NotImplementedError  # abstract: the layout of a format

    def encode(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """As of a codec: strip by strip, since what is computed in between takes many times the memory of the rows."""
        import torch

        asked, weights = replace(request, shape=request.shape or tuple(w.shape)), request.importance
        made = []
        for rows in self._strips(w):
            own = weights if weights is None or len(weights) == 1 else weights[rows]
            made.append(self.encode_rows(w[rows], replace(asked, importance=own)))
        if len(made) == 1:
            return made[0]
        constant = part_kinds(self.name)
        return {n: made[0][n] if constant[n] else torch.cat([one[n] for one in made]) for n in made[0]}

    def _strips(self, w: Tensor) -> Iterator[slice]:
        """Runs of rows that are coded at once."""
        together = self.rows_together(w.shape[1])
        step = max(1, STRIP // (w.shape[1] * together)) * together
        return (slice(first, first + step) for first in range(0, len(w), step))

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """As of a codec; every subclass defines it."""
        raise NotImplementedError  # abstract: the layout of a format

    def of_dtype(self, dtype: str) -> str:
        """As of an output codec: dtypes that a format has no scales of go by the nearest that holds them."""
        scale = {"F64": "F32"}.get(dtype, dtype if dtype in DTYPES else "BF16")
        return self.base if scale == "BF16" else f"{self.base}-{scale}"

    def refusal(self, name: str, shape: Sequence[int]) -> str | None:
        """As of an output codec."""
        if is_fused_experts(name, shape) or len(shape) != 2:
            return f"has {len(shape)} dimensions, and {self.output} holds matrices only"
        if self.cut != WHOLE_ROW and shape[1] % self.cut:
            return f"has {shape[1]} columns, which are not whole groups of {self.cut}"
        return None

    def levels(self, spec: Any, k: int) -> tuple[None, str]:
        """As of a codec: there are none. Raises CodebookError where some are asked for."""
        if spec != "optimal":
            raise CodebookError(f"the format {self.output} has levels of its own, so no codebook can be given for it")
        return None, "none"

    def encode_into(self, w: Tensor, request: Request, parts: Mapping[str, Tensor]) -> None:
        """As of a codec."""
        for part, data in self.encode(w, request).items():
            if part in parts:
                parts[part].copy_(data)

    def block_stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """As of a codec."""
        import torch

        constant, tables = part_kinds(self.name), []
        for rows in self._strips(w):
            own = {n: part if constant[n] else _share(part, rows, len(w)) for n, part in parts.items()}
            tables.append(self._block_stats(w[rows], own))
        return tables[0] if len(tables) == 1 else torch.cat(tables)

    def _block_stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        error = w.double() - self.decode(parts, w.shape[1], torch.float32).double()
        columns = w.shape[1]
        blocks = [torch.nn.functional.pad(v, (0, -columns % BLOCK)).reshape(-1, BLOCK) for v in (w.double(), error)]
        return torch.stack([blocks[0].square().sum(1), blocks[1].square().sum(1), blocks[1].abs().amax(1)], 1)

    def stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """As of a codec; sums are taken block after block, so that they do not depend on where a row is cut."""
        import torch

        blocks = self.block_stats(w, parts).view(w.shape[0], -1, 3)
        sums = blocks[:, :, :2].cumsum(1)[:, -1]
        return torch.cat([sums, blocks[:, :, 2].amax(1)[:, None]], 1)

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        """As of a codec; of a part that is turned, as if it were not."""
        rows, column = divmod(span.first_element, span.row_length)
        above = self.parts("", (rows, span.row_length), k) if rows else ()
        before = {part.name: part.nbytes for part in above}
        one = [part for part in self.parts("", (1, span.row_length), k) if not part.constant]
        return {part.name: before.get(part.name, 0) + column * part.nbytes // span.row_length for part in one}

    def k_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
        """As of a codec; kbitq does not read its own output of this kind by its metadata."""
        raise FormatError(f"tensor {name}: {self.output} is written here, and read as a source")

    def shape_of(self, name: str, k: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Likewise."""
        raise FormatError(f"tensor {name}: {self.output} is written here, and read as a source")

    def check(self, parts: Mapping[str, Tensor], where: str) -> None:
        """As of a codec: there is nothing to check."""

    def problems(self, parts: Mapping[str, Tensor]) -> list[str]:
        """As of a codec."""
        return []

    def levels_of(self, parts: Mapping[str, Tensor]) -> None:
        """As of a codec."""

    def scale_counts(self, part: str, data: Tensor) -> None:
        """As of a codec: blocks are not counted."""

    def linear(self, x: Tensor, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """As of a codec."""
        import torch

        return torch.nn.functional.linear(x, self.decode(parts, x.shape[-1], x.dtype), bias)

    def tiles(self, parts: Mapping[str, Tensor], cols: int, expert: int | None = None) -> None:
        """As of a codec: there is no kernel of its own."""


def _share(part: Tensor, rows: slice, count: int) -> Tensor:
    """What of a part belongs to some of ``count`` rows: where a few rows share an element, whole such runs."""
    return part[len(part) * rows.start // count : len(part) * min(rows.stop, count) // count]


def dtype_of(name: str) -> tuple[str, str]:
    """A codec's name without the dtype of its scales, and that dtype."""
    stem, _, last = name.rpartition("-")
    return (stem, last) if last in DTYPES else (name, "BF16")


def unknown(name: str) -> CodecError:
    """The error for a name that no format has."""
    return CodecError(f"codec {name!r} is not known to this kbitq")
