"""Every option and argument as a named type, written once. Importing this file must stay cheap (no torch, no numpy)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq import __version__
from kbitq.cli.console import console
from kbitq.cli.views.text import parse_size
from kbitq.format import K_MAX, K_MIN

_SELECTION = "Which tensors"
_EMBEDDINGS = "Embeddings"  # a panel of its own: the two long names would squeeze the help of their neighbours
_OUTPUT = "Output"
_HUB = "The Hub"
_TALK = "What is printed"


def examples(*lines: str) -> str:
    """The examples at the foot of a help page."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message)


def _complete_path(incomplete: str) -> list[str]:
    """Folders and .safetensors files. bash completes file names better by itself, so it is given nothing."""
    if any(name.endswith("_COMPLETE") and value.endswith("_bash") for name, value in os.environ.items()):
        return []
    head, _, stem = incomplete.rpartition("/")
    folder = Path(f"{head}/" if incomplete.startswith("/") or head else ".").expanduser()
    prefix = f"{head}/" if "/" in incomplete else ""
    found = []
    try:
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(stem) or (entry.name.startswith(".") and not stem.startswith(".")):
                continue
            if entry.is_dir():
                found.append(f"{prefix}{entry.name}/")
            elif entry.suffix == ".safetensors":
                found.append(f"{prefix}{entry.name}")
    except OSError:
        return []
    return found


def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise _bad(str(error)) from None


def _parse_share(text: str) -> float:
    """'95%' or '0.95' -> 0.95."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise _bad(f"{text!r} is not a share; write it as 95% or 0.95.") from None
    if not 0 <= share <= 1:
        raise _bad(f"a share is from 0% to 100%, not {text}.")
    return share


def _parse_k(text: str) -> int:
    try:
        k = int(text)
    except ValueError:
        raise _bad(f"{text!r} is not a whole number.") from None
    if not K_MIN <= k <= K_MAX:
        raise _bad(f"K must be from {K_MIN} to {K_MAX}, not {k}.")
    return k


def _parse_ks(text: str) -> tuple[int, ...]:
    """'2,3,4' -> (2, 3, 4): ascending, each once."""
    return tuple(sorted({_parse_k(part.strip()) for part in text.split(",")}))


def _print_version(wanted: bool) -> None:
    if wanted:
        console.data(f"kbitq {__version__}")
        raise typer.Exit


# -- what to work on --------------------------------------------------------------------------------------------------

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A .safetensors file, a folder with one (or shards and an index), or org/name\\[@revision] on the Hub.",
        autocompletion=_complete_path,
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors file, a folder, or org/name\\[@revision] on the Hub; quantized or not.",
        autocompletion=_complete_path,
        show_default=False,
    ),
]
Quantized = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A file or folder that kbitq quantize wrote, or org/name\\[@revision] on the Hub.",
        autocompletion=_complete_path,
        show_default=False,
    ),
]

# -- how to quantize --------------------------------------------------------------------------------------------------

K = Annotated[
    int | None,
    typer.Option(
        "--k",
        "-k",
        metavar="N",
        parser=_parse_k,
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
    typer.Option(
        metavar="optimal|nf|fit|FILE",
        help="The levels: optimal, nf (normal quantiles), fit (to each tensor), fit-shared (to all of one role), "
        "or a .json or .safetensors file with 2^N of them.",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where to compute. The output is the same everywhere. auto: a GPU if there is one."),
]


def _parse_devices(text: str) -> str:
    if text != "auto":
        from kbitq.checkpoint.plan.options import DEVICES, is_device

        if not is_device(text):
            raise _bad(f"{text!r} is not one of {DEVICES}.")
    return text


Devices = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:N,...",
        parser=_parse_devices,
        help="Where to compute. The output is the same everywhere. auto: every GPU, or else the CPU; "
        "cuda:0,cuda:1: those two.",
    ),
]

MaxMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=_parse_size,
        show_default="about 200MB",
        help="Keep within this much memory beyond the interpreter: 500MB, 2GiB.",
    ),
]

# -- which tensors ----------------------------------------------------------------------------------------------------

Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=_SELECTION,
        show_default=False,
        help="Quantize these too. P: a glob on tensor names, or re:REGEX. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=_SELECTION,
        show_default=False,
        help="Keep these as they are; wins over --include. Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=_SELECTION,
        show_default=False,
        help="Quantize these and nothing else. Repeatable.",
    ),
]
KeepEmbeddings = Annotated[
    bool,
    typer.Option(
        "--keep-embeddings/--no-keep-embeddings", rich_help_panel=_EMBEDDINGS, help="Leave embeddings as they are."
    ),
]
OnNonfinite = Annotated[
    Literal["error", "keep"],
    typer.Option(rich_help_panel=_SELECTION, help="A tensor with NaN or Inf: stop, or keep it as it is and say so."),
]

MinCoverage = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        parser=_parse_share,
        rich_help_panel=_SELECTION,
        help="Refuse a run that would quantize less than this share of the parameters.",
    ),
]

# -- where to put it --------------------------------------------------------------------------------------------------

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        rich_help_panel=_OUTPUT,
        autocompletion=_complete_path,
        show_default="beside SRC, NAME-kbitq-kN",
        help="A name ending in .safetensors is a file, any other a folder.",
    ),
]
RequiredOutput = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        rich_help_panel=_OUTPUT,
        autocompletion=_complete_path,
        show_default=False,
        help="A name ending in .safetensors is a file, any other a folder.",
    ),
]
MaxShardSize = Annotated[
    int,
    typer.Option(
        metavar="SIZE",
        parser=_parse_size,
        rich_help_panel=_OUTPUT,
        help="Largest file of a folder: 500MB, 5GB (powers of 1000), 2GiB (of 1024).",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    typer.Option(
        rich_help_panel=_OUTPUT, show_default="each tensor's own", help="Write the restored tensors in this dtype."
    ),
]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=_OUTPUT, help="Replace an output that exists.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=_OUTPUT, help="Show the plan, as kbitq plan does; write nothing.")
]

Stream = Annotated[
    bool,
    typer.Option(
        "--stream", rich_help_panel=_HUB, help="Read a repository over the network as needed; keep no copy of it."
    ),
]

# -- running a model ---------------------------------------------------------------------------------------------------

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a language model, quantized or not, or ORG/NAME of the Hub.",
        autocompletion=_complete_path,
        show_default=False,
    ),
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.", show_default=False)]
Reference = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="SOURCE",
        autocompletion=_complete_path,
        show_default=False,
        help="A model to compare the predictions with, usually the unquantized one.",
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", show_default=False, exists=True, dir_okay=False, help="A text in UTF-8."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        show_default=False,
        exists=True,
        dir_okay=False,
        help="Token ids, little-endian uint16 or uint32.",
    ),
]
Window = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens read together.")]
Windows = Annotated[
    int | None, typer.Option(metavar="N", min=1, show_default="all", help="How many windows of the text to read.")
]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Windows read at once.")]
ComputeDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="To compute in. auto: that of the model's config."),
]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Stop after so many tokens.")]
Temperature = Annotated[float, typer.Option(metavar="T", min=0.0, help="0: always the likeliest token.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the drawing of tokens.")]

# -- inspect ----------------------------------------------------------------------------------------------------------

Against = Annotated[
    Path | None,
    typer.Option(
        metavar="SRC",
        autocompletion=_complete_path,
        show_default=False,
        help="Recompute the errors from this source instead of reading the recorded ones.",
    ),
]
Ks = Annotated[
    tuple,
    typer.Option(
        "--k", "-k", metavar="N,N,...", parser=_parse_ks, help="For a checkpoint not yet quantized: the K to try."
    ),
]
Sort = Annotated[
    Literal["name", "sqnr", "size"], typer.Option(help="By name, by SQNR (worst first), or by size (largest first).")
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Measure a sample of each big tensor instead of all of it: quick, approximate.")
]

# -- verify -----------------------------------------------------------------------------------------------------------

MadeFrom = Annotated[
    Path | None,
    typer.Option(
        "--source",
        metavar="SRC",
        autocompletion=_complete_path,
        show_default=False,
        help="What it was quantized from: tensors are quantized again and the bytes compared.",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Compare every tensor with the source.")]
SampleCount = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", min=1, show_default="8", help="Compare N quantized tensors with the source."),
]
RepairIndex = Annotated[
    bool, typer.Option("--repair-index", help="First write the index of the shards anew, from their headers.")
]

# -- push -------------------------------------------------------------------------------------------------------------

LocalQuantized = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A file or folder that kbitq quantize wrote.",
        autocompletion=_complete_path,
        show_default=False,
    ),
]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="The repository; it is made if there is none.", show_default=False)
]
Push = Annotated[
    str | None,
    typer.Option(metavar="ORG/NAME", rich_help_panel=_HUB, show_default=False, help="Publish the result there."),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/NAME",
        show_default=False,
        help="What it was quantized from, for the model card; a commit may follow after an @.",
    ),
]
Private = Annotated[bool, typer.Option("--private", rich_help_panel=_HUB, help="Make a new repository private.")]
PullRequest = Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")]
Revision = Annotated[str | None, typer.Option(metavar="BRANCH", show_default="main", help="The branch to commit to.")]

# -- what is printed --------------------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", rich_help_panel=_TALK, help="One JSON object on stdout.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=_TALK, help="No progress; of the result only the path of the output."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=_TALK, help="Show the traceback of an error.")]
Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
]
