"""The windows of tokens that a calibration runs a model on, drawn from texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbitq.errors import CalibrationError
from kbitq.eval.texts import FIELD, read_ids

SAMPLES, LENGTH, SEED = 128, 2048, 0
BATCH_TOKENS = 4096
"""That go through a model at once, unless a window has more. Sums depend on it in their last digits."""


def draw(files: Sequence[Tensor], samples: int, length: int, seed: int) -> Tensor:
    """Windows of ``length`` tokens that do not overlap, drawn from all files alike, in the order of the text.

    Args:
        files: int64 ``[n]`` each; no window reaches from one into the next.
        samples: windows to draw.
        length: tokens of a window.
        seed: the same seed draws the same windows.

    Returns:
        int64 ``[samples, length]``.

    Raises:
        CalibrationError: the texts are too short.
    """
    whole = [ids[: ids.numel() // length * length].reshape(-1, length) for ids in files]
    windows = torch.cat(whole)
    if len(windows) < samples:
        tokens = sum(ids.numel() for ids in files)
        what = f"{tokens:,} tokens are {len(windows):,} windows of {length:,}, and {samples:,} are wanted"
        if not len(windows):
            raise CalibrationError(what, hint="give more text, or ask for shorter windows", remedy="no-window")
        raise CalibrationError(
            what,
            hint=f"give more text, or ask for {len(windows)} windows, or for shorter ones",
            remedy="few-windows",
            data={"count": str(len(windows))},
        )
    chosen = np.sort(np.random.Generator(np.random.PCG64(seed)).permutation(len(windows))[:samples])
    return windows[torch.from_numpy(chosen)].contiguous()


def read_files(
    texts: Sequence[Path], tokenizer: Callable[[], Any], vocabulary: int, field: str = FIELD
) -> list[Tensor]:
    """Token ids of each file, int64 ``[n]``. Raises KbitqError as ``read_ids``, and for ids beyond the vocabulary."""
    found = [read_ids(Path(path), tokenizer, vocabulary, field) for path in texts]
    for path, ids in zip(texts, found, strict=True):
        if ids.numel() and int(ids.max()) >= vocabulary:
            raise CalibrationError(f"{path}: its tokenizer gives ids that the model does not have ({vocabulary:,})")
    return found


def windows_at_once(windows: Tensor) -> int:
    """How many windows go through a model at once."""
    return max(1, BATCH_TOKENS // windows.shape[1])


def fingerprint(windows: Tensor) -> str:
    """SHA-256 (hexadecimal) of the ids of windows, int64 in little-endian order."""
    return hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
