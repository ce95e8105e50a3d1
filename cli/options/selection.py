"""Which tensors are quantized."""

from __future__ import annotations

from typing import Annotated, Literal

from kbitq.cli.options import parsing
from kbitq.cli.options.panels import Panel

_PANEL = Panel("Which tensors")
_EMBEDDINGS = Panel("Embeddings")  # of their own: the two long names would squeeze the help of their neighbours

Include = Annotated[
    list[str] | None, _PANEL.option("P", "Quantize these too. P: a glob on tensor names, or re:REGEX. Repeatable.")
]
Exclude = Annotated[list[str] | None, _PANEL.option("P", "Keep these as they are; wins over --include. Repeatable.")]
Only = Annotated[list[str] | None, _PANEL.option("P", "Quantize these and nothing else. Repeatable.")]
KeepEmbeddings = Annotated[
    bool, _EMBEDDINGS.flag("Leave embeddings as they are.", "--keep-embeddings/--no-keep-embeddings")
]
OnNonfinite = Annotated[
    Literal["error", "keep"], _PANEL.option(None, "A tensor with NaN or Inf: stop, or keep it as it is and say so.")
]
MinCoverage = Annotated[
    float,
    _PANEL.option(
        "SHARE", "Refuse a run that would quantize less than this share of the parameters.", parser=parsing.share
    ),
]
