"""How a tensor is coded, and where that is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing
from kbitq.format import K_MAX, K_MIN

K = Annotated[
    int | None,
    typer.Option(
        "--k",
        "-k",
        metavar="N",
        parser=parsing.k,
        show_default=False,
        help=f"Bits of an index, {K_MIN} to {K_MAX}. A weight costs N + 0.25 bits.",
    ),
]
Scale = Annotated[
    Literal["mse", "absmax"],
    typer.Option(help="How a block's scale is chosen: least squared error, or largest magnitude (faster)."),
]
Codebook = Annotated[
    str,
    files.READ,
    typer.Option(
        metavar="optimal|nf|fit|FILE",
        help="The levels: optimal, nf (normal quantiles), fit (to each tensor), fit-shared (to all of one role), "
        "or a .json or .safetensors file with 2^N of them.",
    ),
]
Importance = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Mean squared activations by column: .safetensors, or llama.cpp's imatrix (.gguf, .dat).",
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:N,...",
        parser=parsing.devices,
        help="Where to compute. The output is the same everywhere. auto: every GPU, or else the CPU; "
        "cuda:0,cuda:1: those two.",
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parsing.size,
        show_default="about 200MB",
        help="Keep within this much memory beyond the interpreter: 500MB, 2GiB.",
    ),
]
