"""The second pass over the source: quantizes or copies every tensor and writes it where the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch

from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.output.file_writer import FileWriter, sync_folder
from kbitq.checkpoint.output.layout import Shard
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.journal import Journal, sums_record
from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.scan_pass import scan_tensors
from kbitq.checkpoint.passes.spool import Spool, groups
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, Request, TileCodec
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece
from kbitq.format import WORD_BYTES, companion_names, stored_dtype


class WritePass:
    """The second pass: fills the shards of a plan, tile by tile, in place.

    With a ``spool`` it does the first pass too, some tensors ahead of the second, so that both take one fetch.
    """

    def __init__(
        self,
        plan: Plan,
        codec: TileCodec,
        staging: Staging,
        journal: Journal,
        meter: ProgressMeter,
        spool: Spool | None = None,
    ) -> None:
        self.plan, self.codec, self.staging, self.journal, self.meter = plan, codec, staging, journal, meter
        self._spool = spool
        self._plans = {t.name: t for t in plan.tensors}
        self._place = {name: i for i, name in enumerate(plan.checkpoint.tensors)}
        self._levels = LevelSource(plan, codec, journal.done.scans)
        self._synced: dict[str, Future[str] | None] = {}  # files on the disk, and their digests to come

    @property
    def fit_gain_db(self) -> float | None:
        """What fitting codebooks gained over ``optimal``, as far as this run did it; None without."""
        return self._levels.fit_gain_db

    def run(self) -> dict[str, ErrorSums]:
        """Fill all shards, each complete and synced. Returns the error sums of the quantized tensors."""
        for shard in self.plan.shards:
            # All room is taken at once: a disk that is too small is noticed in the first second, not after hours.
            FileWriter(self.staging.path(shard.name), shard.nbytes).__exit__()
        sync_folder(self.staging.output)
        with ThreadPoolExecutor(1, thread_name_prefix="kbitq-hash") as pool:
            try:
                for shard in self.plan.shards:
                    self._fill(shard, pool)
                    self._note_files(wait=False)
                self._note_files(wait=True)
            finally:
                pool.shutdown(cancel_futures=True)
        return {name: sums for name, sums in self.journal.done.tensors.items() if sums is not None}

    def _fill(self, shard: Shard, pool: Executor) -> None:
        assert shard.meta is not None
        members = sorted(shard.meta.tensors.keys() | shard.meta.kept.keys(), key=self._place.__getitem__)
        done = self.journal.done
        if shard.name not in done.files or any(name not in done.tensors for name in members):
            path = self.staging.path(shard.name)
            with FileWriter(path, shard.nbytes) as writer, self.journal.settled():
                self._fill_tensors(shard, members, writer)
                self._note_errors(shard)
                writer.write(0, shard.header())
                # For SHA256SUMS, which only a folder has; made while the disk and the next shard are busy.
                digest = pool.submit(sha256, path) if self.plan.to_folder else None
                writer.sync()
            self._synced[shard.name] = digest
        else:
            self._note_errors(shard)
            for name in members:
                self.meter.add(self._plans[name].bytes_in, name)

    def _note_files(self, *, wait: bool) -> None:
        """Journal the files that are complete, on the disk and hashed; with ``wait``, all that were filled."""
        for name, digest in list(self._synced.items()):
            if digest is None or wait or digest.done():
                self.journal.add("file", file=name, sha256=digest.result() if digest is not None else "")
                del self._synced[name]
        self.journal.commit()

    def _note_errors(self, shard: Shard) -> None:
        assert shard.meta is not None
        for name, meta in shard.meta.tensors.items():
            sums = self.journal.done.tensors[name]
            assert sums is not None
            meta.sqnr_db, meta.max_abs_err = sums.sqnr_db, sums.max_abs_err

    def _fill_tensors(self, shard: Shard, members: list[str], writer: FileWriter) -> None:
        if self._spool is None:
            self._fill_some(shard, members, writer)
            return
        for group in groups(self._plans[name] for name in members):
            self._spool.keeping = True
            selected = [t for t in group if t.quantized]
            scan_tensors(self.plan, selected, self.codec, self.journal, self.meter, writer.sync)
            self._spool.keeping = False
            self._fill_some(shard, [t.name for t in group], writer)
            self._spool.clear()

    def _fill_some(self, shard: Shard, members: list[str], writer: FileWriter) -> None:
        sums = ErrorSums()
        for piece, made in self.codec.quantized(self._pieces(members), self._request):
            name = piece.tensor.name
            if isinstance(made, QuantizedSpan):
                sums = self._starting_sums(piece) or sums
                sums.add(made.span, made.errors)
                written = write_span(made, name, shard, writer)
            else:
                written = self._write_plain(piece, made, shard, writer)
            self.meter.add(piece.count, name)
            self._note(piece, sums if isinstance(made, QuantizedSpan) else None)
            if self.journal.due(written):
                self.journal.begin_commit(writer.sync)
        for name in members:
            if name not in self.journal.done.tensors:  # no bytes at all: nothing was streamed
                self.journal.add("tensor", tensor=name, sums=None)
        self.journal.commit(writer.sync)

    def _pieces(self, members: list[str]) -> Iterator[Piece]:
        """What is left to do of a shard: whole tensors, after the rest of one that was begun."""
        reader, partial = self.codec.reader, self.journal.done.partial
        for name in members:
            if name in self.journal.done.tensors:
                self.meter.add(self._plans[name].bytes_in, name)
                continue
            start = partial[1] if partial is not None and partial[0] == name else 0
            source = self.plan.checkpoint.tensors[name]
            if self._plans[name].quantized or source.scaling is not None:
                yield from reader.matrix_pieces(source, start)
            else:
                yield from reader.byte_pieces(source, start)

    def _starting_sums(self, piece: Piece) -> ErrorSums | None:
        """The sums to go on with at a tensor's first piece of this run; None within it."""
        if piece.start == 0:
            return ErrorSums()
        partial = self.journal.done.partial
        if partial is not None and partial[0] == piece.tensor.name and partial[1] == _position(piece):
            return partial[2]
        return None

    def _note(self, piece: Piece, sums: ErrorSums | None) -> None:
        """Journal how far the tensor is; the record counts from the next commit on."""
        name, end = piece.tensor.name, piece.start + piece.count
        if end == piece.tensor.nbytes:
            self.journal.add("tensor", tensor=name, sums=sums_record(sums))
        else:
            after = end if piece.span is None else piece.span.first_element + piece.span.numel
            self.journal.add("part", tensor=name, next=after, sums=sums_record(sums))

    def _request(self, piece: Piece) -> Request | None:
        """How a piece is to be quantized; None for one that is kept."""
        tensor = self._plans[piece.tensor.name]
        if not tensor.quantized:
            return None
        assert piece.span is not None
        levels, weights = self._levels.levels(tensor), self._levels.importance(tensor, piece.span)
        return Request(levels, self.journal.done.scans[tensor.name].amax, tensor.scale, weights)

    def _write_plain(self, piece: Piece, raw: torch.Tensor, shard: Shard, writer: FileWriter) -> int:
        """Copy bytes; scaled FP8 that is not quantized is written as what it decodes to, for its scales are gone."""
        offset = shard.offsets[piece.tensor.name]
        if piece.tensor.scaling is not None and piece.span is not None:
            raw = self.codec.reader.values(piece.tensor, piece.span, raw)
            offset += piece.span.first_element * stored_dtype(piece.tensor.dtype).bits // 8
        else:
            offset += piece.start
        writer.write(offset, raw)
        return raw.numel() * raw.element_size()


def _position(piece: Piece) -> int:
    return piece.start if piece.span is None else piece.span.first_element


def write_span(done: QuantizedSpan, name: str, shard: Shard, writer: FileWriter) -> int:
    """Write a quantized span where it belongs (and the codebook with the first); returns the bytes written."""
    packed, absmax, codebook = companion_names(name)
    k = done.codebook.numel().bit_length() - 1
    writer.write(shard.offsets[packed] + done.span.first_block * k * WORD_BYTES, done.packed)
    writer.write(shard.offsets[absmax] + done.span.first_block, done.absmax)
    if done.span.first_block == 0:
        writer.write(shard.offsets[codebook], done.codebook)
    return done.span.blocks * (k * WORD_BYTES + 1)
