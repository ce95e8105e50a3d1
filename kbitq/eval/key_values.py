"""What a model computed of a prompt and its answer: kept, so that the next prompt is read from where it differs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch


class KeptKeyValues:
    """The keys and values of one sequence, for prompts that begin as the one before.

    A model whose layers keep something else (a state that has no tokens) reads every prompt anew.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, None
        self._tokens: list[int] = []  # those whose keys and values are whole in every layer
        self._whole = True  # whether no layer has more than those

    def begin(self, ids: torch.Tensor) -> dict[str, Any]:
        """What ``model.generate`` gets beside a prompt, int64 ``[1, n]``; at least its last token is left to read."""
        prompt: list[int] = ids[0].tolist()
        pairs = zip(prompt[:-1], self._tokens, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._cache is None or not self._cut(common):
            self._cache, common = _empty(self._model), 0
        self._tokens, self._whole = prompt[:common], False
        return {} if self._cache is None else {"past_key_values": self._cache}

    def end(self, tokens: Sequence[int], *, whole: bool) -> None:
        """The model has read these tokens, and no others where it came to its end (``whole``)."""
        self._tokens, self._whole = list(tokens), whole

    def _cut(self, count: int) -> bool:
        """Keep the first ``count`` tokens. False where that cannot be done."""
        from transformers.cache_utils import DynamicLayer

        cache: Any = self._cache
        if self._whole and count == len(self._tokens) == cache.get_seq_length():
            return True
        layers = [layer for layer in cache.layers if layer.is_initialized]
        if any(type(layer) is not DynamicLayer or layer.get_seq_length() < count for layer in layers):
            return False  # a window that has moved on does not have what lies before it
        for layer in layers:
            # Not their `crop`, which takes the same number from each: where one was interrupted they differ in length.
            layer.keys, layer.values = layer.keys[..., :count, :], layer.values[..., :count, :]
        return True


def _empty(model: Any) -> Any:
    """Where a model is to put its keys and values; None where it has its own way."""
    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return None
    own: Any = model.generation_config
    takes_dynamic: Any = model._supports_default_dynamic_cache
    if own.cache_implementation is not None or own.use_cache is False or not takes_dynamic():
        return None
    cache = DynamicCache(config=model.config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if plain and cache.layers else None
