"""How to quantize: every option of a run, checked as far as one option alone can be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kbitq.checkpoint.output.layout import DEFAULT_SHARD_BYTES
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import Selection, TensorRule, check_k
from kbitq.codecs.base import get_codec
from kbitq.errors import SelectionError
from kbitq.format import DEFAULT_CODEC, SCALE_RULES

AUTO = "auto"  # as a codec
AUTO_CODECS = ("trellis/128", "trellis", DEFAULT_CODEC)
FITTED = ("fit", "fit-shared")  # codebooks that are made from the weights
DEVICES = "auto, cpu, cuda or GPUs such as cuda:0,cuda:1"


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize.

    Attributes:
        k: bits of an index; None where rules or a ``budget`` choose them for every tensor.
        scale: ``mse`` or ``absmax``.
        codebook: ``optimal``, ``nf``, ``fit``, ``fit-shared`` or a file.
        include: patterns of names to quantize beside the usual ones (``kbitq.choose.selection``).
        exclude: patterns of names to leave alone; wins over ``include``.
        only: patterns of names; where given, they replace the usual choice.
        keep_embeddings: leave embeddings as they are.
        device: ``auto``, ``cpu``, ``cuda`` (every GPU) or ``cuda:0,cuda:1``; the output does not depend on it.
        max_shard_size: bytes of data in a file of a folder.
        on_nonfinite: ``error``, or ``keep``: copy a tensor that has NaN or infinite values as it is.
        force: replace an output that kbitq wrote.
        max_memory: bytes that a run uses beyond the interpreter with torch, at most; None chooses.
        min_coverage: the least share of all parameters (0..1) that must be quantized.
        rules: of K, scale and codebook by name, as in ``kbitq.choose.selection``.
        importance: a file of error weights (``kbitq.choose.importance``).
        calibration: a folder of ``kbitq calibrate``: tensors are quantized with error feedback (``codecs.feedback``).
        budget: bits or bytes that K is chosen within; the plan is complete once ``checkpoint.choose`` has measured.
        codec: how weights are coded: ``planes``, ``trellis``, ``trellis/128`` (scales for 128 columns), or, with a
            ``budget``, ``auto``: for each tensor that which serves the budget best.
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
    calibration: str | Path | None = None
    budget: Budget | None = None
    codec: str = DEFAULT_CODEC

    def selection(self) -> Selection:
        codec = self.codecs[0]
        k = get_codec(codec).ks[0] if self.k is None else self.k
        return Selection(k, self.include, self.exclude, self.only, self.keep_embeddings, self.rules, codec, self.codecs)

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that a budget chooses from; only one unless ``codec`` is ``auto``. The first stands for all where
        sizes are not chosen yet: it has the smallest."""
        return AUTO_CODECS if self.codec == AUTO else (self.codec,)


def is_device(text: str) -> bool:
    """Whether ``text`` is one of ``DEVICES``; that they are there is found out when they are used."""
    return re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", text) is not None


def check_options(options: QuantizeOptions) -> None:
    """Raises SelectionError for a value that an option does not take."""
    for name, allowed in (
        ("scale", SCALE_RULES),
        ("on_nonfinite", ("error", "keep")),
    ):
        if getattr(options, name) not in allowed:
            raise SelectionError(f"{name} must be one of {', '.join(allowed)}, not {getattr(options, name)!r}")
    if not is_device(options.device):
        raise SelectionError(f"device must be {DEVICES}, not {options.device!r}")
    if options.codec == AUTO and options.budget is None:
        raise SelectionError("codec auto chooses by a budget: give one, or a codec by name", remedy="auto-codec")
    for codec in options.codecs:
        get_codec(codec)
    if options.k is not None:
        check_k(options.k, options.codecs)
    if options.max_shard_size < 1:
        raise SelectionError(f"max_shard_size must be positive, not {options.max_shard_size}")
    if not 0 <= options.min_coverage <= 1:
        raise SelectionError(f"min_coverage must be a share from 0 to 1, not {options.min_coverage}")
