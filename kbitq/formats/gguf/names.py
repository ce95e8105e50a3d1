"""Tensors of a GGUF file under Hugging Face's names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kbitq.errors import CheckpointError
from kbitq.formats.gguf.architectures import ARCHITECTURES, MIXTRAL, Architecture
from kbitq.formats.gguf.container import GgufTensor, integer
from kbitq.text_safety import shown

_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>[a-z_0-9]+)(?:\.(?P<expert>\d+))?\.(?P<end>weight|bias)")
_TOP = re.compile(r"(?P<part>[a-z_0-9]+)\.(?P<end>weight|bias)")
MAX_EXPERTS = 1 << 14
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that Hugging Face computes from the config."""


@dataclass(frozen=True)
class Named:
    """A tensor, or one expert of a stack of them, under Hugging Face's name.

    Attributes:
        name: Hugging Face's.
        tensor: of the file.
        shape: that Hugging Face has.
        offset: of its bytes in the file.
        nbytes: of them.
        heads: of q or k, whose rows lie in llama.cpp's order; 0 elsewhere.
        less: what is taken off each value.
        transposed: whether ``shape`` is the stored one turned round.
        dtype: what its values are written as, which holds them exactly; empty: as they are stored.
    """

    name: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int = 0
    less: int = 0
    transposed: bool = False
    dtype: str = ""

    @property
    def is_float32_vector(self) -> bool:
        """Whether it is a norm or a bias as llama.cpp stores them."""
        return len(self.shape) == 1 and self.tensor.type.plain == "F32"

    @property
    def as_it_is(self) -> bool:
        """Whether the stored bytes are those of an ordinary tensor."""
        return self.tensor.type.plain is not None and not (self.heads or self.less or self.transposed or self.dtype)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture | None:
    """How Hugging Face has the architecture that a file names; None for one that is not known here."""
    name = metadata.get("general.architecture")
    if name == "llama" and integer(metadata, "llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES.get(name) if isinstance(name, str) else None


def hugging_face_names(metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> tuple[list[Named], list[str]]:
    """Tensors in the order of the files, and the names of those that keep llama.cpp's name."""
    architecture = architecture_of(metadata)
    named: list[Named] = []
    unknown: list[str] = []
    for tensor in tensors:
        if architecture is not None and tensor.name in COMPUTED:
            continue
        found = list(_named(architecture, metadata, tensor)) if architecture is not None else []
        if not found:
            found = [Named(tensor.name, tensor, tensor.shape, tensor.offset, tensor.nbytes)]
            unknown.append(tensor.name)
        named += found
    return named, unknown


def _named(architecture: Architecture, metadata: Mapping[str, Any], tensor: GgufTensor) -> Iterator[Named]:
    whole = (tensor.shape, tensor.offset, tensor.nbytes)
    if (top := _TOP.fullmatch(tensor.name)) and (name := architecture.top.get(top["part"])):
        less = int(architecture.norm_offset and top["part"].endswith("norm"))
        yield Named(f"{name}.{top['end']}", tensor, *whole, less=less)
    if not (inside := _LAYER.fullmatch(tensor.name)):
        return
    part, expert, end = inside["part"], inside["expert"], inside["end"]
    name = architecture.layer.get(f"{part}_exps" if expert else part)
    if name is None:
        return
    name = f"{architecture.prefix}{inside['layer']}.{name}.{end}"
    if expert:  # a tensor for each expert, as older files have them
        yield Named(name.format(e=expert), tensor, *whole)
    elif "{e}" in name:
        yield from _experts(name, tensor)
    else:
        yield _one(architecture, metadata, part, name, tensor)


def _experts(name: str, tensor: GgufTensor) -> Iterator[Named]:
    if len(tensor.shape) < 2:
        return
    if tensor.shape[0] > MAX_EXPERTS:
        raise CheckpointError(
            f"tensor {shown(tensor.name)} has {tensor.shape[0]:,} experts, more than any model",
            hint="download the file again",
        )
    nbytes = tensor.nbytes // tensor.shape[0]
    for e in range(tensor.shape[0]):
        yield Named(name.format(e=e), tensor, tensor.shape[1:], tensor.offset + e * nbytes, nbytes)


def _one(architecture: Architecture, metadata: Mapping[str, Any], part: str, name: str, tensor: GgufTensor) -> Named:
    whole = (tensor.offset, tensor.nbytes)
    if architecture.transposed and part in architecture.transposed and len(tensor.shape) == 2:
        return Named(name, tensor, tensor.shape[::-1], *whole, transposed=True)
    less = int(architecture.norm_offset and part.endswith("norm"))
    return Named(name, tensor, tensor.shape, *whole, heads=_heads(architecture, metadata, part, tensor), less=less)


def _heads(architecture: Architecture, metadata: Mapping[str, Any], part: str, tensor: GgufTensor) -> int:
    """Heads of q or k whose rows were put into llama.cpp's order, else 0."""
    if not architecture.permuted or part not in ("attn_q", "attn_k"):
        return 0
    stem = f"{metadata.get('general.architecture')}.attention.head_count"
    heads = integer(metadata, stem)
    if part == "attn_k":
        heads = integer(metadata, stem + "_kv") or heads
    if not heads or len(tensor.shape) > 2 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"tensor {shown(tensor.name)} has {tensor.shape[0]:,} rows, which do not fit the heads that {stem} says",
            hint="download the file again",
        )
    return heads
