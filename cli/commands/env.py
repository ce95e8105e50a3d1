"""``kbitq env``: versions, instruction set, CUDA, devices. Answers even where the compiled core does not load."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kbitq import __version__
from kbitq.cli.console import console
from kbitq.cli.options import parsing, printing
from kbitq.errors import BuildError

EPILOG = parsing.examples("kbitq env", "kbitq env --json")
_PACKAGES = ("torch", "safetensors", "numpy", "huggingface_hub", "transformers", "peft", "typer", "rich")


def command(json: printing.Json = False, debug: printing.Debug = False) -> None:
    """Show versions, the instruction set in use, whether CUDA is built in, and the devices: for a bug report."""
    console.begin(json=json, debug=debug)
    from kbitq.cli.views import environment

    facts = gather()
    if json:
        console.object(facts)
    else:
        for line in environment.lines(facts):
            console.data(line)


def gather() -> dict[str, Any]:
    """All facts as one JSON-ready dict; what cannot be found out is None or says why."""
    return {
        "kbitq": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "packages": {name: _version(name) for name in _PACKAGES},
        "core": _core(),
        "torch": _torch(),
        "nvidia": _nvidia(),
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core() -> dict[str, Any]:
    try:
        from kbitq._core import core
    except BuildError as error:
        return {"loaded": False, "reason": f"{error}; {error.hint}"}
    return {
        "loaded": True,
        "simd": core.simd(),
        "simd_available": list(core.simd_levels()),
        "cuda": bool(core.has_cuda),
        "cuda_status": core.cuda_status(),
    }


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch does not load
        return {"loaded": False, "reason": str(error)}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"loaded": True, "threads": torch.get_num_threads(), "cuda": torch.version.cuda, "devices": devices}


def _nvidia() -> dict[str, Any]:
    """Driver and GPUs as the driver itself reports them, which works without a CUDA build of torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"driver": None, "gpus": [], "reason": "nvidia-smi not found"}
    query = [tool, "--query-gpu=driver_version,name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": None, "gpus": [], "reason": f"nvidia-smi failed: {error}"}
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    gpus = [{"name": row[1], "memory": row[2], "compute_capability": row[3]} for row in rows]
    return {"driver": rows[0][0] if rows else None, "gpus": gpus, "reason": None if rows else "no GPU found"}


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
