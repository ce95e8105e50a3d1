"""How decoders of other tools' formats read stored tensors: rows, columns and elements of them, a tile's worth."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from threading import Lock

import torch
from torch import Tensor

from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.open_files import OpenFiles
from kbitq.format import stored_dtype
from kbitq.ops.dtypes import TORCH_DTYPES

_COPY_BYTES = 8 << 20
_KEPT_BYTES = 4 << 20  # of the tensors that are kept whole: group indices, scales of a row, tables


class TensorValues:
    """The stored tensors that one weight is made of. Calls may come from several threads."""

    def __init__(
        self, checkpoint: Checkpoint, files: OpenFiles, parts: tuple[SourceTensor, ...], band_bytes: int
    ) -> None:
        """``band_bytes``: of a matrix read by columns, as many are read (and kept) at once as fit."""
        self._parts: Mapping[str, SourceTensor] = {part.name: part for part in parts}
        self._files, self._distant = files, checkpoint.storage.distant
        self._kept: dict[str, Tensor] = {}
        self._band_bytes, self._bands = band_bytes, dict[str, tuple[int, Tensor]]()
        self._copies: dict[str, int] = {}  # descriptors of nameless files
        self._lock = Lock()

    def whole(self, name: str) -> Tensor:
        with self._lock:
            if name in self._kept:
                return self._kept[name]
        part = self._parts[name]
        tensor = self._read(part, 0, part.nbytes).view(part.shape)
        if part.nbytes <= _KEPT_BYTES:
            with self._lock:
                self._kept[name] = tensor
        return tensor

    def rows(self, name: str, first: int, count: int) -> Tensor:
        part = self._parts[name]
        row = part.nbytes // max(part.shape[0], 1)
        return self._read(part, first * row, count * row).view(count, *part.shape[1:])

    def elements(self, name: str, first: int, count: int) -> Tensor:
        part = self._parts[name]
        size = stored_dtype(part.dtype).bits // 8
        return self._read(part, first * size, count * size)

    def raw(self, name: str, first: int, count: int) -> Tensor:
        return self._read_bytes(self._parts[name], first, count)

    def nbytes(self, name: str) -> int:
        return self._parts[name].nbytes

    def columns(self, name: str, first: int, count: int) -> Tensor:
        part = self._parts[name]
        cols = part.shape[1]
        with self._lock:
            start, band = self._bands.get(name, (0, None))
        if band is None or not start <= first <= first + count <= start + len(band):
            column_bytes = max(part.nbytes // max(cols, 1), 1)
            band = None  # let go of before the next is read
            with self._lock:
                self._bands.pop(name, None)
            width = min(cols - first, max(count, self._band_bytes // column_bytes))
            start, band = first, self._columns(part, first, width).t().contiguous()  # decoders want columns as rows
            with self._lock:
                self._bands[name] = start, band
        return band[first - start : first - start + count].t()

    def _columns(self, part: SourceTensor, first: int, count: int) -> Tensor:
        rows, cols = part.shape
        if count == cols:
            return self._read(part, 0, part.nbytes).view(rows, cols)
        size = stored_dtype(part.dtype).bits // 8
        raw = torch.empty((rows, count * size), dtype=torch.uint8)
        view = raw.view(-1).numpy().data
        width, stride = count * size, cols * size
        if self._distant:  # a request for each row would be dear
            copy = self._copy(part)
            for row in range(rows):
                _pread(copy, view[row * width : (row + 1) * width], row * stride + first * size)
        else:
            with self._files.in_use(part.file) as file:
                for row in range(rows):
                    file.read_into(view[row * width : (row + 1) * width], part.offset + row * stride + first * size)
        return raw.view(TORCH_DTYPES[part.dtype])

    def _read(self, part: SourceTensor, start: int, count: int) -> Tensor:
        return self._read_bytes(part, start, count).view(TORCH_DTYPES[part.dtype])

    def _read_bytes(self, part: SourceTensor, start: int, count: int) -> Tensor:
        raw = torch.empty(count, dtype=torch.uint8)
        if count:
            with self._files.in_use(part.file) as file:
                file.read_into(raw.numpy().data, part.offset + start)
        return raw

    def _copy(self, part: SourceTensor) -> int:
        """A tensor of a distant source in a nameless file, fetched once in order."""
        with self._lock:
            if part.name not in self._copies:
                with tempfile.TemporaryFile() as target:
                    for start in range(0, part.nbytes, _COPY_BYTES):
                        count = min(_COPY_BYTES, part.nbytes - start)
                        target.write(self._read_bytes(part, start, count).numpy().data)
                    target.flush()
                    copy = self._copies[part.name] = os.dup(target.fileno())
                weakref.finalize(self, os.close, copy)  # whoever still decodes holds this object
            return self._copies[part.name]


def _pread(fd: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        done += os.preadv(fd, [buffer[done:]], offset + done)
