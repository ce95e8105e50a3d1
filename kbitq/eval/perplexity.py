"""What a quantization is worth: perplexity of a language model, and how far its predictions are from another's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbitq.errors import KbitqError
from kbitq.eval.failures import told

WINDOW = 512
"""Tokens that are read together by default; each window stands for itself."""

_MOST_LOSS = 700.0  # nats: above, the perplexity is beyond float64
_ROWS = 128  # positions whose probabilities are float32 at once: the vocabulary may be large


@dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of a reference, over all predicted tokens.

    Attributes:
        mean, median, p99: of the Kullback-Leibler divergence KL(reference || model) in nats.
        same_top1: share of positions where both find the same token the likeliest.
        reference_perplexity: of the reference, on the same tokens.
    """

    mean: float
    median: float
    p99: float
    same_top1: float
    reference_perplexity: float


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`evaluate`: ``loss`` is the mean negative log likelihood in nats, perplexity exp(loss)."""

    perplexity: float
    loss: float
    windows: int
    window: int
    seconds: float
    divergence: Divergence | None = None

    @property
    def tokens(self) -> int:
        """Tokens read."""
        return self.windows * self.window


def read_tokens(path: str | Path, vocabulary: int) -> Tensor:
    """Token ids from a file of little-endian uint16 or uint32; which of the two shows in the values.

    Args:
        path: the file.
        vocabulary: number of ids that there are.

    Returns:
        int64 ``[n]``.

    Raises:
        KbitqError: the file holds no such ids.
    """
    data = Path(path).read_bytes()
    for dtype in ("<u4", "<u2"):  # 16-bit ids read as 32-bit ones are far too large, unless every second one is 0
        if len(data) % np.dtype(dtype).itemsize == 0:
            ids = np.frombuffer(data, dtype=dtype)
            if ids.size and int(ids.max()) < vocabulary:
                return torch.from_numpy(ids.astype(np.int64))
    raise KbitqError(
        f"{path} does not hold token ids below {vocabulary:,} as uint16 or uint32",
        hint="give ids that this model's tokenizer made",
        remedy="text",
    )


def read_text(path: str | Path) -> str:
    """A text from a file in UTF-8. Raises KbitqError where it holds something else."""
    data = Path(path).read_bytes()
    at = data.find(b"\0")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        raise KbitqError(
            f"{path} is not a text in UTF-8: its byte {at:,} is {data[at]:#04x}",
            hint="read_tokens reads token ids",
            remedy="tokens",
        )
    return text


def windows_of(tokens: Tensor, length: int = WINDOW, count: int | None = None) -> Tensor:
    """The first ``count`` whole windows (None: all) of ``length`` tokens, one after the other, as ``[count, length]``.

    Raises:
        KbitqError: there is not one whole window.
    """
    length = min(length, tokens.numel()) if count is None else length
    available = tokens.numel() // length if length > 1 else 0
    if available < (count or 1):
        raise KbitqError(f"{tokens.numel():,} tokens are not enough for {count or 1} windows of {length}")
    used = available if count is None else count
    return tokens[: used * length].reshape(used, length)


def evaluate(
    model: Any,
    windows: Tensor,
    *,
    reference: Any = None,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure a causal language model on windows of tokens.

    Args:
        model: called as ``model(input_ids=ids).logits``, as transformers' models are; it has a ``device``.
        windows: int64 ``[n, length]``; every window is read on its own, and all its tokens but the first are predicted.
        reference: another model over the same vocabulary, whose predictions the model's are compared with.
        batch: windows read at once.
        progress: called with the windows done and their number.

    Returns:
        An :class:`Evaluation`, with a divergence if there is a reference.
    """
    started = time.monotonic()
    total = base = 0.0
    divergences, agreements = [], 0
    for begin in range(0, len(windows), batch):
        ids = windows[begin : begin + batch]
        logits = _logits(model, ids)
        others = _logits(reference, ids) if reference is not None else None
        targets = ids[:, 1:].reshape(-1)
        for rows in torch.arange(targets.numel()).split(_ROWS):
            total += _loss(logits[rows], targets[rows])
            if others is not None:
                base += _loss(others[rows], targets[rows])
                divergences.append(_divergence(logits[rows], others[rows]))
                same = logits[rows].argmax(-1).cpu() == others[rows].argmax(-1).cpu()
                agreements += int(same.sum())
        if progress is not None:
            progress(min(begin + batch, len(windows)), len(windows))
    predicted = windows.shape[0] * (windows.shape[1] - 1)
    loss = total / predicted
    found = _summary(torch.cat(divergences), agreements / predicted, base / predicted) if divergences else None
    count, length = windows.shape
    perplexity = math.exp(loss) if loss < _MOST_LOSS else math.inf
    return Evaluation(perplexity, loss, count, length, time.monotonic() - started, found)


def _logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of all predictions but each window's last, ``[n * (length - 1), vocabulary]``, where they were made."""
    takes, length = getattr(getattr(model, "config", None), "max_position_embeddings", None), ids.shape[1]
    what = "the model cannot read the tokens"
    if isinstance(takes, int) and takes < length:
        what = f"the model takes {takes} tokens, and cannot read windows of {length}"
    with told(what), torch.inference_mode():
        logits = model(input_ids=ids.to(model.device)).logits
    return logits[:, :-1].reshape(-1, logits.shape[-1])


def _loss(logits: Tensor, targets: Tensor) -> float:
    """The sum of negative log likelihoods, in float64 (probabilities in float32)."""
    chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, targets.to(logits.device)[:, None])
    return -chosen.double().sum().item()


def _divergence(logits: Tensor, others: Tensor) -> Tensor:
    """KL(others || logits) by row, float32 on the CPU."""
    model = torch.log_softmax(logits.float(), dim=-1)
    reference = torch.log_softmax(others.float(), dim=-1).to(model.device)
    return (reference.exp() * (reference - model)).sum(-1).clamp_min(0).cpu()


def _summary(divergences: Tensor, same_top1: float, reference_loss: float) -> Divergence:
    wide = divergences.double().numpy()
    median, p99 = np.quantile(wide, (0.5, 0.99))
    return Divergence(float(wide.mean()), float(median), float(p99), same_top1, math.exp(reference_loss))
