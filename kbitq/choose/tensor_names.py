"""What a tensor's name says of its place: layer, role, and the tensors that engines fuse it with."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FUSED = (  # components that engines make one matrix of
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("w1", "w3"),
)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to: the first number in its name. None if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def role_of(name: str) -> str:
    """The name with every number as ``*``: the same for the tensors that do the same in every layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def short_roles(roles: Sequence[str]) -> dict[str, str]:
    """Roles by as many of their last components, two at least, as tell them apart: ``mlp.up_proj``."""
    parts = {role: [p for p in role.removesuffix(".weight").split(".") if p != "*"] for role in roles}
    short = {}
    for role, own in parts.items():
        others = [p for r, p in parts.items() if r != role]
        count = next((n for n in range(2, len(own)) if all(p[-n:] != own[-n:] for p in others)), len(own))
        short[role] = ".".join(own[-count:])
    taken = list(short.values())
    return {role: text if taken.count(text) == 1 else role for role, text in short.items()}


def merged_experts(name: str) -> str:
    """The name without the expert's number, the same for all experts of a layer that are stored one by one."""
    return _EXPERT.sub("*", name)


def tie_of(name: str) -> str:
    """A key that tensors share where engines need one K for them: q/k/v, gate/up, all experts of a layer."""
    parts = name.split(".")
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts") + 1])
    owner = len(parts) - 2 if parts[-1] in ("weight", "bias") and len(parts) > 1 else len(parts) - 1
    for group in _FUSED:
        if parts[owner] in group:
            return ".".join([*parts[:owner], "+".join(group), *parts[owner + 1 :]])
    return name
