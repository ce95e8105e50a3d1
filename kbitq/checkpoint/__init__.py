"""Checkpoints on disk: plan, quantize, inspect, dequantize, load and save.

Names are loaded when first used, so that a plan, which needs headers only, does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Choice": "plan.choice",
    "choose": "allocation",
    "plan_recipe": "plan.recipe",
    "write_recipe": "plan.recipe",
    "Plan": "plan.plan",
    "QuantizeOptions": "plan.options",
    "TensorPlan": "plan.tensor_plan",
    "plan_quantize": "plan.planner",
    "check_output": "plan.planner",
    "Progress": "source.progress",
    "RunReport": "quantization",
    "run": "quantization",
    "dequantize_checkpoint": "dequantization",
    "InspectReport": "inspection",
    "inspect": "inspection",
    "load_file": "load_save",
    "save_file": "load_save",
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
    "check_output",
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
    from kbitq.checkpoint.allocation import choose
    from kbitq.checkpoint.dequantization import dequantize_checkpoint
    from kbitq.checkpoint.estimation import Estimate, estimate
    from kbitq.checkpoint.inspection import InspectReport, inspect
    from kbitq.checkpoint.load_save import load_file, save_file
    from kbitq.checkpoint.plan.choice import Choice
    from kbitq.checkpoint.plan.options import QuantizeOptions
    from kbitq.checkpoint.plan.plan import Plan
    from kbitq.checkpoint.plan.planner import check_output, plan_quantize
    from kbitq.checkpoint.plan.recipe import plan_recipe, write_recipe
    from kbitq.checkpoint.plan.tensor_plan import TensorPlan
    from kbitq.checkpoint.quantization import RunReport, run
    from kbitq.checkpoint.repair import repair_index
    from kbitq.checkpoint.source.progress import Progress
    from kbitq.checkpoint.verification import VerifyReport, verify


if not TYPE_CHECKING:  # a checker of types knows the names above and no others

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
