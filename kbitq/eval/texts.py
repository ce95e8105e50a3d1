"""Token ids from the files that a model is measured or calibrated on: text, lines of JSON, ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbitq.errors import KbitqError
from kbitq.eval.failures import told
from kbitq.eval.perplexity import read_text, read_tokens

FIELD = "text"
"""Of a line of JSON, by default."""

_LINES, _IDS = (".jsonl", ".ndjson"), ".tokens"


def read_ids(path: Path, tokenizer: Callable[[], Any], vocabulary: int, field: str = FIELD) -> Tensor:
    """Token ids of a file: ``.tokens`` holds ids, ``.jsonl`` an object a line, anything else is a text in UTF-8.

    Args:
        path: the file.
        tokenizer: gives the model's tokenizer, where one is needed.
        vocabulary: number of ids that there are.
        field: of the objects, what holds their text.

    Returns:
        int64 ``[n]``, without special tokens; the texts of a ``.jsonl`` one after the other.

    Raises:
        KbitqError: the file is not what its name says, or the tokenizer fails.
    """
    if path.suffix == _IDS:
        return read_tokens(path, vocabulary)
    text = read_text(path)
    texts = read_lines(text, path, field) if path.suffix in _LINES else [text]
    made = tokenizer()
    return torch.cat([tokenize(part, made) for part in texts])


def tokenize(text: str, tokenizer: Any) -> Tensor:
    """The tokens of a text, int64 ``[n]``, without special ones."""
    tokenizer.model_max_length = 1 << 62  # no warning: windows are cut from the ids
    with told("the tokenizer fails"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def read_lines(text: str, path: Path, field: str = FIELD) -> list[str]:
    """The texts of a file of JSON objects, one a line; empty lines do not count.

    Raises:
        KbitqError: a line is no such object, or there is none.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise KbitqError(f"{path}: line {number:,} is not JSON") from None
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                raise KbitqError(
                    f"{path}: line {number:,} has no text in a field {field!r}", remedy="field", hint="say which field"
                )
            found.append(row[field])
    if not found:
        raise KbitqError(f"{path} has no lines")
    return found
