"""Text from a causal language model, handed over as it comes, and how fast it came."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kbitq.errors import KbitqError
from kbitq.eval.failures import told


@dataclass(frozen=True)
class Generation:
    """What was generated, and at what speed.

    Attributes:
        text: the continuation, without the prompt.
        tokens: number of tokens generated.
        prompt_tokens: number of tokens of the prompt.
        prefill_seconds: until the first token.
        decode_seconds: from the first token to the last.
    """

    text: str
    tokens: int
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token, which waits for the prompt, does not count. 0 if there was only one."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes in use: of the model's weights, and the most that the process (CPU) or the device (CUDA) has held."""

    weights: int
    peak: int


class _Stream:
    """What transformers calls with the prompt and then with every token."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self.ids: list[int] = []
        self.times: list[float] = []
        self._shown = ""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += value.reshape(-1).tolist()
        self.times.append(time.monotonic())
        self._show(final=False)

    def end(self) -> None:
        self._show(final=True)

    @property
    def text(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def _show(self, *, final: bool) -> None:
        """Hand over what is new. A character whose bytes are not all there yet decodes to U+FFFD, and waits."""
        text = self.text
        if self._on_text is not None and (final or not text.endswith("�")) and text.startswith(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text


def check_request(prompt: str, temperature: float = 0.0, seed: int = 0) -> None:
    """Raise KbitqError, which names the argument, for what no model can generate from, before a model is loaded."""
    if not prompt:
        raise KbitqError("prompt: is empty, and there must be a text to continue")
    if not _is_unicode(prompt):
        raise KbitqError("prompt: is not valid Unicode; in a terminal, not valid UTF-8")
    if not 0 <= temperature < math.inf:
        raise KbitqError(f"temperature: must be a number from 0 up, not {temperature}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise KbitqError(f"seed: must fit 64 bits, not {seed}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue a prompt.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        prompt: not empty.
        max_tokens: at most so many; the end-of-text token ends earlier.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn.
        seed: of the drawing; the state of torch's generators is left as it was.
        on_text: called with each new piece of text.

    Raises:
        KbitqError: an argument cannot be used (``check_request``), or the model or its tokenizer fails.
    """
    check_request(prompt, temperature, seed)
    with told("the tokenizer fails"):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
    if not ids.numel():
        raise KbitqError("prompt: the tokenizer makes no token of it")
    stream = _Stream(tokenizer, on_text)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with told("the model cannot generate"), torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        started = time.monotonic()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=stream,
            pad_token_id=padding, **sampling,
        )  # fmt: skip
    if not stream.times:
        raise KbitqError("the model made no token")
    first, last = stream.times[0], stream.times[-1]
    return Generation(stream.text, len(stream.ids), ids.shape[1], first - started, last - first)


def memory_of(model: nn.Module) -> Memory:
    """Bytes of a model's weights, and the peak of what holds them."""
    weights = {id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    device = next(model.parameters()).device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return Memory(sum(weights.values()), peak)
