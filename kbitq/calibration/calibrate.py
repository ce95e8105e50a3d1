"""Calibrating: a model is run over a text once, and what its weights are given to work on becomes a folder."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbitq.calibration.collect import Collector, NotSharedError
from kbitq.calibration.samples import LENGTH, SAMPLES, SEED, draw, fingerprint, read_files
from kbitq.calibration.statistics import SUMMARY_FILE, Summary, hessian_nbytes
from kbitq.calibration.weights import Weight, find_weights
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.output.destination import check_destination
from kbitq.checkpoint.source.open import Checkpoint, open_checkpoint
from kbitq.checkpoint.source.progress import Progress
from kbitq.errors import CalibrationError
from kbitq.eval.failures import told
from kbitq.eval.texts import FIELD
from kbitq.integrations.transformers.loading import load_any_model, load_tokenizer
from kbitq.text_safety import shown

HESSIAN_BLOCK = 8192
_BATCH_TOKENS = 4096  # that go through a model at once


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
    checkpoint = open_checkpoint(folder)
    check_destination(checkpoint, out, options.force, is_file=False, marker=SUMMARY_FILE)
    loaded = load_any_model(
        folder, device=options.device, dtype=options.dtype, trust_remote_code=options.trust_remote_code
    )
    windows, notes = _windows(loaded, folder, [Path(text) for text in texts], options)
    weights, left_out = find_weights(loaded, checkpoint.tensors)
    if not weights:
        raise CalibrationError(f"{folder} has no weight that would be quantized", hint="give the unquantized model")
    with StatisticsWriter(out, {}) as writer:
        writer.check_space(sum(hessian_nbytes(w.columns, _block(options), w.experts or 1) for w in weights))
        found, unseen = collect(loaded, weights, windows, _block(options), progress)
        if not found:
            raise CalibrationError(
                f"{folder}: no input of {shown(weights[0].name)} or another weight to be quantized was seen",
                hint="only weights that torch.nn.functional.linear multiplies by have statistics",
            )
        notes += _about_missing([*left_out, *unseen])
        writer.add(found)
        about = {"sha256": fingerprint(windows), "samples": len(windows), "length": windows.shape[1]}
        summary = writer.finish(
            {"sha256": fingerprint_of_model(checkpoint)}, {**about, "seed": options.seed}, versions(),
            replace=options.force,
        )  # fmt: skip
    return Calibration(out, summary, windows.numel(), time.monotonic() - started, notes)


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
    with _experts_one_by_one(model, weights):
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
    for ids in windows.split(max(1, _BATCH_TOKENS // windows.shape[1])):
        with told("the model cannot read the tokens"), torch.no_grad(), collector:
            base(input_ids=ids.to(model.device))
        done += ids.numel()
        if progress is not None:
            progress(Progress(done, windows.numel(), ""))


@contextmanager
def _experts_one_by_one(model: Any, weights: Sequence[Weight]) -> Iterator[None]:
    """Has fused experts multiplied one by one, as they are collected, where a model offers other ways as well."""
    if all(weight.experts is None for weight in weights) or not hasattr(model, "set_experts_implementation"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


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


def fingerprint_of_model(checkpoint: Checkpoint) -> str:
    """SHA-256 (hexadecimal) over the digests of the weight files."""
    root = Path(checkpoint.storage.where)
    files = {name: sha256(root / name if root.is_dir() else root) for name in sorted(checkpoint.headers)}
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in files.items()).encode()).hexdigest()


def versions() -> dict[str, str]:
    """What ran the model."""
    import transformers

    import kbitq

    return {"kbitq": kbitq.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
