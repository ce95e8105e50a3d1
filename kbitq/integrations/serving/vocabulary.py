"""The table of a vocabulary: looked up in as an embedding, multiplied by as an output head, or both if tied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kbitq.integrations.serving import products
from kbitq.integrations.serving.linear import arriving_name, forget, part_dtype
from kbitq.integrations.serving.matrix import Arriving, Matrix, fixed, waiting
from kbitq.integrations.serving.names import StoredNames


class PackedVocabulary:
    """A server's method for embeddings and output heads of a folder that kbitq wrote.

    Args:
        stored: what the folder has.
        prefix: the layer's name, for messages; servers may not give an embedding one.
        is_head: whether the table is multiplied by, and so is held in tile order on a GPU. Of a tied one there is only
            that, and lookups turn the records that they touch back.
        dummy: whether the table is to be made up and not loaded.
    """

    def __init__(self, stored: StoredNames, prefix: str, is_head: bool, dummy: bool = False) -> None:
        self.stored, self.prefix, self.is_head = stored, prefix or "the embedding", is_head
        self.dummy = dummy

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer empty parameters that take what the files have of it; arguments as of ``PackedLinear``."""
        held: Any = layer
        shard = held.shard_indices
        begin, rows = shard.org_vocab_start_index, shard.org_vocab_end_index - shard.org_vocab_start_index
        arriving = Arriving(self.prefix, rows, input_size, self.stored.codecs)
        held.kbitq_arriving, held.kbitq_dtype = arriving, params_dtype
        held.kbitq_tied, held.kbitq_rows = self.is_head, output_partition_sizes[0]
        for part, constant in self.stored.arriving():

            def load(param: Any, loaded_weight: Tensor, part: Any = part, constant: bool = constant) -> None:
                if loaded_weight.numel():  # not the guard
                    own = loaded_weight if constant else loaded_weight.narrow(0, begin, rows)
                    arriving.take(part, own, param.device)

            dtype = params_dtype if part is None else part_dtype(self.stored, part)
            made = fixed(waiting((0,), dtype))
            made.weight_loader = load  # type: ignore[attr-defined]
            layer.register_parameter(arriving_name(part), made)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace what has arrived by what lookups and products need.

        Raises:
            FormatError: parts are missing or do not fit.
        """
        if hasattr(layer, "kbitq_pieces"):
            return
        source = getattr(layer, "kbitq_tied_to", None)
        if source is not None:
            self.process_weights_after_loading(source)
            layer.kbitq_pieces = source.kbitq_pieces
            for part in (None, *self.stored.part_names()):
                delattr(layer, arriving_name(part))
            for name, held in list(source._parameters.items()):
                layer.register_parameter(name, held)
            return
        if self.dummy:
            (coding,) = self.stored.codings_of([self.prefix])
            layer.kbitq_arriving.make_up(coding, layer.kbitq_dtype, layer._parameters[arriving_name(None)].device)
        table = layer.kbitq_arriving.finished(layer.kbitq_dtype)
        forget(layer, self.stored)
        products.place(layer, [_padded(table, layer.kbitq_rows)], tiled=layer.kbitq_tied)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T (+ bias)``: logits."""
        return products.multiply(layer, x, bias)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows of the table, ``[*input_.shape, cols]``."""
        return products.lookup(layer, input_, layer.kbitq_dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Make ``layer`` an output head that multiplies by the table of ``embed_tokens``."""
        method = embed_tokens.quant_method
        for part in (None, *self.stored.part_names()):
            delattr(layer, arriving_name(part))
        if not isinstance(method, PackedVocabulary):
            layer.quant_method = method
            return method.tie_weights(layer, embed_tokens)
        del layer.kbitq_arriving
        for name, held in embed_tokens._parameters.items():
            layer.register_parameter(name, held)  # the same objects: servers see by them that the two are tied
        object.__setattr__(layer, "kbitq_tied_to", embed_tokens)  # no child of the head
        embed_tokens.kbitq_tied = True
        return layer


def _padded(table: Matrix | Tensor, rows: int) -> Matrix | Tensor:
    if isinstance(table, Matrix):
        return table.padded(rows)
    return nn.functional.pad(table, (0, 0, 0, rows - table.shape[0]))
