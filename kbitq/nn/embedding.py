"""An embedding whose table stays packed; a lookup decodes the rows asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kbitq import format as fmt
from kbitq.codecs.base import get_codec, part_kinds
from kbitq.nn.packed import PackedMatrix
from kbitq.ops import tiled_linear
from kbitq.ops.tiles import Tiles
from kbitq.quantized import QuantizedTensor, quantize


class KbitEmbedding(PackedMatrix):
    """``torch.nn.Embedding`` with a table of k + 0.25 bits an element; the table has no gradient.

    Parameters as in :class:`KbitLinear`: ``weight_packed``, ``weight_absmax``, ``weight_codebook``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row, of any size.
        k: bits of an index, 2 to 8.
        padding_idx: kept for those who ask; it only matters to gradients.
        device: of the parameters, which are not initialised: load them, or use :meth:`from_embedding`.
        dtype: of the looked-up vectors; the default dtype if None. Follows ``.to(dtype)``.
        codec: how the table is coded.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        k: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        codec: str = fmt.DEFAULT_CODEC,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, k, device=device, dtype=dtype, codec=codec)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def from_embedding(cls, module: nn.Embedding, k: int, **options: Any) -> KbitEmbedding:
        """Quantize an embedding.

        Args:
            module: the embedding.
            k: bits of an index.
            options: of :func:`kbitq.quantize`.

        Raises:
            ValueError: it has ``max_norm``.
        """
        if module.max_norm is not None:
            raise ValueError("an embedding with max_norm changes its table at each lookup, so it cannot stay packed")
        q = quantize(module.weight, k, **options)
        return cls.from_quantized(q, module.padding_idx, dtype=module.weight.dtype)

    @classmethod
    def from_quantized(
        cls, q: QuantizedTensor, padding_idx: int | None = None, dtype: torch.dtype | None = None
    ) -> KbitEmbedding:
        """An embedding around a quantized table.

        Args:
            q: ``[rows, dim]``; its memory is shared.
            padding_idx: kept for those who ask.
            dtype: of the looked-up vectors; that of the table's source by default.
        """
        rows, cols = q.shape
        made = cls(rows, cols, q.k, padding_idx, device="meta", dtype=dtype or q.dtype, codec=q.codec)
        made.set_quantized(q)
        return made

    follows_others = True

    def _make_tiles(self, name: str, parts: Mapping[str, Tensor]) -> Tiles | None:
        """A lookup does not need tiles, but a layer that is tied to this table may have made them."""
        return get_codec(self.info.codec).tiles_made(parts)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1)
        if self.tile_weight("weight"):
            tiles = self.tiles_of("weight")
            assert tiles is not None
            return tiled_linear.lookup(rows, tiles, self.dtype).view(*input.shape, self.embedding_dim)
        kinds = part_kinds(self.info.codec)
        chosen = {name: held if kinds[name] else held[rows] for name, held in self.parts.items()}
        vectors = get_codec(self.info.codec).decode(chosen, self.embedding_dim, self.dtype)
        return vectors.view(*input.shape, self.embedding_dim)

    def to_embedding(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ordinary embedding with the decoded table."""
        made = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, _weight=self.dequantize(dtype))
        return made.train(self.training)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, k={self.k}{padding}"
