"""Which devices a run computes on."""

from __future__ import annotations

import torch

from kbitq import ops
from kbitq.errors import BuildError


def resolve_devices(wanted: str) -> tuple[str, ...]:
    """The devices to compute on: for ``auto`` every GPU or else the CPU, for ``cuda`` every GPU, or those named.

    Raises BuildError where CUDA, or a GPU that is named (``cuda:0,cuda:1``), cannot be had.
    """
    if wanted == "cpu":
        return ("cpu",)
    reason = ops.cuda_missing()
    if reason is not None:
        if wanted == "auto":
            return ("cpu",)
        raise BuildError(
            f"device {wanted} cannot be used: {reason}", hint="kbitq env shows what was found", argument="device"
        )
    present = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if wanted in ("auto", "cuda"):
        return present
    names = tuple(dict.fromkeys(name.strip() for name in wanted.split(",")))
    if unknown := [name for name in names if name not in present]:
        raise BuildError(
            f"device {wanted} cannot be used: {unknown[0]} is none of {', '.join(present)}",
            hint="kbitq env shows what was found",
            argument="device",
        )
    return names


def resolve_device(wanted: str) -> str:
    """The one device for work that is not shared out: the first of :func:`resolve_devices`."""
    return resolve_devices(wanted)[0]
