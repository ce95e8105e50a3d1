"""Checkpoints on disk: plan, quantize, inspect, dequantize, load and save.

Names are loaded when first used, so that a plan, which needs headers only, does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Choice": "allocate",
    "choose": "allocate",
    "plan_recipe": "recipes",
    "write_recipe": "recipes",
    "Plan": "plan",
    "QuantizeOptions": "plan",
    "TensorPlan": "plan",
    "plan_quantize": "plan",
    "Progress": "work",
    "RunReport": "convert",
    "run": "convert",
    "dequantize_checkpoint": "restore",
    "InspectReport": "inspection",
    "inspect": "inspection",
    "load_file": "files",
    "save_file": "files",
    "VerifyReport": "verification",
    "verify": "verification",
    "repair_index": "repair",
    "Estimate": "estimation",
    "estimate": "estimation",
}

__all__ = [
    "Choice",
    "Estimate",
    "InspectReport",
    "Plan",
    "Progress",
    "QuantizeOptions",
    "RunReport",
    "TensorPlan",
    "VerifyReport",
    "choose",
    "dequantize_checkpoint",
    "estimate",
    "inspect",
    "load_file",
    "plan_quantize",
    "plan_recipe",
    "repair_index",
    "run",
    "save_file",
    "verify",
    "write_recipe",
]

if TYPE_CHECKING:
    from kbitq.checkpoint.allocate import Choice, choose
    from kbitq.checkpoint.convert import RunReport, run
    from kbitq.checkpoint.estimation import Estimate, estimate
    from kbitq.checkpoint.files import load_file, save_file
    from kbitq.checkpoint.inspection import InspectReport, inspect
    from kbitq.checkpoint.plan import Plan, QuantizeOptions, TensorPlan, plan_quantize
    from kbitq.checkpoint.recipes import plan_recipe, write_recipe
    from kbitq.checkpoint.repair import repair_index
    from kbitq.checkpoint.restore import dequantize_checkpoint
    from kbitq.checkpoint.verification import VerifyReport, verify
    from kbitq.checkpoint.work import Progress


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
