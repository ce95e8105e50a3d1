"""Many machines: a plan in a file, parts of it that anything may run, and what completes them.

The unit is a chunk of the plan (``chunks``): a range of rows. Every byte of it depends on the plan alone and goes to a
fixed place, so doing a chunk twice, at once even, changes nothing. What is done stands in journals, one for each
attempt. Launchers (``ray_launcher``, ``slurm``) only start parts; placement, retries and failure detection are theirs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Part": "chunks",
    "PlanFile": "plan_file",
    "WorkReport": "worker",
    "finish": "finishing",
    "parse_part": "worker",
    "part_of_environment": "worker",
    "save_plan": "planning",
    "work": "worker",
}

__all__ = ["Part", "PlanFile", "WorkReport", "finish", "parse_part", "part_of_environment", "save_plan", "work"]

if TYPE_CHECKING:
    from kbitq.cluster.chunks import Part
    from kbitq.cluster.finishing import finish
    from kbitq.cluster.plan_file import PlanFile
    from kbitq.cluster.planning import save_plan
    from kbitq.cluster.worker import WorkReport, parse_part, part_of_environment, work


if not TYPE_CHECKING:  # a checker of types knows the names above and no others

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
