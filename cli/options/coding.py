"""How a tensor is coded, and where that is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kbitq.cli.options import files, parsing
from kbitq.cli.options.panels import MAIN
from kbitq.format import K_MAX, K_MIN, TRELLIS_K_MAX, TRELLIS_K_MIN

K = Annotated[
    int | None,
    MAIN.option(
        "N",
        f"Bits of an index, {K_MIN} to {K_MAX} ({TRELLIS_K_MIN} to {TRELLIS_K_MAX} with --codec trellis). "
        "A weight costs N + 0.25 bits.",
        "--k",
        "-k",
        parser=parsing.k,
    ),
]
Scale = Annotated[
    Literal["mse", "absmax"],
    MAIN.option(None, "How a block's scale is chosen: least squared error, or largest magnitude (faster)."),
]
Codebook = Annotated[
    str,
    files.READ,
    MAIN.option(
        "optimal|nf|fit|FILE",
        "The levels: optimal, nf (normal quantiles), fit (to each tensor), fit-shared (to all of one role), "
        "or a .json or .safetensors file with 2^N of them (trellis: 2^(N+2)).",
    ),
]
Codec = Annotated[
    str,
    MAIN.option(
        "planes|trellis|auto",
        "How weights are coded. trellis: 1 to 2 dB less error at a size, slower to quantize. auto, with --bpw or "
        "--size: for each tensor what serves the budget best.",
    ),
]
TriedCodec = Annotated[str, MAIN.option("planes|trellis", "For a checkpoint not yet quantized: the codec to try.")]
ScaleBlock = Annotated[
    int,
    MAIN.option(
        "32|128",
        "Columns that share a scale. 128, for the trellis: 0.19 bits a weight less, and some more error.",
        parser=parsing.scale_block,
    ),
]
Format = Annotated[
    str,
    MAIN.option(
        "kbitq|compressed-tensors|int8|fp8|fp8-block|gptq|bnb-nf4|bnb-nf4-double",
        "The format of the output. Those of other tools are loaded by vLLM and transformers without kbitq: "
        "weights of 4 or 8 bits (gptq too); weights and activations of 8 bits, integers or FP8; NF4 of bitsandbytes, "
        "with scales that are quantized too (double).",
        parser=parsing.output_format,
    ),
]
Group = Annotated[
    str,
    MAIN.option(
        "N|channel",
        "With --format compressed-tensors or gptq: columns that share a scale, or channel for one scale a row.",
        parser=parsing.group,
        shown="128",
    ),
]
Importance = Annotated[
    Path | None,
    files.READ,
    MAIN.option("FILE", "Mean squared activations by column: .safetensors, or llama.cpp's imatrix (.gguf, .dat)."),
]
Calibration = Annotated[
    Path | None,
    files.READ,
    MAIN.option("DIR", "A folder of 'kbitq calibrate': each block is quantized knowing the errors of those before it."),
]
Devices = Annotated[
    str,
    MAIN.option(
        "auto|cpu|cuda|cuda:N,...",
        "Where to compute. The output is the same everywhere. auto: every GPU, or else the CPU; "
        "cuda:0,cuda:1: those two.",
        parser=parsing.devices,
    ),
]
MaxMemory = Annotated[
    int | None,
    MAIN.option(
        "SIZE",
        "Keep within this much memory beyond the interpreter: 500MB, 2GiB.",
        parser=parsing.size,
        shown="about 200MB",
    ),
]
