"""What a run will do, from headers alone: a verdict for every tensor, the shard and byte where each one goes, sizes.

Nothing here reads tensor data or imports torch, so a plan is cheap; all that can be refused early is refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kbitq.calibration.statistics import Hessian, Statistics
from kbitq.checkpoint.output.destination import disk_free, is_file_name
from kbitq.checkpoint.output.layout import Group, Shard, lay_out
from kbitq.checkpoint.plan import tensor_parallel as parallel
from kbitq.checkpoint.plan.choice import Choice
from kbitq.checkpoint.plan.options import FITTED, QuantizeOptions
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.plan.totals import plan_totals
from kbitq.checkpoint.source import memory
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.choose.importance import Importance
from kbitq.codecs.base import OutputCodec, coded_entries, get_codec, output_codec
from kbitq.errors import CheckpointError
from kbitq.format import (
    DEFAULT_CODEC,
    GUARD_DTYPE,
    GUARD_SHAPE,
    Entry,
    ShardMeta,
    TensorMeta,
    element_count,
    guard_name,
    matrix_shape,
    stored_dtype,
)

_FILE_NOTE = "the output is one file: config.json and the other files of the folder are not carried over"
Levels = dict[tuple[str, int, str], tuple[npt.NDArray[np.float32] | None, str]]
"""Codebooks and their kinds, by what was asked for, K and codec."""
LEDGER_BYTES = 1024  # of index, config and ledger for one tensor, for the disk needed


@dataclass
class _Decided:
    """What is asked and what is decided of every tensor: the fields of a plan, and what they say by themselves."""

    checkpoint: Checkpoint
    out: Path
    options: QuantizeOptions
    tensors: list[TensorPlan]
    levels: Levels = field(default_factory=dict)
    importance: Importance | None = None
    choice: Choice | None = None
    statistics: Statistics | None = None

    @property
    def source(self) -> str:
        return self.checkpoint.where

    @property
    def to_folder(self) -> bool:
        return not is_file_name(self.out)

    @property
    def stem(self) -> str:
        """The common name of the output's weight files."""
        if not self.to_folder:
            return self.out.name.removesuffix(".safetensors")
        return "model" if self.checkpoint.storage.single else self.checkpoint.stem

    @property
    def output(self) -> OutputCodec | None:
        """The codec of another tool's format, where the output is in one."""
        return output_codec(self.options.codec)

    @property
    def device(self) -> str:
        """Where the run computes, as ``device`` of the options spells it; other tools' formats are made on the CPU."""
        return self.options.device if self.output is None else "cpu"

    @property
    def settles(self) -> bool:
        """Whether the sizes of a tensor's parts depend on its values, so that all are read once more before."""
        return self.output is not None and self.output.settles

    @property
    def fits(self) -> bool:
        """Whether a codebook is fitted to weights."""
        return any(t.quantized and t.codebook in FITTED for t in self.tensors)

    def codebook_name(self, tensor: TensorPlan) -> str:
        """The kind of a quantized tensor's codebook: ``nf``, ``optimal``, ``fit``, ``fit-shared`` or ``custom``."""
        assert tensor.k is not None
        return tensor.codebook if tensor.codebook in FITTED else self.levels[tensor.codebook, tensor.k, tensor.codec][1]

    def hessian(self, tensor: TensorPlan) -> Hessian | None:
        """What the calibration knows of a tensor that is to be quantized with error feedback; None for all others."""
        if self.statistics is None or not tensor.quantized:
            return None
        return self.statistics.of(tensor.name, tensor.shape)

    @property
    def error_kind(self) -> str:
        """What a budget makes small, as ``Budget.error`` names it; of a plan with a budget."""
        assert self.options.budget is not None
        return self.options.budget.error_kind(calibrated=self.statistics is not None)

    @property
    def made_with(self) -> dict[str, str]:
        """What a recipe needs beside its options for the same bytes: option -> SHA-256 or fingerprint."""
        importance = {} if self.importance is None else {"importance": self.importance.sha256}
        return importance | ({} if self.statistics is None else {"calibration": self.statistics.fingerprint})

    @property
    def bytes_in(self) -> int:
        return sum(t.bytes_in for t in self.tensors)

    @property
    def bytes_stored(self) -> int:
        """Bytes of all tensors in the source's files."""
        return sum(t.bytes_stored for t in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(t.bytes_out for t in self.tensors)


class _Needs(_Decided):
    """The memory that a run takes, and the room beside its output."""

    @property
    def spool_bytes(self) -> int:
        """Bytes that a spool of the source takes at most; 0 where none is used (see ``checkpoint.spool``).

        None is where reading twice costs little, and none where a later tensor may change what is made of an earlier
        one: a codebook shared by tensors, or a layout that tensors with values that are not finite still change.
        """
        if not self.checkpoint.storage.distant or self.options.on_nonfinite != "error":
            return 0
        if any(t.quantized and t.codebook == "fit-shared" for t in self.tensors) or self.settles:
            return 0
        sizes = [t.bytes_in for t in self.tensors if t.quantized]
        return min(sum(sizes), memory.SPOOL_BYTES + max(sizes, default=0))

    def feedback_bytes(self, max_memory: int | None) -> int:
        """The most memory that error feedback in a tensor takes within a bound; 0 where no tensor gets any."""
        return max((self._feedback_bytes(t, h, max_memory) for t in self.tensors if (h := self.hessian(t))), default=0)

    def _feedback_bytes(self, tensor: TensorPlan, found: Hessian, max_memory: int | None) -> int:
        whole = element_count(tensor.shape) // found.experts if found.transposed else None
        return memory.feedback_bytes(max_memory, found.columns, whole, found.block)

    @property
    def least_tile(self) -> int:
        """Bytes of the most rows that a codec codes together; 0 where it may cut a row."""
        sizes = [0]
        for t in self.tensors:
            if t.rows_together > 1:
                rows, cols = matrix_shape(t.name, t.shape)
                sizes.append(min(rows, t.rows_together) * cols * stored_dtype(t.dtype).bits // 8)
        return max(sizes)

    @property
    def peak_memory(self) -> int:
        """Estimate of the most memory that the run uses beyond the interpreter with torch."""
        bound, settling = self.options.max_memory, [t for t in self.tensors if self.settles and t.quantized]
        held = max((element_count(t.shape) // 8 for t in settling), default=0)
        walked = self.feedback_bytes(bound)
        return memory.peak_memory(bound, len(self.tensors), self.fits, walked, self.least_tile, held)

    def _memory_note(self) -> list[str]:
        """Where what is known of the tensors takes more than the bound, which is one on their values. Not a note of the
        checkpoint: those are written into the output, which does not depend on the memory."""
        known, bound = memory.BYTES_PER_TENSOR * len(self.tensors), self.options.max_memory
        if bound is None or known <= bound:
            return []
        return [
            f"the plan of {len(self.tensors):,} tensors takes up to {known // 1_000_000:,} MB of memory, "
            f"beside the {bound / 1_000_000:,.0f} MB that their values are held to"
        ]


class Plan(_Needs):
    """A run before it starts. ``shards`` are the output files, laid out to the byte.

    Attributes:
        checkpoint: the source.
        out: a file or a folder.
        options: of the run.
        tensors: a verdict each, in the source's order.
        levels: the codebooks that do not depend on the weights, by name (or file), K and codec, with their
            kind.
        importance: error weights by column, where a file of them was given.
        statistics: of the calibration, where one was given.
        choice: how a budget was spent, where there is one.
    """

    @property
    def notes(self) -> list[str]:
        """Sentences about what of the source is not carried over."""
        left = (
            [] if self.to_folder or (not self.checkpoint.carried and self.checkpoint.config is None) else [_FILE_NOTE]
        )
        return left + self.checkpoint.notes + self._memory_note()

    @cached_property
    def guard(self) -> str | None:
        """Name of the folder's guard tensor."""
        if not self.to_folder or self.output is not None:
            return None
        return guard_name({t.name: t.shape for t in self.tensors if t.quantized})

    @cached_property
    def shards(self) -> list[Shard]:
        limit = self.options.max_shard_size if self.to_folder else None
        groups, silent = [self._group(t) for t in self.tensors], self.output is not None
        shards = lay_out(groups, self.stem, limit, kbitq=True, silent=silent)
        names = Counter(p.entry.name for s in shards for p in s.placed)
        if twice := [n for n, count in names.items() if count > 1]:
            raise CheckpointError(
                f"{self.source}: a tensor is already called {twice[0]}, the name of a quantized tensor's part",
                hint="exclude the tensor whose part it would be",
                remedy="exclude",
                data={"tensor": twice[0].rsplit("_", 1)[0]},
            )
        return shards

    @property
    def disk_needed(self) -> int:
        """Bytes on the disk while the run lasts, close to what it leaves: weights, carried files, index and ledger."""
        extra = sum(self.checkpoint.carried_sizes.values()) + LEDGER_BYTES * len(self.tensors)
        return sum(s.nbytes for s in self.shards) + (extra if self.to_folder else 0) + self.spool_bytes

    def with_kept(self, reasons: Mapping[str, str]) -> Plan:
        """The plan with some tensors kept after all."""
        if not reasons:
            return self
        tensors = [t.kept(reasons[t.name]) if t.name in reasons else t for t in self.tensors]
        return self._with(tensors, self.choice)

    def with_codings(self, codings: Mapping[str, tuple[str, int]], choice: Choice | None = None) -> Plan:
        """The plan with another codec and K for some tensors, and how that came about."""
        return self._with([t.coded(*codings[t.name]) if t.name in codings else t for t in self.tensors], choice)

    def _with(self, tensors: list[TensorPlan], choice: Choice | None) -> Plan:
        levels = given_levels(tensors)
        return Plan(self.checkpoint, self.out, self.options, tensors, levels, self.importance, choice, self.statistics)

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON object: totals, tensors, files."""
        return {
            "source": self.source,
            "out": str(self.out),
            "totals": plan_totals(self.tensors),
            "tensors": [
                {
                    "name": t.name, "verdict": t.verdict, "reason": t.reason, "shape": list(t.shape), "dtype": t.dtype,
                    "k": t.k, "bytes_in": t.bytes_stored, "bytes": t.bytes_out,
                    **({"codec": t.codec} if t.codec != DEFAULT_CODEC else {}),
                }
                for t in self.tensors
            ],
            "files": [{"name": s.name, "bytes": s.nbytes, "tensors": len(s.placed)} for s in self.shards],
            "carried": list(self.checkpoint.carried) if self.to_folder else [],
            "dropped": dict(self.checkpoint.dropped),
            **({"source_formats": dict(self.checkpoint.schemes)} if self.checkpoint.schemes else {}),
            "notes": self.notes,
            "disk": {"needed": self.disk_needed, "free": disk_free(self.out)},
            "peak_memory": self.peak_memory,
            "tensor_parallel": parallel.table(self.tensors),
            **({"budget": self.choice.to_json()} if self.choice is not None else {}),
        }  # fmt: skip

    def _group(self, tensor: TensorPlan) -> Group:
        """What is stored of one tensor: itself, or its three companions (and the guard that bears its name)."""
        if tensor.k is None:
            entry = Entry(tensor.name, tensor.dtype, tensor.shape, tensor.bytes_plain)
            return Group([entry], ShardMeta(kept={tensor.name: tensor.reason}))
        entries = coded_entries(tensor.codec, tensor.name, tensor.shape, tensor.k)
        if tensor.name == self.guard:
            entries.append(Entry(tensor.name, GUARD_DTYPE, GUARD_SHAPE))
        codebook = self.codebook_name(tensor)
        meta = TensorMeta(tensor.k, tensor.shape, tensor.dtype, tensor.scale, codebook, codec=tensor.codec)
        if self.importance is not None and self.importance.of(tensor.name, tensor.shape) is not None:
            meta.importance = self.importance.sha256
        if self.statistics is not None and self.hessian(tensor) is not None:
            meta.calibrated = self.statistics.fingerprint
        return Group(entries, ShardMeta({tensor.name: meta}))


def given_levels(tensors: Sequence[TensorPlan]) -> Levels:
    """The codebooks that are needed and do not depend on the weights."""
    needed = {(t.codebook, t.k, t.codec) for t in tensors if t.k is not None and t.codebook not in FITTED}
    return {(spec, k, codec): get_codec(codec).levels(spec, k) for spec, k, codec in sorted(needed)}
