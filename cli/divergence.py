"""``quantize --kl``: the smallest budget at which a model's predictions stay near those of its source."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbitq import checkpoint
from kbitq.checkpoint.allocation import bits_range, check_budget, measure_all, spend
from kbitq.checkpoint.output.destination import default_output
from kbitq.choose.bisection import smallest
from kbitq.cli import evaluating
from kbitq.cli.console import console
from kbitq.errors import BudgetError
from kbitq.integrations.transformers.loading import load_model

if TYPE_CHECKING:
    from torch import Tensor

    from kbitq.checkpoint import Plan, QuantizeOptions
    from kbitq.checkpoint.passes.measure import Measured
    from kbitq.cli.options.divergence import Divergence
    from kbitq.eval.perplexity import Evaluation

STEP = 0.05
"""Bits per weight between two budgets that are tried."""
_SEARCHING = "nothing is left of the search; run again"


def plan(source: Any, out: Path | None, options: QuantizeOptions, kl: float) -> Plan:
    """The plan of a run whose budget is still to be found, with the output's default name."""
    if out is None:
        dry = checkpoint.plan_quantize(source, None, options, dry=True)
        out = default_output(dry.checkpoint.storage, f"kbitq-kl{kl:g}")
    made = checkpoint.plan_quantize(source, out, options)
    assert made.options.budget is not None
    check_budget(made, made.options.budget)
    return made


def search(made: Plan, folder: Path, wanted: Divergence) -> tuple[Plan, Evaluation]:
    """The plan with the smallest budget whose divergence is small enough, spent, and what was measured at it.

    Args:
        made: from ``plan``.
        folder: the source.
        wanted: checked.

    Raises:
        BudgetError: the divergence is larger even at the largest budget.
        KbitqError: the source is no language model, or the text is none for it; before anything is measured.
    """
    assert wanted.kl is not None
    before, console.unfinished = console.unfinished, _SEARCHING
    windows, reference = _reference(folder, wanted, made.options.device)
    with console.progress("measuring") as progress:
        results = measure_all(made, progress)
    tried = _Tried(made, results, windows, reference, wanted)
    bits = smallest(_budgets(*bits_range(made)), tried.enough)
    if bits is None:
        largest, found = tried.last
        raise BudgetError(
            f"a divergence of {wanted.kl:g} cannot be reached: at {largest:g} bits per weight, the most there are, it "
            f"is {found:.3g}",
            hint="allow more with --kl, or quantize less with --exclude 'PATTERN'",
        )
    console.unfinished = before
    return tried.spent(bits), tried.found[bits]


def _reference(folder: Path, wanted: Divergence, device: str) -> tuple[Tensor, Any]:
    """The windows of the text, and the source's model."""
    ids = evaluating.text_ids(folder, wanted.text, wanted.trust_remote_code) if wanted.text is not None else None
    model = load_model(folder, device=_device(device), trust_remote_code=wanted.trust_remote_code)
    return evaluating.windows(model, ids, wanted.tokens, wanted.window, wanted.windows), model


def _device(device: str) -> str:
    """Where models run, of the devices that quantize."""
    return "cuda" if device.startswith("cuda") else device


def _budgets(least: float, most: float) -> list[float]:
    """Multiples of the step, from the first that is enough for the least bits to the first for the most."""
    first, last = (math.ceil(bits / STEP - 1e-9) for bits in (least, most))
    return [round(i * STEP, 2) for i in range(first, last + 1)]


@dataclass
class _Tried:
    """Budgets that were quantized and evaluated.

    Attributes:
        found: evaluations by bits per weight.
        last: the bits per weight tried last, and the divergence.
    """

    made: Plan
    results: dict[str, Measured | str]
    windows: Tensor
    reference: Any
    wanted: Divergence
    found: dict[float, Evaluation] = field(default_factory=dict)
    last: tuple[float, float] = (0.0, 0.0)
    _by_choice: dict[tuple[Any, ...], Evaluation] = field(default_factory=dict)

    def spent(self, bits: float) -> Plan:
        """The plan with a budget of so many bits, as ``--bpw`` makes it."""
        assert self.made.options.budget is not None
        budget = replace(self.made.options.budget, bpw=bits)
        return spend(replace(self.made, options=replace(self.made.options, budget=budget)), budget, self.results)

    def enough(self, bits: float) -> bool:
        """Whether the divergence is small enough with so many bits."""
        assert self.wanted.kl is not None
        chosen = self.spent(bits)
        key = tuple((t.codec, t.k) for t in chosen.tensors)
        if key not in self._by_choice:  # two budgets may come to the same choice
            self._by_choice[key] = self._evaluated(chosen)
        self.found[bits] = self._by_choice[key]
        compared = self.found[bits].divergence
        assert compared is not None
        self.last = bits, compared.mean
        enough = compared.mean <= self.wanted.kl
        console.note(
            f"{bits:g} bits per weight: KL divergence {compared.mean:.4g}, {'enough' if enough else 'too much'}"
        )
        return enough

    def _evaluated(self, chosen: Plan) -> Evaluation:
        with _beside(chosen.out) as folder:
            trial = replace(chosen, out=folder / "model", options=replace(chosen.options, force=False))
            with console.progress("quantizing") as progress:
                out = checkpoint.run(trial, progress).out
            model = load_model(
                out, device=_device(self.made.options.device), trust_remote_code=self.wanted.trust_remote_code
            )
            return evaluating.evaluated(model, self.windows, self.reference)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A hidden folder on the output's disk, which is removed however the block ends."""
    parent = out.parent if out.parent.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.kl-", dir=parent) as folder:
        yield Path(folder)
