"""Plans that parts of are done, and what a run in one go makes of the same checkpoint."""

from pathlib import Path
from typing import Any

from helpers.checkpoints import bytes_of
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.cluster import Part, WorkReport, save_plan, work

SMALL = 3000  # bytes of a chunk: the tensors of the small checkpoint are cut into several


def saved(source: Path, out: Path, options: QuantizeOptions, chunk_bytes: int = SMALL) -> Path:
    """The file of a plan, beside the output."""
    return save_plan(plan_quantize(source, out, options), out.parent / "plan.json", chunk_bytes=chunk_bytes).path


def built(out: Path) -> Path:
    """The folder in which an output is made."""
    return out.parent / f".{out.name}.kbitq-partial" / "out"


def whole(source: Path, out: Path, options: QuantizeOptions) -> dict[str, bytes]:
    """The files of a run in one go."""
    return bytes_of(run(choose(plan_quantize(source, out, options))).out)


def do(plan: Path, part: Part) -> WorkReport:
    """Do a part, and what others have not done of the phases before the last."""
    return work(plan, part, patience=0.0)


class Killed(BaseException):
    """Stands for a death without grace: nothing that the library catches."""


def killed(*_: Any, **__: Any) -> None:
    """In place of what a process does not come to any more."""
    raise Killed
