"""Calibrating: a model is run over a text once, and what its weights are given to work on becomes a folder."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbitq.calibration.capacity import check_layers_fit, fits_whole
from kbitq.calibration.collect import Collector, NotSharedError, experts_one_by_one
from kbitq.calibration.layers import LayerRun
from kbitq.calibration.samples import LENGTH, SAMPLES, SEED, draw, fingerprint, read_files, windows_at_once
from kbitq.calibration.skeleton import Skeleton
from kbitq.calibration.statistics import SUMMARY_FILE, Summary, hessian_nbytes
from kbitq.calibration.weights import Weight, find_weights
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.output.destination import check_destination
from kbitq.checkpoint.source.foreign import has_foreign_weights
from kbitq.checkpoint.source.open import Checkpoint, open_checkpoint
from kbitq.checkpoint.source.progress import Progress
from kbitq.checkpoint.source.recognise import prepare_source
from kbitq.errors import CalibrationError
from kbitq.eval.failures import told
from kbitq.eval.texts import FIELD
from kbitq.integrations.transformers.loading import load_any_model, load_tokenizer, resolve_device
from kbitq.text_safety import shown

HESSIAN_BLOCK = 8192
WHOLE = {"whole": True}  # key of a run that nothing could go on from
_FILES_AT_ONCE = 4  # of the model, that are hashed


@dataclass(frozen=True)
class Options:
    """How a model is calibrated.

    Attributes:
        samples: windows that are drawn from the texts.
        length: tokens of a window; a model that takes fewer is given as many as it takes.
        seed: of the drawing.
        field: of the objects of a ``.jsonl`` file, the one that holds the text.
        hessian_block: of a wider input, only blocks of so many columns on the diagonal of H are kept; 0 keeps all.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_memory: bytes of host memory to keep within, beyond the interpreter; None: what is free.
        dtype: that the model computes in: ``auto`` (its config's), ``float32``, ``bfloat16`` or ``float16``.
        trust_remote_code: run Python files that come with the model.
        force: replace statistics that exist.
    """

    samples: int = SAMPLES
    length: int = LENGTH
    seed: int = SEED
    field: str = FIELD
    hessian_block: int = HESSIAN_BLOCK
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    force: bool = False
    max_memory: int | None = None


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` made.

    Attributes:
        out: the folder.
        summary: what it says of itself.
        tokens: that the model was run on.
        seconds: that this took, loading included.
        notes: sentences about weights that have no H, and the like.
    """

    out: Path
    summary: Summary
    tokens: int
    seconds: float
    notes: list[str] = field(default_factory=list)


def calibrate(
    model: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: Options | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Run a transformers model over texts and write the sum of x xᵀ of all inputs of weights to be quantized.

    Args:
        model: a folder with a config.json, a tokenizer and safetensors files.
        texts: files of text, ``.jsonl`` or ``.tokens``.
        out: the folder to be written.
        options: see :class:`Options`.
        progress: called with the tokens done and their number.

    Raises:
        CalibrationError: the texts are too short, or no weight of the model is given anything.
        CheckpointError: it is no model that can be loaded, or ``out`` cannot be written.
        OutputExistsError: ``out`` exists.
    """
    started, options = time.monotonic(), options or Options()
    folder, out = Path(model), Path(out)
    checkpoint = _opened(folder)
    check_destination(checkpoint, out, options.force, is_file=False, marker=SUMMARY_FILE)
    device = resolve_device(options.device)
    skeleton = loaded = None
    # transformers would run other tools' formats with their packages; decoded weights are put into a model here.
    if not checkpoint.schemes and fits_whole(checkpoint, _block(options), device, options.max_memory):
        loaded = load_any_model(
            folder, device=device, dtype=options.dtype, trust_remote_code=options.trust_remote_code
        )  # fmt: skip
    else:
        skeleton = Skeleton(folder, checkpoint, device, options.dtype)
        loaded = skeleton.model
    windows, notes = _windows(loaded, folder, [Path(text) for text in texts], options)
    weights, left_out = find_weights(loaded, checkpoint.tensors)
    if not weights:
        raise CalibrationError(f"{folder} has no weight that would be quantized", hint="give the unquantized model")
    about = {"sha256": fingerprint(windows), "samples": len(windows), "length": windows.shape[1], "seed": options.seed}
    job = _Job(options, weights, windows, progress, _Fingerprint(checkpoint), about)
    with job.model, StatisticsWriter(out, job.key(device) if skeleton is not None else WHOLE) as writer:
        writer.check_space(sum(hessian_nbytes(w.columns, _block(options), w.experts or 1) for w in weights))
        unseen = job.whole(loaded, writer) if skeleton is None else job.by_layers(skeleton, writer)
        if not writer.entries:
            raise CalibrationError(
                f"{folder}: no input of {shown(weights[0].name)} or another weight to be quantized was seen",
                hint="only weights that torch's linear, matmul, mm, addmm and bmm multiply by have statistics",
            )
        summary = writer.finish(job.model.as_json(), job.text, versions(), replace=options.force)
    notes += _about_missing([*left_out, *unseen])
    return Calibration(out, summary, windows.numel(), time.monotonic() - started, notes)


def _opened(folder: Path) -> Checkpoint:
    """A model's files; weights in other tools' formats are tensors that decode."""
    checkpoint = open_checkpoint(folder)
    if has_foreign_weights(checkpoint):
        prepare_source(checkpoint)
    return checkpoint


@dataclass(frozen=True)
class _Job:
    """What is to be run, and on what; ``model`` and ``text`` are what the folder says of them."""

    options: Options
    weights: Sequence[Weight]
    windows: Tensor
    progress: Callable[[Progress], None] | None
    model: _Fingerprint
    text: dict[str, Any]

    def key(self, device: str) -> dict[str, Any]:
        """What every H depends on."""
        how = {"block": self.options.hessian_block, "dtype": self.options.dtype, "device": device}
        return {**how, "model": self.model.as_json(), "text": self.text, "versions": versions()}

    def whole(self, model: Any, writer: StatisticsWriter) -> list[str]:
        """Run the whole model, and write every H; the names of weights that were given nothing."""
        writer.start_over()
        found, unseen = collect(model, self.weights, self.windows, _block(self.options), self.progress)
        writer.add(found)
        return unseen

    def by_layers(self, skeleton: Skeleton, writer: StatisticsWriter) -> list[str]:
        """Run layer by layer, from where an earlier run was cut; the names of weights that were given nothing."""
        block, total = _block(self.options), self.windows.numel() * (len(skeleton.layers) + 1)
        on_disk = check_layers_fit(skeleton, self.weights, self.windows, block, self.options.max_memory)
        done = 0

        def step(tokens: int) -> None:
            nonlocal done
            done += tokens
            if self.progress is not None:
                self.progress(Progress(done, total, ""))

        batches = self.windows.split(windows_at_once(self.windows))
        with experts_one_by_one(skeleton.model, self.weights):
            run = LayerRun(skeleton, self.weights, batches, block, writer.folder if on_disk else None, step)
            run.run(writer.add, writer.steps)
        seen = {name for entry in writer.entries for name in entry.tensors}
        return [name for weight in self.weights for name in weight.sources if name not in seen]


def collect(
    model: Any,
    weights: Sequence[Weight],
    windows: Tensor,
    block: int | None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[list[Gathered], list[str]]:
    """Run a model over windows and sum up what its weights are given.

    Args:
        model: a transformers model on its device.
        weights: of it, to collect for.
        windows: int64 ``[n, length]``.
        block: see :class:`Collector`.
        progress: called with the tokens done and their number.

    Returns:
        Every H, and the names in the files of weights that were given nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with experts_one_by_one(model, weights):
        for share in (True, False):  # again, if weights looked as if they shared an input, and did not
            collector = Collector(weights, parameters, block, share=share)
            try:
                _run(model, windows, collector, progress)
                return collector.gathered()
            except NotSharedError:
                continue
    raise AssertionError("without sharing nothing is NotSharedError")


def _run(model: Any, windows: Tensor, collector: Collector, progress: Callable[[Progress], None] | None) -> None:
    base = model.base_model  # no logits: what they are made with is not quantized
    done = 0
    for ids in windows.split(windows_at_once(windows)):
        with told("the model cannot read the tokens"), torch.no_grad(), collector:
            base(input_ids=ids.to(model.device))
        done += ids.numel()
        if progress is not None:
            progress(Progress(done, windows.numel(), ""))


def _windows(model: Any, folder: Path, texts: Sequence[Path], options: Options) -> tuple[Tensor, list[str]]:
    """The windows to run on, and a note where they are shorter than was asked for."""
    tokenizer = partial(load_tokenizer, folder, trust_remote_code=options.trust_remote_code)
    ids = read_files(texts, tokenizer, model.get_input_embeddings().num_embeddings, options.field)
    takes = getattr(model.config, "max_position_embeddings", None)
    length, notes = options.length, []
    if isinstance(takes, int) and takes < length:
        length, notes = takes, [f"the model takes {takes:,} tokens, so windows have as many, not {options.length:,}"]
    return draw(ids, options.samples, length, options.seed), notes


def _block(options: Options) -> int | None:
    return options.hessian_block or None


def _about_missing(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"no statistics for {shown(names[0])}{others}: no input of it was seen"]


class _Fingerprint:
    """SHA-256 over the digests of the weight files, made in threads while the model runs: a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        root = Path(checkpoint.storage.where)
        files = {name: root / name if root.is_dir() else root for name in sorted(checkpoint.headers)}
        self._pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="kbitq-hash")
        self._digests = {name: self._pool.submit(sha256, path) for name, path in files.items()}

    def __enter__(self) -> _Fingerprint:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def as_json(self) -> dict[str, str]:
        """What statistics say of the model; waits until it is known."""
        lines = (f"{digest.result()}  {name}\n" for name, digest in self._digests.items())
        return {"sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def versions() -> dict[str, str]:
    """What ran the model."""
    import transformers

    import kbitq

    return {"kbitq": kbitq.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
