"""What ``kbitq env`` shows."""

from __future__ import annotations

from typing import Any


def lines(facts: dict[str, Any]) -> list[str]:
    """A line for each fact of ``env.gather``."""
    core, torch, nvidia = facts["core"], facts["torch"], facts["nvidia"]
    rows = [
        ("kbitq", facts["kbitq"]),
        ("python", facts["python"]),
        ("platform", facts["platform"]),
        ("cpu", f"{facts['cpu']['model']}, {facts['cpu']['cores']} cores usable"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
    ]
    if core["loaded"]:
        rows += [
            ("SIMD level", f"{core['simd']} (available: {', '.join(core['simd_available'])})"),
            ("CUDA in kbitq", _cuda(core)),
        ]
    else:
        rows.append(("compiled core", f"missing: {core['reason']}"))
    if torch["loaded"]:
        devices = ", ".join(torch["devices"]) or "no CUDA device"
        rows += [("threads", str(torch["threads"])), ("CUDA in torch", f"{torch['cuda'] or 'no'}; {devices}")]
    else:
        rows.append(("torch", f"does not load: {torch['reason']}"))
    rows.append(("NVIDIA driver", nvidia["driver"] or f"none ({nvidia['reason']})"))
    rows += [
        ("GPU", f"{gpu['name']}, {gpu['memory']}, sm_{gpu['compute_capability'].replace('.', '')}")
        for gpu in nvidia["gpus"]
    ]
    return [f"{label:<16}{value}" for label, value in rows]


def _cuda(core: dict[str, Any]) -> str:
    if not core["cuda"]:
        return f"no: {core['cuda_status']}"
    return f"built in, but cannot be used: {core['cuda_status']}" if core["cuda_status"] else "yes"
