"""Reading a text and evaluating a model on it, with progress: for ``eval`` and ``quantize --kl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kbitq.checkpoint import Progress
from kbitq.cli.console import console
from kbitq.cli.views.text import count_text
from kbitq.eval.perplexity import Evaluation, evaluate, read_text, read_tokens, windows_of
from kbitq.eval.texts import tokenize
from kbitq.integrations.transformers.loading import load_tokenizer


def text_ids(folder: Path, text: Path, trust_remote_code: bool) -> Tensor:
    """The tokens of a text, int64, by the tokenizer of a model's folder."""
    words = read_text(text)
    return tokenize(words, load_tokenizer(folder, trust_remote_code=trust_remote_code))


def windows(model: Any, ids: Tensor | None, tokens: Path | None, window: int, count: int | None) -> Tensor:
    """Windows ``[n, window]`` of ids, or of a file of them for this model."""
    if ids is None:
        assert tokens is not None
        ids = read_tokens(tokens, model.get_input_embeddings().num_embeddings)
    return windows_of(ids, window, count)


def evaluated(model: Any, cut: Tensor, reference: Any = None, batch: int = 1) -> Evaluation:
    """``evaluate`` with progress shown."""
    with console.progress("reading", lambda rate: f"{count_text(rate)} tokens") as progress:

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(Progress(done * cut.shape[1], total * cut.shape[1], ""))

        return evaluate(model, cut, reference=reference, batch=batch, progress=report)
