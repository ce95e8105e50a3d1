"""From the words of the command line to values, and the completion of paths. Must stay cheap to import."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import typer

from kbitq.cli.views.text import parse_size
from kbitq.format import DEFAULT_CODEC, K_MAX, K_MIN, OUTPUT_FORMATS, QUANT_METHOD, SCALE_BLOCKS, TRELLIS_K_MIN


def examples(*lines: str) -> str:
    """The examples at the foot of a help page."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


def complete_path(incomplete: str) -> list[str]:
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


def size(text: str) -> int:
    """'5GB' -> 5_000_000_000."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def share(text: str) -> float:
    """'95%' or '0.95' -> 0.95."""
    message = f"{text!r} is not a share; write it as 95% or 0.95."
    found = _number(text.removesuffix("%"), float, message) / (100 if text.endswith("%") else 1)
    if not 0 <= found <= 1:
        raise typer.BadParameter(f"a share is from 0% to 100%, not {text}.")
    return found


def k(text: str) -> int:
    """'3' -> 3. For '3.5' the error says what such a wish is called here."""
    try:
        wish = float(text)
    except ValueError:
        wish = 0.0
    if wish % 1 and K_MIN < wish < K_MAX:
        raise typer.BadParameter(f"K is a whole number, not {text}; --bpw {text} spends so many bits on average.")
    return _k(text)


def _k(text: str) -> int:
    found = int(_number(text, int, f"{text!r} is not a whole number."))
    if not TRELLIS_K_MIN <= found <= K_MAX:  # which codec has it is seen when the codec is known
        raise typer.BadParameter(f"K must be from {K_MIN} to {K_MAX}, not {found}.")
    return found


def check_k(wanted: int | None, codec: str) -> None:
    """Raise BadParameter for a K below those of the default codec, whose message is that of ``k``."""
    if codec == DEFAULT_CODEC and wanted is not None and wanted < K_MIN:
        raise typer.BadParameter(f"K must be from {K_MIN} to {K_MAX}, not {wanted}.", param_hint="'--k' / '-k'")


def scale_block(text: str) -> int:
    """'128' -> 128."""
    known = " or ".join(map(str, SCALE_BLOCKS))
    found = int(_number(text, int, f"a scale is for {known} columns, not {text!r}."))
    if found not in SCALE_BLOCKS:
        raise typer.BadParameter(f"a scale is for {known} columns, not {text}.")
    return found


def output_format(text: str) -> str:
    """'int8' -> 'int8'."""
    known = (QUANT_METHOD, *OUTPUT_FORMATS)
    if text not in known:
        raise typer.BadParameter(f"the format must be one of {', '.join(known)}, not {text!r}.")
    return text


def group(text: str) -> str:
    """'128' -> 'g128', 'channel' -> 'channel': the end of a codec's name."""
    if text in ("channel", ""):
        return text
    found = int(_number(text, int, f"a group is a number of columns or 'channel', not {text!r}."))
    if found < 32 or found % 32:
        raise typer.BadParameter(f"a group has 32 columns or a multiple of 32, not {text}.")
    return f"g{found}"


def check_codec(name: str, group: str) -> None:
    """Raise BadParameter for a group that a format does not have."""
    from kbitq.codecs.base import get_codec
    from kbitq.errors import CodecError

    try:
        get_codec(name)
    except CodecError:
        raise typer.BadParameter(f"there are no groups of {group[1:]} columns in this format.") from None


def ks(text: str) -> tuple[int, ...]:
    """'2,3,4' -> (2, 3, 4): ascending, each once."""
    return tuple(sorted({_k(part.strip()) for part in text.split(",")}))


def bits(text: str) -> float:
    """'3.5' -> 3.5."""
    found = _number(text, float, f"{text!r} is not a number of bits.")
    if not 0 < found < math.inf:
        raise typer.BadParameter(f"bits per weight must be above zero, not {text}.")
    return found


def nats(text: str) -> float:
    """'0.05' -> 0.05."""
    found = _number(text, float, f"{text!r} is not a number of nats.")
    if not 0 < found < math.inf:
        raise typer.BadParameter(f"a divergence must be above zero, not {text}.")
    return found


def factor(text: str) -> tuple[str, float]:
    """'*.lm_head.*=4' -> ('*.lm_head.*', 4.0)."""
    message = f"{text!r} is not understood; write it as PATTERN=2.5."
    pattern, _, number = text.rpartition("=")
    found = _number(number, float, message)
    if not pattern or not 0 <= found < math.inf:
        raise typer.BadParameter(message)
    return pattern, found


def devices(text: str) -> str:
    """'cuda:0,cuda:1' as it is, if it is a list of devices."""
    if text != "auto":
        from kbitq.checkpoint.plan.options import DEVICES, is_device

        if not is_device(text):
            raise typer.BadParameter(f"{text!r} is not one of {DEVICES}.")
    return text


def _number(text: str, kind: Callable[[str], float], message: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(message) from None
