"""What a run will do, from headers alone: a verdict for every tensor, the shard and byte where each one goes, sizes.

Nothing here reads tensor data or imports torch, so a plan is cheap; all that can be refused early is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kbitq.checkpoint.output.destination import check_destination, default_output, disk_free
from kbitq.checkpoint.output.layout import Group, Shard, lay_out
from kbitq.checkpoint.plan import tensor_parallel as parallel
from kbitq.checkpoint.plan.totals import plan_totals
from kbitq.checkpoint.source import memory
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.checkpoint.source.storage import Storage
from kbitq.choose.importance import Importance, load_importance
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import Selection, TensorRule
from kbitq.codecs import codebooks
from kbitq.errors import CheckpointError, SelectionError
from kbitq.format import (
    GUARD_DTYPE,
    GUARD_SHAPE,
    K_MIN,
    SCALE_RULES,
    Entry,
    ShardMeta,
    TensorMeta,
    companion_entries,
    element_count,
    guard_name,
)

if TYPE_CHECKING:
    from kbitq.checkpoint.allocation import Choice

FITTED = ("fit", "fit-shared")  # codebooks that are made from the weights
DEFAULT_SHARD_BYTES = 5_000_000_000
DEVICES = "auto, cpu, cuda or GPUs such as cuda:0,cuda:1"
_FILE_NOTE = "the output is one file: config.json and the other files of the folder are not carried over"
LEDGER_BYTES = 1024  # of index, config and ledger for one tensor, for the disk needed


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize. ``codebook``: ``optimal``, ``nf``, ``fit``, ``fit-shared`` or a file; patterns and ``rules`` as
    in ``kbitq.selection``; sizes in bytes.

    ``k`` may be None where rules or a ``budget`` choose it for every tensor. ``importance`` is a file
    (``kbitq.importance``); a budget's plan is complete once ``checkpoint.choose`` has measured the tensors.
    ``on_nonfinite`` is ``error`` or ``keep`` (copy a tensor that has NaN or infinite values as it is). ``device`` is
    ``auto``, ``cpu``, ``cuda`` (every GPU) or ``cuda:0,cuda:1``; the output does not depend on it. ``max_memory``
    bounds what a run uses beyond the interpreter with torch. ``min_coverage`` is the least share of all parameters
    (0..1) that must be quantized.
    """

    k: int | None = None
    scale: str = "mse"
    codebook: str = "optimal"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    keep_embeddings: bool = True
    device: str = "auto"
    max_shard_size: int = DEFAULT_SHARD_BYTES
    on_nonfinite: str = "error"
    force: bool = False
    max_memory: int | None = None
    min_coverage: float = 0.0
    rules: tuple[TensorRule, ...] = ()
    importance: str | Path | None = None
    budget: Budget | None = None

    def selection(self) -> Selection:
        k = K_MIN if self.k is None else self.k
        return Selection(k, self.include, self.exclude, self.only, self.keep_embeddings, self.rules)


@dataclass(frozen=True)
class TensorPlan:
    """The verdict on one tensor (``quantized`` or ``kept``), its reason, and its bytes before and after.

    ``pinned``: a rule set its K. ``scale`` and ``codebook`` (a name or a file) are how it is quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    verdict: str
    reason: str
    k: int | None
    bytes_in: int
    bytes_out: int
    bytes_plain: int
    scale: str = "mse"
    codebook: str = "optimal"
    pinned: bool = False

    @property
    def quantized(self) -> bool:
        return self.k is not None

    def with_k(self, k: int) -> TensorPlan:
        """The same tensor at another K."""
        size = sum(e.nbytes for e in companion_entries(self.name, self.shape, k))
        return replace(self, k=k, bytes_out=size)

    def kept(self, reason: str) -> TensorPlan:
        """The same tensor, copied byte for byte."""
        return replace(self, verdict="kept", reason=reason, k=None, bytes_out=self.bytes_plain)


@dataclass
class Plan:
    """A run before it starts. ``shards`` are the output files, laid out to the byte; ``out`` is a file or a folder.

    ``levels`` are the codebooks that do not depend on the weights, by name (or file) and K, with their kind. ``choice``
    says how a budget was spent.
    """

    checkpoint: Checkpoint
    out: Path
    options: QuantizeOptions
    tensors: list[TensorPlan]
    levels: dict[tuple[str, int], tuple[npt.NDArray[np.float32], str]] = field(default_factory=dict)
    importance: Importance | None = None
    choice: Choice | None = None

    @property
    def source(self) -> str:
        return self.checkpoint.where

    @property
    def to_folder(self) -> bool:
        return not is_file_name(self.out)

    @property
    def notes(self) -> list[str]:
        """Sentences about what of the source is not carried over."""
        left = (
            [] if self.to_folder or (not self.checkpoint.carried and self.checkpoint.config is None) else [_FILE_NOTE]
        )
        return left + self.checkpoint.notes

    @property
    def stem(self) -> str:
        """The common name of the output's weight files."""
        if not self.to_folder:
            return self.out.name.removesuffix(".safetensors")
        return "model" if self.checkpoint.storage.single else self.checkpoint.stem

    @cached_property
    def guard(self) -> str | None:
        """Name of the folder's guard tensor."""
        return guard_name({t.name: t.shape for t in self.tensors if t.quantized}) if self.to_folder else None

    @cached_property
    def shards(self) -> list[Shard]:
        limit = self.options.max_shard_size if self.to_folder else None
        shards = lay_out([self._group(t) for t in self.tensors], self.stem, limit, kbitq=True)
        names = Counter(p.entry.name for s in shards for p in s.placed)
        if twice := [n for n, count in names.items() if count > 1]:
            raise CheckpointError(
                f"{self.source}: a tensor is already called {twice[0]}, the name of a quantized tensor's part",
                hint=f"--exclude '{twice[0].rsplit('_', 1)[0]}' keeps the tensor whose part it would be",
            )
        return shards

    @property
    def disk_needed(self) -> int:
        """Bytes on the disk while the run lasts, close to what it leaves: weights, carried files, index and ledger."""
        extra = sum(self.checkpoint.carried_sizes.values()) + LEDGER_BYTES * len(self.tensors)
        return sum(s.nbytes for s in self.shards) + (extra if self.to_folder else 0) + self.spool_bytes

    @property
    def spool_bytes(self) -> int:
        """Bytes that a spool of the source takes at most; 0 where none is used (see ``checkpoint.spool``).

        None is where reading twice costs little, and none where a later tensor may change what is made of an earlier
        one: a codebook shared by tensors, or a layout that tensors with values that are not finite still change.
        """
        if not self.checkpoint.storage.distant or self.options.on_nonfinite != "error":
            return 0
        if any(t.quantized and t.codebook == "fit-shared" for t in self.tensors):
            return 0
        sizes = [t.bytes_in for t in self.tensors if t.quantized]
        return min(sum(sizes), memory.SPOOL_BYTES + max(sizes, default=0))

    @property
    def fits(self) -> bool:
        """Whether a codebook is fitted to weights."""
        return any(t.quantized and t.codebook in FITTED for t in self.tensors)

    def codebook_name(self, tensor: TensorPlan) -> str:
        """The kind of a quantized tensor's codebook: ``nf``, ``optimal``, ``fit``, ``fit-shared`` or ``custom``."""
        assert tensor.k is not None
        return tensor.codebook if tensor.codebook in FITTED else self.levels[tensor.codebook, tensor.k][1]

    @property
    def bytes_in(self) -> int:
        return sum(t.bytes_in for t in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(t.bytes_out for t in self.tensors)

    def with_kept(self, reasons: Mapping[str, str]) -> Plan:
        """The plan with some tensors kept after all."""
        if not reasons:
            return self
        tensors = [t.kept(reasons[t.name]) if t.name in reasons else t for t in self.tensors]
        return self._with(tensors, self.choice)

    def with_ks(self, ks: Mapping[str, int], choice: Choice | None = None) -> Plan:
        """The plan with another K for some tensors, and how that came about."""
        return self._with([t.with_k(ks[t.name]) if t.name in ks else t for t in self.tensors], choice)

    def _with(self, tensors: list[TensorPlan], choice: Choice | None) -> Plan:
        levels = _levels(tensors)
        return Plan(self.checkpoint, self.out, self.options, tensors, levels, self.importance, choice)

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON object: totals, tensors, files."""
        return {
            "source": self.source,
            "out": str(self.out),
            "totals": plan_totals(self.tensors),
            "tensors": [
                {
                    "name": t.name, "verdict": t.verdict, "reason": t.reason, "shape": list(t.shape), "dtype": t.dtype,
                    "k": t.k, "bytes_in": t.bytes_in, "bytes": t.bytes_out,
                }
                for t in self.tensors
            ],
            "files": [{"name": s.name, "bytes": s.nbytes, "tensors": len(s.placed)} for s in self.shards],
            "carried": list(self.checkpoint.carried) if self.to_folder else [],
            "dropped": dict(self.checkpoint.dropped),
            "notes": self.notes,
            "disk": {"needed": self.disk_needed, "free": disk_free(self.out)},
            "peak_memory": memory.peak_memory(self.options.max_memory, len(self.tensors), self.fits),
            "tensor_parallel": parallel.table(self.tensors),
            **({"budget": self.choice.to_json()} if self.choice is not None else {}),
        }  # fmt: skip

    def _group(self, tensor: TensorPlan) -> Group:
        """What is stored of one tensor: itself, or its three companions (and the guard that bears its name)."""
        if tensor.k is None:
            entry = Entry(tensor.name, tensor.dtype, tensor.shape, tensor.bytes_plain)
            return Group([entry], ShardMeta(kept={tensor.name: tensor.reason}))
        entries = companion_entries(tensor.name, tensor.shape, tensor.k)
        if tensor.name == self.guard:
            entries.append(Entry(tensor.name, GUARD_DTYPE, GUARD_SHAPE))
        codebook = self.codebook_name(tensor)
        meta = TensorMeta(tensor.k, tensor.shape, tensor.dtype, tensor.scale, codebook)
        if self.importance is not None and self.importance.of(tensor.name, tensor.shape) is not None:
            meta.importance = self.importance.sha256
        return Group(entries, ShardMeta({tensor.name: meta}))


def is_file_name(out: Path) -> bool:
    """Whether an output path means one file and not a folder."""
    return out.name.endswith(".safetensors")


def plan_quantize(source: str | Path | Storage, out: str | Path | None, options: QuantizeOptions) -> Plan:
    """Plan a run. Reads headers, index and config only.

    Raises:
        CheckpointError: the source cannot be used, or ``out`` does not fit it; OutputExistsError where ``out`` exists.
        SelectionError: a pattern matches nothing, K is out of range, or nothing would be quantized.
        CodebookError: the codebook file does not hold ``2^K`` levels.
        ImportanceError: the importance file cannot be used.
    """
    _check_options(options)
    selection = options.selection()
    checkpoint = open_source(source)
    selection.check_patterns(checkpoint.tensors)
    tensors = [_tensor_plan(selection, t, options) for t in checkpoint.tensors.values()]
    check_worthwhile(checkpoint.where, tensors, options)
    _check_every_k(tensors, options)
    target = Path(out) if out is not None else default_output(checkpoint.storage, _label(tensors, options))
    check_destination(checkpoint, target, options.force, is_file=is_file_name(target), marker=REPORT_FILE)
    importance = _importance(checkpoint, tensors, options)
    plan = Plan(checkpoint, target, options, tensors, _levels(tensors), importance)
    _ = plan.shards  # laid out now, so that a plan that cannot be written is refused before work starts
    return plan


def _levels(tensors: Sequence[TensorPlan]) -> dict[tuple[str, int], tuple[npt.NDArray[np.float32], str]]:
    """The codebooks that are needed and do not depend on the weights."""
    needed = {(t.codebook, t.k) for t in tensors if t.k is not None and t.codebook not in FITTED}
    return {(spec, k): codebooks.levels(spec, k) for spec, k in sorted(needed)}


def _check_every_k(tensors: Sequence[TensorPlan], options: QuantizeOptions) -> None:
    """Raise SelectionError unless something says the K of every tensor to be quantized."""
    if options.k is None and options.budget is None:
        for tensor in tensors:
            if tensor.quantized and not tensor.pinned:
                raise SelectionError(f"nothing says the K of {tensor.name}", hint="--k N is for what no rule gives a K")


def _label(tensors: Sequence[TensorPlan], options: QuantizeOptions) -> str:
    """What the default output's name says of a run."""
    if options.budget is not None:
        wanted = f"{options.budget.bpw:g}bpw" if options.budget.bpw is not None else f"{options.budget.size}bytes"
        return f"kbitq-{wanted}"
    ks = {t.k for t in tensors if t.k is not None}
    return f"kbitq-k{options.k if options.k is not None else ''.join(map(str, sorted(ks)))}"


def _importance(checkpoint: Checkpoint, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> Importance | None:
    """The importance of the columns; what has no entry is noted."""
    if options.importance is None:
        return None
    importance = load_importance(options.importance)
    chosen = [t for t in tensors if t.quantized]
    missing = [t.name for t in chosen if importance.of(t.name, t.shape) is None]
    if len(missing) == len(chosen):
        raise SelectionError(f"{options.importance} has an entry for none of the {len(chosen)} tensors to be quantized")
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        checkpoint.notes.append(f"no entry in {Path(options.importance).name}, so all columns count the same: {some}")
    return importance


def check_worthwhile(where: str, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> None:
    """Raise SelectionError for a run that would only copy, or leave more unquantized than ``min_coverage`` allows."""
    chosen = sum(element_count(t.shape) for t in tensors if t.quantized)
    parameters = sum(element_count(t.shape) for t in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if not tensor.quantized:
            weights[tensor.reason] += element_count(tensor.shape)
    listed = ", ".join(f"kept: {reason} ({count:,} parameters)" for reason, count in weights.most_common(3))
    hint = "--include 'PATTERN' adds tensors"
    if not chosen:
        raise SelectionError(f"{where}: no tensor would be quantized; {listed}", hint=hint)
    if chosen < options.min_coverage * parameters:
        raise SelectionError(
            f"{where}: only {chosen / parameters:.1%} of the parameters would be quantized, less than the "
            f"{options.min_coverage:.1%} asked for; {listed}",
            hint=hint,
        )


def is_device(text: str) -> bool:
    """Whether ``text`` is one of ``DEVICES``; that they are there is found out when they are used."""
    return re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", text) is not None


def _check_options(options: QuantizeOptions) -> None:
    for name, allowed in (
        ("scale", SCALE_RULES),
        ("on_nonfinite", ("error", "keep")),
    ):
        if getattr(options, name) not in allowed:
            raise SelectionError(f"{name} must be one of {', '.join(allowed)}, not {getattr(options, name)!r}")
    if not is_device(options.device):
        raise SelectionError(f"device must be {DEVICES}, not {options.device!r}")
    if options.max_shard_size < 1:
        raise SelectionError(f"max_shard_size must be positive, not {options.max_shard_size}")
    if not 0 <= options.min_coverage <= 1:
        raise SelectionError(f"min_coverage must be a share from 0 to 1, not {options.min_coverage}")


def _tensor_plan(selection: Selection, tensor: SourceTensor, options: QuantizeOptions) -> TensorPlan:
    verdict = selection.verdict(tensor.name, tensor.shape, tensor.dtype)
    rule = verdict.rule or TensorRule("*")
    size = tensor.plain_nbytes
    if verdict.k is not None:
        size = sum(e.nbytes for e in companion_entries(tensor.name, tensor.shape, verdict.k))
    return TensorPlan(
        tensor.name,
        tensor.shape,
        tensor.dtype,
        verdict.word,
        verdict.reason,
        verdict.k,
        tensor.nbytes,
        size,
        tensor.plain_nbytes,
        rule.scale or options.scale,
        rule.codebook or options.codebook,
        rule.k is not None,
    )
