"""Text from a causal language model, handed over as it comes, and how fast it came."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kbitq.errors import KbitqError
from kbitq.eval.failures import told
from kbitq.eval.key_values import KeptKeyValues


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
    """What transformers calls with the prompt and then with every token, and asks whether to stop.

    Args:
        tokenizer: decodes.
        on_text: gets each new piece of text.
        stops: the text ends before the first of these.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._on_text, self._stops = tokenizer, on_text, stops
        self.ids: list[int] = []
        self.times: list[float] = []
        self.text = self._shown = ""
        self._is_prompt, self._stopped = True, False

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += value.reshape(-1).tolist()
        self.times.append(time.monotonic())
        self._decode()
        self._show(final=self._stopped)

    def end(self) -> None:
        self._show(final=True)

    def stops_now(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """A stopping criterion of transformers: bool ``[batch]``."""
        return torch.full((ids.shape[0],), self._stopped, dtype=torch.bool, device=ids.device)

    def _decode(self) -> None:
        text = str(self._tokenizer.decode(self.ids, skip_special_tokens=True))
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self._stopped = bool(found)
        self.text = text[: min(found)] if found else text

    def _show(self, *, final: bool) -> None:
        """Hand over what is new. A character whose bytes are not all there yet decodes to U+FFFD, and waits."""
        text = self.text if final else self.text[: len(self.text) - self._held()]
        if self._on_text is not None and (final or not text.endswith("�")) and text.startswith(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop."""
        longest = max(map(len, self._stops), default=1) - 1
        begins = (n for n in range(longest, 0, -1) if any(s.startswith(self.text[-n:]) for s in self._stops))
        return min(next(begins, 0), len(self.text))


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
    template: bool = False,
    system: str | None = None,
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
        template: the prompt is a user's message, which the tokenizer's chat template puts into its form.
        system: with ``template``, a message of the system before it.

    Raises:
        KbitqError: an argument cannot be used (``check_request``), the tokenizer has no chat template, or the model or
            its tokenizer fails.
    """
    check_request(prompt, temperature, seed)
    text = from_template(tokenizer, messages(prompt, system)) if template else prompt
    ids = tokens_of(tokenizer, text)
    return continue_tokens(
        model, tokenizer, ids, max_tokens=max_tokens, temperature=temperature, seed=seed, on_text=on_text
    )


def messages(prompt: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation that begins, as chat templates take it."""
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": prompt}]


def from_template(tokenizer: Any, said: Sequence[Mapping[str, str]]) -> str:
    """Messages in the form of the tokenizer's chat template, up to where the answer begins.

    Raises:
        KbitqError: there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KbitqError(
            "the tokenizer has no chat template", hint="generate(template=False) continues text", remedy="no-template"
        )
    with told("the chat template fails"):
        return str(tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False))


def tokens_of(tokenizer: Any, text: str) -> torch.Tensor:
    """int64 ``[1, n]`` with n > 0, without special tokens but those in the text. Raises KbitqError."""
    with told("the tokenizer fails"):
        ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if not ids.numel():
        raise KbitqError("prompt: the tokenizer makes no token of it")
    return ids


def continue_tokens(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    *,
    max_tokens: int,
    temperature: float | None = 0.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
    stops: Sequence[str] = (),
    kept: KeptKeyValues | None = None,
) -> Generation:
    """Continue tokens, int64 ``[1, n]``.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        ids: the tokens.
        max_tokens: at most so many.
        temperature: as for ``generate``; None leaves it and the like to the model's generation_config.json.
        seed: of the drawing.
        on_text: called with each new piece of text.
        stops: the text ends before the first of these.
        kept: what the model computed of an earlier prompt, which this one may begin with; it has this one's after.

    Raises:
        KbitqError: the model or its tokenizer fails.
    """
    ids, stream = ids.to(model.device), _Stream(tokenizer, on_text, stops)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature is None:
        sampling = {}
    elif temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with told("the model cannot generate"), torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        started = time.monotonic()
        with _reusing(kept, ids, stream) as past:
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=stream,
                pad_token_id=padding, stopping_criteria=[stream.stops_now], **sampling, **past,
            )  # fmt: skip
    if not stream.times:
        raise KbitqError("the model made no token")
    first, last = stream.times[0], stream.times[-1]
    return Generation(stream.text, len(stream.ids), ids.shape[1], first - started, last - first)


@contextmanager
def _reusing(kept: KeptKeyValues | None, ids: torch.Tensor, stream: _Stream) -> Iterator[dict[str, Any]]:
    """What a model is given of an earlier prompt; what it has read, interrupted or not, is noted at the end."""
    if kept is None:
        yield {}
        return
    past, ended = kept.begin(ids), False
    try:
        yield past
        ended = True
    finally:
        if stream.ids:  # a token is handed over once all before it were read
            kept.end([*ids[0].tolist(), *stream.ids[:-1]], whole=ended)


def memory_of(model: nn.Module) -> Memory:
    """Bytes of a model's weights, and the peak of what holds them."""
    weights = {id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    device = next(model.parameters()).device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return Memory(sum(weights.values()), peak)
