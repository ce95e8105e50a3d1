"""What ``kbitq verify`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.errors import FAILED

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.checkpoint import VerifyReport


def show(path: Path, report: VerifyReport) -> None:
    """Print the checks and the problems. The exit code is 1 if there is a problem."""
    if console.wants_json:
        console.object(report.to_json())
    else:
        for line in () if console.quiet else report.checks:
            console.data(line)
        for problem in report.problems:
            console.data(f"problem: {problem}")
    if not report.ok:
        count = len(report.problems)
        console.error(
            f"{path} has {count} problem{'s' if count > 1 else ''}", "do not use it; make or download it again"
        )
        raise typer.Exit(FAILED)
    if not console.wants_json and not console.quiet:
        console.data(f"{path} is as it should be")
