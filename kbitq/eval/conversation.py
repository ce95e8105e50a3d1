"""A conversation with a causal language model: what was said, and how much of it the model is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kbitq.errors import KbitqError
from kbitq.eval.generation import Generation, check_request, continue_tokens, from_template, tokens_of
from kbitq.eval.key_values import KeptKeyValues

_NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
_LEAST_ROOM = 4  # an answer may take at least a 4th of the context: what was said first is forgotten for it


class Conversation:
    """Messages of a user and answers of a model, which is given all of them each time, in its chat template.

    Of these the model reads what is new: what it computed of the tokens that both begin with is kept between answers.

    A tokenizer without a template belongs to a base model, which continues text: it is given a transcript, and its
    answer ends where it begins to speak for the user.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        system: what the model is told first.
    """

    def __init__(self, model: Any, tokenizer: Any, system: str | None = None) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._first = [{"role": "system", "content": system}] if system else []
        self._said: list[dict[str, str]] = []
        self._kept = KeptKeyValues(model)
        self.forgotten = 0
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def clear(self) -> None:
        """Forget all that was said, but not what the system said."""
        self._said, self.forgotten = [], 0

    def answer(
        self,
        text: str,
        *,
        max_tokens: int,
        temperature: float | None = None,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """The answer to a message. Where it is interrupted, what came of it so far is what was said.

        ``forgotten`` counts the messages that the model is not given any more, because its context is full.

        Args:
            text: the message, not empty.
            max_tokens: of the answer; less where the context ends.
            temperature: None is the model's own.
            seed: of the drawing.
            on_text: called with each new piece of the answer.

        Raises:
            KbitqError: the message cannot be used or is longer than the context; the model or its tokenizer fails. The
                message was not said then.
        """
        check_request(text, temperature or 0.0, seed)
        self._said.append({"role": "user", "content": text})
        pieces: list[str] = []

        def hear(piece: str) -> None:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

        try:
            ids, room = self._prompt(max_tokens)
            return continue_tokens(
                self._model, self._tokenizer, ids, max_tokens=room, temperature=temperature, seed=seed, on_text=hear,
                stops=() if self.has_template else ("\nUser:",), kept=self._kept,
            )  # fmt: skip
        finally:
            if pieces:
                self._said.append({"role": "assistant", "content": "".join(pieces).strip()})
            else:
                self._said.pop()

    def _prompt(self, max_tokens: int) -> tuple[torch.Tensor, int]:
        """What the model is given, and how many tokens it may add."""
        limit = _context(self._model)
        while True:
            ids = tokens_of(self._tokenizer, self._text())
            room = max_tokens if limit is None else min(limit - ids.shape[1], max_tokens)
            if limit is None or room >= min(max_tokens, limit // _LEAST_ROOM):
                return ids, room
            if len(self._said) == 1:
                if room > 0:
                    return ids, room
                sentence = f"the message has {ids.shape[1]:,} tokens with its form, more than the model's {limit:,}"
                raise KbitqError(sentence)
            del self._said[:2]  # a message and its answer
            self.forgotten += 2

    def _text(self) -> str:
        said = [*self._first, *self._said]
        if self.has_template:
            return from_template(self._tokenizer, said)
        return "".join(f"{_NAMES[m['role']]}{m['content']}\n" for m in said) + _NAMES["assistant"].rstrip()


def _context(model: Any) -> int | None:
    """How many tokens a model can be given, if its config says so."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
