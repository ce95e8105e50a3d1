"""Running a model (``eval``, ``chat``, ``generate``) or a program (``run``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kbitq.cli.options import files
from kbitq.cli.options.panels import MAIN

Reference = Annotated[
    Path | None,
    files.READ,
    MAIN.path("SOURCE", "A model to compare the predictions with, usually the unquantized one.", "--against"),
]
TextFile = Annotated[Path | None, files.READ, MAIN.file("A text in UTF-8.", "--text")]
TokenFile = Annotated[Path | None, files.READ, MAIN.file("Token ids, little-endian uint16 or uint32.", "--tokens")]
Window = Annotated[int, MAIN.option("N", "Tokens read together.", min=2)]
Windows = Annotated[int | None, MAIN.option("N", "How many windows of the text to read.", min=1, shown="all")]
Save = Annotated[
    bool | None,
    MAIN.flag(
        "Write the result beside the quantized model, for its card and for inspect --html.",
        "--save/--no-save",
        shown="save scores of tasks",
    ),
]
Batch = Annotated[int, MAIN.option("N", "Windows, or samples of a task, read at once.", min=1)]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    MAIN.option(None, "Where to compute. The output is the same everywhere. auto: a GPU if there is one."),
]
TrustRemoteCode = Annotated[
    bool,
    MAIN.flag(
        "Run Python files that come with the model, if it needs them. Look at them first.", "--trust-remote-code"
    ),
]
ComputeDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    MAIN.option(None, "To compute in. auto: that of the model's config.", "--dtype"),
]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded: what ``load_model`` takes besides its folder."""

    device: Device = "auto"
    dtype: ComputeDtype = "auto"
    trust_remote_code: TrustRemoteCode = False


MaxTokens = Annotated[int, MAIN.option("N", "Stop after so many tokens.", min=1)]
Temperature = Annotated[float, MAIN.option("T", "0: always the likeliest token.", min=0.0)]
OwnTemperature = Annotated[
    float | None, MAIN.option("T", "0: always the likeliest token.", "--temperature", min=0.0, shown="the model's")
]
System = Annotated[str | None, MAIN.option("TEXT", "What the model is told first.", "--system")]
Seed = Annotated[int, MAIN.option("N", "Start of the random numbers; the same seed draws the same text.")]
Module = Annotated[bool, MAIN.flag("PROGRAM is a module, as after python -m.", "--module", "-m")]
UseTemplate = Annotated[
    bool, MAIN.flag("Put what is asked into the model's chat template, as a message of a user.", "--chat")
]
