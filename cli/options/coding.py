"""How a tensor is coded, and where that is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing
from kbitq.format import K_MAX, K_MIN, TRELLIS_K_MAX, TRELLIS_K_MIN

K = Annotated[
    int | None,
    typer.Option(
        "--k",
        "-k",
        metavar="N",
        parser=parsing.k,
        show_default=False,
        help=f"Bits of an index, {K_MIN} to {K_MAX} ({TRELLIS_K_MIN} to {TRELLIS_K_MAX} with --codec trellis). "
        "A weight costs N + 0.25 bits.",
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
        "or a .json or .safetensors file with 2^N of them (trellis: 2^(N+2)).",
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        metavar="planes|trellis|auto",
        help="How weights are coded. trellis: 1 to 2 dB less error at a size, slower to quantize. auto, with --bpw or "
        "--size: for each tensor what serves the budget best.",
    ),
]
TriedCodec = Annotated[
    str,
    typer.Option(metavar="planes|trellis", help="For a checkpoint not yet quantized: the codec to try."),
]
ScaleBlock = Annotated[
    int,
    typer.Option(
        metavar="32|128",
        parser=parsing.scale_block,
        help="Columns that share a scale. 128, for the trellis: 0.19 bits a weight less, and some more error.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        metavar="kbitq|compressed-tensors|int8|fp8|fp8-block|gptq|bnb-nf4|bnb-nf4-double",
        parser=parsing.output_format,
        help="The format of the output. Those of other tools are loaded by vLLM and transformers without kbitq: "
        "weights of 4 or 8 bits (gptq too); weights and activations of 8 bits, integers or FP8; NF4 of bitsandbytes, "
        "with scales that are quantized too (double).",
    ),
]
Group = Annotated[
    str,
    typer.Option(
        metavar="N|channel",
        parser=parsing.group,
        show_default="128",
        help="With --format compressed-tensors or gptq: columns that share a scale, or channel for one scale a row.",
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
Calibration = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="A folder of 'kbitq calibrate': each block is quantized knowing the errors of those before it.",
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
