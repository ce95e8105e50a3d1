"""How much each input column of a weight matters: mean squared activations, from a file.

Two kinds of file: ``.safetensors`` with a float tensor ``[in]`` (``[E, in]`` for fused experts) under the name of each
weight, and llama.cpp's importance matrices, GGUF or the older ``.dat``, whose names are mapped to those of Hugging Face
with the tables of the ``gguf`` package (``pip install 'kbitq[gguf]'``). A folder that ``kbitq calibrate`` wrote serves
as well, with the diagonals of its H over the number of tokens.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kbitq.errors import ImportanceError
from kbitq.format import is_fused_experts, matrix_shape

Values = npt.NDArray[np.float32]

_GGUF_MAGIC = b"GGUF"
_MAX_NAME = 1 << 10  # bytes of a name in a .dat file: more is not an importance matrix
_SUMS, _COUNTS = ".in_sum2", ".counts"  # what llama.cpp appends to a weight's name
_FUSED = {"gate_up_proj": "gate_proj", "gate_up": "gate_proj"}  # both halves see the same activations


@dataclass(frozen=True)
class Importance:
    """Importance by tensor, and the SHA-256 of the file that it came from (hexadecimal), or a folder's fingerprint."""

    path: Path
    sha256: str
    entries: Mapping[str, Values]
    from_llama_cpp: bool = False

    def __len__(self) -> int:
        return len(self.entries)

    def of(self, name: str, shape: Sequence[int]) -> Values | None:
        """The importance of a weight's columns, float32 ``[cols]`` or ``[E, cols]``; None without an entry.

        Raises ImportanceError where the entry does not fit the shape, or has a negative or non-finite value.
        """
        found = self._find(name)
        if found is None:
            return None
        values, entry, expert = found
        cols = matrix_shape(name, shape)[1]
        experts = shape[0] if is_fused_experts(name, shape) else 1
        if expert is not None and values.size % cols == 0 and expert < values.size // cols:
            values = values.reshape(-1, cols)[expert]
        if values.size not in (cols, experts * cols):
            raise ImportanceError(
                f"{self.path}: {entry} has {values.size} values, but {name} {list(shape)} has {cols} columns"
                + (f" and {experts} experts" if experts > 1 else "")
            )
        if not np.isfinite(values).all() or (values < 0).any():
            raise ImportanceError(f"{self.path}: {entry} has a value that is negative or not finite")
        return values.reshape(-1, cols) if values.size > cols else values.reshape(cols)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that have no entry."""
        return [name for name in names if self._find(name) is None]

    def _find(self, name: str) -> tuple[Values, str, int | None] | None:
        """The entry of a weight, its name in the file, and which expert's row of it is meant."""
        if name in self.entries:
            return self.entries[name], name, None
        if not self.from_llama_cpp:
            return None
        key, expert = _merged(name)
        for entry in _llama_cpp_names(key):
            if entry in self.entries:
                return self.entries[entry], entry, expert
        return None


def load_importance(path: str | Path) -> Importance:
    """Read an importance file, or a folder of statistics.

    Raises:
        ImportanceError: it cannot be read, is neither kind of file, or needs the ``gguf`` package, which is missing.
        CalibrationError: a folder is none of statistics, or cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        return _from_statistics(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImportanceError(f"{path}: the importance file cannot be read ({error.strerror})") from None
    digest = hashlib.sha256(data).hexdigest()
    if path.suffix == ".safetensors":
        return Importance(path, digest, _read_safetensors(path, data))
    _gguf(path)  # the names need it, whichever of the two formats it is
    entries = _read_gguf(path) if data[:4] == _GGUF_MAGIC else dict(_read_dat(path, data))
    return Importance(path, digest, entries, from_llama_cpp=True)


def _from_statistics(path: Path) -> Importance:
    """Mean squared activations; an expert that was given no tokens has zeros."""
    from kbitq.calibration.statistics import Statistics  # which imports torch

    statistics = Statistics.open(path)
    entries: dict[str, Values] = {}
    for name in statistics.names:
        found = statistics[name]
        if found.transposed:
            continue  # its inputs are rows: within a row, all weights count the same
        means = [found.diagonal(e).numpy() / np.float32(max(found.tokens_of(e), 1)) for e in range(found.experts)]
        entries[name] = np.stack(means) if found.experts > 1 else means[0]
    return Importance(path, statistics.fingerprint, entries)


# --- files -----------------------------------------------------------------------------------------


def _read_safetensors(path: Path, data: bytes) -> dict[str, Values]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as error:
        raise ImportanceError(f"{path}: not a safetensors file ({error})") from None
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def _gguf(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportanceError(
            f"{path}: reading llama.cpp's importance matrices needs the package gguf",
            hint="pip install 'kbitq[gguf]'",
        ) from None
    return gguf


def _read_gguf(path: Path) -> dict[str, Values]:
    """Mean squared activations are ``in_sum2 / counts``, by matrix; an expert that was never used has zeros."""
    try:
        tensors = {t.name: np.array(t.data, np.float32) for t in _gguf(path).GGUFReader(path).tensors}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ImportanceError(f"{path}: not a GGUF file that can be read ({error})") from None
    entries = {}
    for name, sums in tensors.items():
        if name.endswith(_SUMS):
            counts = tensors.get(name.removesuffix(_SUMS) + _COUNTS)
            if counts is None or not counts.size or sums.size % counts.size:
                raise ImportanceError(f"{path}: {name} has no counts that fit it")
            by_matrix, counts = sums.reshape(counts.size, -1), counts.reshape(-1, 1)
            entries[name.removesuffix(_SUMS)] = np.divide(
                by_matrix, counts, out=np.zeros_like(by_matrix), where=counts > 0
            ).reshape(-1)
    if not entries:
        raise ImportanceError(f"{path}: a GGUF file, but not an importance matrix", hint="llama-imatrix writes one")
    return entries


def _read_dat(path: Path, data: bytes) -> Iterator[tuple[str, Values]]:
    """int32 count of entries; for each int32 length and bytes of a name, int32 calls, int32 count, float32 sums."""
    broken = ImportanceError(
        f"{path}: neither .safetensors nor an importance matrix of llama.cpp (GGUF or .dat), or cut short"
    )
    at = 0

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise broken
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        return int(value)

    count = number()
    if not 0 < count < len(data):
        raise broken
    for _ in range(count):
        length = number()
        if not 0 < length <= _MAX_NAME or at + length > len(data):
            raise broken
        name = data[at : at + length].decode("utf-8", "replace")
        at += length
        calls, size = number(), number()
        if size < 1 or at + 4 * size > len(data):
            raise broken
        sums = np.frombuffer(data, "<f4", size, at).astype(np.float32)
        at += 4 * size
        yield name, sums / np.float32(calls) if calls > 0 else sums


# --- names -----------------------------------------------------------------------------------------


def _merged(name: str) -> tuple[str, int | None]:
    """The module under which llama.cpp's tables know a weight, and its expert where those are stored one by one.

    ``model.layers.3.mlp.experts.5.up_proj.weight`` -> ``model.layers.3.mlp.experts.up_proj``, 5.
    """
    parts = name.removesuffix(".weight").replace("language_model.", "").split(".")
    expert = None
    if "experts" in parts[:-1] and parts[(at := parts.index("experts")) + 1].isdigit():
        expert = int(parts.pop(at + 1))
    parts[-1] = _FUSED.get(parts[-1], parts[-1]) if "experts" in parts else parts[-1]
    return ".".join(parts), expert


def _llama_cpp_names(key: str) -> list[str]:
    """What llama.cpp may call the weight of a module, whatever the architecture: ``blk.3.attn_q.weight``."""
    tables = _tables()
    names = [f"{stem}.weight" for stem in tables.get(key, ())]
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", key):
        general = f"{key[: number.start()]}{{bid}}{key[number.end() :]}"
        names += [f"{stem.format(bid=number[0])}.weight" for stem in tables.get(general, ())]
    return names


_TABLES: dict[str, list[str]] = {}


def _tables() -> dict[str, list[str]]:
    """Names of modules in Hugging Face's models, ``{bid}`` for the layer, to those of llama.cpp; made once."""
    if not _TABLES:
        from gguf.constants import TENSOR_NAMES
        from gguf.tensor_mapping import TensorNameMap

        for table in (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg):
            for tensor, keys in table.items():
                for key in keys:
                    _TABLES.setdefault(key, []).append(TENSOR_NAMES[tensor])
    return _TABLES
