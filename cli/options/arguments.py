"""What a command works on: its positional arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files, parsing

Source = Annotated[
    Path,
    files.READ,
    typer.Argument(
        metavar="SRC",
        help="A .safetensors or .gguf file, a folder with one (or shards and an index), "
        "or org/name\\[@revision] on the Hub.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path,
    files.READ,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors or .gguf file, a folder, or org/name\\[@revision] on the Hub; quantized or not.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
Quantized = Annotated[
    Path,
    files.READ,
    typer.Argument(
        metavar="PATH",
        help="A file or folder that kbitq quantize wrote, or org/name\\[@revision] on the Hub.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
LocalQuantized = Annotated[
    Path,
    files.READ,
    files.READ,
    typer.Argument(
        metavar="PATH",
        help="A file or folder that kbitq quantize wrote.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="The repository; it is made if there is none.", show_default=False)
]
Model = Annotated[
    Path,
    files.READ,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a language model, quantized or not, or ORG/NAME of the Hub.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.", show_default=False)]
ProgramName = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="A .py file, a command of an installed package (lm_eval), or with -m a module.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
ProgramArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="What the program is given.", show_default=False)
]
