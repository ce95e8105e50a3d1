"""What a command works on: its positional arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kbitq.cli.options import files, parsing


def place(metavar: str, help: str) -> Any:
    """A positional argument that is a path, or stands for one: completed as such."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=parsing.complete_path, show_default=False)


Source = Annotated[
    Path,
    files.READ,
    place(
        "SRC",
        "A .safetensors or .gguf file, a folder with one (or shards and an index), "
        "or org/name\\[@revision] or org/name/file.gguf on the Hub.",
    ),
]
Checkpoint = Annotated[
    Path,
    files.READ,
    place("PATH", "A .safetensors or .gguf file, a folder, or org/name\\[@revision] on the Hub; quantized or not."),
]
Quantized = Annotated[
    Path,
    files.READ,
    place("PATH", "A file or folder that kbitq quantize wrote, or org/name\\[@revision] on the Hub."),
]
LocalQuantized = Annotated[
    Path,
    files.READ,
    place("PATH", "A file or folder that kbitq quantize wrote."),
]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="The repository; it is made if there is none.", show_default=False)
]
Model = Annotated[
    Path,
    files.READ,
    place("MODEL", "The folder of a language model, quantized or not, or ORG/NAME of the Hub."),
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.", show_default=False)]
ProgramName = Annotated[
    str,
    place("PROGRAM", "A .py file, a command of an installed package (lm_eval), or with -m a module."),
]
ProgramArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="What the program is given.", show_default=False)
]
