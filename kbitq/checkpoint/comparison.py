"""A quantized checkpoint against its source: tensors are measured, and made again where all that takes is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from kbitq.checkpoint.passes.levels import ColumnWeights
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.tile_codec import Request, TileCodec
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.compare import matching_source
from kbitq.checkpoint.written.repeatable import needs_more_than_source
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, read_constants, read_span
from kbitq.choose.importance import Importance
from kbitq.codecs.base import span_stats
from kbitq.errors import ImportanceError, KbitqError
from kbitq.quantized import sqnr_db
from kbitq.text_safety import shown

_STATISTICS = (("sqnr_db", "%.4f"), ("max_abs_err", "%.6e"))
_REPEATABLE_SCALES = ("absmax", "mse")


class Comparison:
    """What ``verify`` does with a source.

    Attributes:
        checks: a sentence for each kind of check.
        problems: a sentence for each.
        not_made_again: tensors that were measured only, by name, with the reason.
        totals: ``compared``, ``made_again``, ``kept_compared`` and the overall ``sqnr_db`` of what was compared.
    """

    def __init__(
        self, opened: QuantizedCheckpoint, reader: TileReader, source: Checkpoint, importance: Importance | None
    ) -> None:
        """Raises ImportanceError where ``importance`` is not the file that the checkpoint was made with."""
        self._opened, self._reader, self._source, self._importance = opened, reader, source, importance
        self._columns = ColumnWeights(importance)
        self.checks: list[str] = []
        self.problems: list[str] = []
        self.not_made_again: dict[str, str] = {}
        self.totals: dict[str, Any] = {}
        if importance is not None:
            _check_used(opened, importance)

    def compare(self, full: bool, sample: int) -> None:
        """Hold all tensors, or ``sample`` of the quantized ones, against the source; every name must be there."""
        opened, source = self._opened, self._source
        here = opened.tensors.keys() | opened.kept.keys()
        self.problems += [f"tensor {shown(n)} of {source.where} is missing" for n in source.tensors if n not in here]
        self.problems += [
            f"tensor {shown(n)} is not in {source.where}" for n in sorted(here) if n not in source.tensors
        ]
        chosen = sorted(opened.tensors)
        if not full:
            count = min(sample, len(chosen))
            chosen = [chosen[i * len(chosen) // count] for i in range(count)]
        signal = noise = 0.0
        measured: list[str] = []
        with TileReader(source) as plain:
            for name in chosen:
                error_sums = self._check_tensor(opened.tensors[name], plain)
                if error_sums is not None:
                    measured.append(name)
                    signal, noise = signal + error_sums.signal, noise + error_sums.noise
            kept = sorted(opened.kept.keys() & source.tensors.keys()) if full else []
            for name in kept:
                if not _same_values(self._reader, opened.kept[name], plain, source.tensors[name]):
                    self.problems.append(f"tensor {shown(name)} was kept, but differs from the source")
        again = len(measured) - len(self.not_made_again)
        self.totals.update(
            compared=len(measured), made_again=again, kept_compared=len(kept), sqnr_db=sqnr_db(signal, noise)
        )
        self._tell(len(measured), again, len(kept))

    def _tell(self, measured: int, again: int, kept: int) -> None:
        """What was compared with the source, and what was not."""
        count = len(self._opened.tensors)
        self.checks.append(
            f"source: {again} of {count} quantized tensors made again and compared, "
            f"the errors of {measured} measured again"
        )
        self.checks.append(f"kept: {kept} of {len(self._opened.kept)} kept tensors compared with the source")
        for reason, number in sorted(Counter(self.not_made_again.values()).items()):
            names = [name for name, why in self.not_made_again.items() if why == reason]
            some = ", ".join(shown(name) for name in names[:3]) + (", ..." if number > 3 else "")
            self.checks.append(f"not made again: {number} measured tensors, {reason}: {some}")

    def _check_tensor(self, tensor: StoredTensor, plain: TileReader) -> ErrorSums | None:
        """Measure a tensor against its original and make it again; None where there is nothing to hold it against."""
        if tensor.name not in plain.checkpoint.tensors:  # said already
            return None
        try:
            original = matching_source(plain.checkpoint, tensor)
        except KbitqError as error:
            self.problems.append(str(error))
            return None
        constants = read_constants(self._reader, tensor)
        if tensor.codec.problems(constants):  # said already, with the values
            return None
        reason = self._not_repeatable(tensor)
        if reason is not None:
            self.not_made_again[tensor.name] = reason
        error_sums, same = self._measure(tensor, plain, original, constants, again=reason is None)
        if not same:
            self.problems.append(f"tensor {shown(tensor.name)} is not what its source gives when it is quantized again")
        self._check_statistics(tensor, error_sums)
        return error_sums

    def _measure(
        self, tensor: StoredTensor, plain: TileReader, original: SourceTensor, constants: dict[str, torch.Tensor],
        *, again: bool,
    ) -> tuple[ErrorSums, bool]:  # fmt: skip
        """The errors of a tensor, and with ``again`` whether its source still gives the same bytes."""
        codec, error_sums, same = TileCodec(plain), ErrorSums(), True
        amax, levels = codec.scan(original).amax if again else 0.0, tensor.codec.levels_of(constants)
        with_importance = tensor.meta.importance is not None
        for span in plain.spans(original, cut=tensor.codec.cut):
            values = plain.read(original, span)
            stored = read_span(self._reader, tensor, span, constants)
            error_sums.add(span, span_stats(tensor.codec, values, stored, span))
            if again and same:
                weights = self._columns.of(tensor.name, tensor.meta.shape, span) if with_importance else None
                request = Request(tensor.codec.name, tensor.meta.k, levels, amax, tensor.meta.scale, weights)
                made = codec.quantize_span(span, values, request).parts
                same = all(torch.equal(made[part], data) for part, data in stored.items())
        return error_sums, same

    def _not_repeatable(self, tensor: StoredTensor) -> str | None:
        """Why a tensor cannot be made again; None where it can."""
        scale, needed = tensor.meta.scale, needs_more_than_source(vars(tensor.meta), self._importance)
        if tensor.meta.calibrated is not None:
            return needed
        if scale == "unknown":
            return "of which no metadata says how they were made"
        if scale not in _REPEATABLE_SCALES:
            return f"made with the scale rule {shown(scale)}, which needs more than the source"
        return needed

    def _check_statistics(self, tensor: StoredTensor, error_sums: ErrorSums) -> None:
        """The recorded errors against the measured ones."""
        measured = {"sqnr_db": error_sums.sqnr_db, "max_abs_err": error_sums.max_abs_err}
        for key, spec in _STATISTICS:
            told, found = getattr(tensor.meta, key), measured[key]
            if told is None:
                continue
            if found is None:
                self.problems.append(
                    f"tensor {shown(tensor.name)}: its {key} is said to be {spec % told}, but is not finite: "
                    "the tensor is all zeros, or has no error, or no signal"
                )
            elif spec % told != spec % found:
                self.problems.append(f"tensor {shown(tensor.name)}: its {key} is {spec % found}, not {spec % told}")


def _check_used(opened: QuantizedCheckpoint, importance: Importance) -> None:
    """Raise ImportanceError unless some tensor was made with this file."""
    used = {tensor.meta.importance for tensor in opened.tensors.values()} - {None}
    if not used:
        raise ImportanceError(f"{opened.checkpoint.where} was quantized without an importance file")
    if importance.sha256 not in used:
        raise ImportanceError(
            f"{importance.path} is not the importance file that {opened.checkpoint.where} was quantized with: its "
            f"SHA-256 begins with {importance.sha256[:12]}, not {shown(str(min(map(str, used)))[:12])}"
        )


def _same_values(reader: TileReader, kept: SourceTensor, plain: TileReader, original: SourceTensor) -> bool:
    if (kept.dtype, kept.shape) != (original.dtype, original.shape):
        return False
    if original.scaling is None:
        pairs: Iterator[Any] = zip(reader.chunks(kept), plain.chunks(original), strict=True)
        return all(torch.equal(a[1], b[1]) for a, b in pairs)
    return all(torch.equal(reader.read(kept, s), plain.read(original, s)) for s in plain.spans(original))
