"""Where weights come from that are no checkpoint: files that a loader has found, and tensors in memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kbitq.checkpoint.source.header import LENGTH_BYTES
from kbitq.checkpoint.source.side_files import INDEX_SUFFIX
from kbitq.checkpoint.source.storage import ByteFile, Fingerprint, LocalFile
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_FILE
from kbitq.ops.dtypes import STORED_NAMES

_FILE = "model.safetensors"


class ModelFiles:
    """The weight files that a loader has found, with the config and the index beside them; links are followed.

    Args:
        files: paths of safetensors files of one folder.
    """

    distant, single = False, None

    def __init__(self, files: Sequence[str | Path]) -> None:
        folder = Path(files[0]).parent
        self.where = self.name = self.label = str(folder)
        self._paths = {Path(file).name: Path(file) for file in files}
        beside = [folder / CONFIG_FILE]
        if len(files) > 1 and len(indexes := list(folder.glob(f"*{INDEX_SUFFIX}"))) == 1:
            beside += indexes
        self._paths.update({path.name: path for path in beside if path.is_file()})

    def names(self) -> list[str]:
        return sorted(self._paths)

    def skipped(self) -> list[str]:
        return []

    def open(self, name: str) -> ByteFile:
        return LocalFile(self._paths[name].resolve(), str(self._paths[name]))


class TensorStorage:
    """A file that is not there: its header is made from the tensors, and its bytes are theirs.

    Args:
        tensors: by name; one on the meta device has a shape and no bytes.
        where: names them in messages.
    """

    distant, single = False, _FILE

    def __init__(self, tensors: Mapping[str, Tensor], where: str = "the model") -> None:
        self.where = self.name = self.label = where
        self._tensors = {n: t.detach() for n, t in tensors.items() if t.dtype in STORED_NAMES}

    def names(self) -> list[str]:
        return [_FILE]

    def skipped(self) -> list[str]:
        return []

    def open(self, name: str) -> ByteFile:
        return _TensorFile(self._tensors, self.where)


class _TensorFile:
    """The bytes of a safetensors file of these tensors, made as they are read."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where = where
        table, at = {}, 0
        for name, tensor in tensors.items():
            ends = [at, at := at + tensor.nbytes]
            table[name] = {"dtype": STORED_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        text = json.dumps(table).encode()
        self._head = len(text).to_bytes(LENGTH_BYTES, "little") + text
        self._tensors = [tensor for tensor in tensors.values() if tensor.nbytes]
        starts = [len(self._head)]
        for tensor in self._tensors:
            starts.append(starts[-1] + tensor.nbytes)
        self._starts, self.size = starts[:-1], starts[-1]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        if not 0 <= offset <= self.size - len(buffer):
            raise CheckpointError(f"{self.where} ends before byte {offset + len(buffer):,}")
        while done < len(buffer):
            piece = self._piece(offset + done, len(buffer) - done)
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.size, "in memory")

    def close(self) -> None:
        """There is nothing to close."""

    def _piece(self, at: int, count: int) -> memoryview:
        """Up to ``count`` bytes from byte ``at`` on, of the header or of one tensor."""
        if at < len(self._head):
            return memoryview(self._head)[at : at + count]
        which = bisect_right(self._starts, at) - 1
        tensor, first = self._tensors[which], at - self._starts[which]
        if tensor.is_meta:
            raise CheckpointError(f"{self.where} has no values yet")
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)[first : first + count]
        return memoryview(flat.cpu().numpy())  # type: ignore[arg-type]
