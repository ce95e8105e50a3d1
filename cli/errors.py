"""Every error as a sentence, the step that helps, and an exit code."""

from __future__ import annotations

import errno
import re
from typing import Any, NamedTuple

from kbitq.cli.console import console
from kbitq.cli.signals import INTERRUPTED, Stopped, by
from kbitq.errors import KbitqError

FAILED = 1

_BY_ERRNO = {
    errno.ENOSPC: (
        "no space left on the device",
        "free some space, then run the same command again, or choose another place with -o",
    ),
    errno.EFBIG: ("the file would be larger than the file system or ulimit -f allows", "choose another place with -o"),
    errno.EDQUOT: (
        "the disk quota is used up",
        "free some space, then run the same command again, or choose another place with -o",
    ),
    errno.EACCES: ("permission denied", "check who owns it, or choose another place with -o"),
    errno.EPERM: ("permission denied", "check who owns it, or choose another place with -o"),
    errno.EROFS: ("the file system is read-only", "choose another place with -o"),
    errno.ENOENT: ("no such file or folder", "check the spelling of the path"),
    errno.ENOTDIR: ("a part of the path is not a folder", "check the spelling of the path"),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n 4096"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one with -o"),
    errno.EIO: ("the disk reported a read or write error", "check the disk (dmesg), then run the same command again"),
}

_REMEDIES = {
    "all-experts": "quantize all experts of a layer or none: --exclude '*.experts.*'",
    "against": "leave --against away",
    "another-disk": "free some space, or choose another disk with -o",
    "another-output": "choose another output with -o",
    "auto-codec": "--bpw or --size is the budget; or --codec planes or trellis",
    "below": "-o {out}/NAME",
    "calibration": "--calibration DIR",
    "cpu": "use --device cpu",
    "dtype": "leave --dtype away, or use float32 or bfloat16",
    "exclude": "--exclude '{tensor}' keeps the tensor whose part it would be",
    "unfit": "--exclude '{tensor}' keeps it as it is",
    "exists": "--force replaces it, -o chooses another name",
    "dtype32": "--dtype float32 has more room",
    "field": "--field NAME says which field has the text",
    "file-exists": "--force replaces it; or choose another name",
    "few-windows": "give more text, --samples {count}, or a smaller --length",
    "folder": "-o {out} writes a folder",
    "importance": "--importance FILE",
    "include": "--include 'PATTERN' adds tensors",
    "index": "download the checkpoint again, or kbitq verify {path} --repair-index",
    "k": "--k N is for what no rule gives a K",
    "layer-memory": "allow --max-memory {need}, or keep smaller blocks of each H with --hessian-block",
    "memory": "allow more with --max-memory, or leave --calibration away",
    "more": "quantize more (--no-keep-embeddings, --include 'PATTERN'), or allow more",
    "no-stream": "run it again without --stream",
    "no-statistics": "kbitq calibrate MODEL --text FILE -o OUT writes one",
    "no-template": "leave --chat away; kbitq chat takes base models, too",
    "no-window": "give more text, or a smaller --length",
    "nonfinite": "--on-nonfinite keep copies such tensors unquantized, --exclude PATTERN leaves them alone",
    "not-ours": "remove the folder yourself, or choose another with -o",
    "original": "kbitq dequantize {path} -o OUT gives an ordinary checkpoint; better is its original",
    "other-format": "kbitq inspect {path} shows its tensors; kbitq dequantize {path} -o OUT makes an ordinary folder",
    "output-outside": "choose an output outside it with -o",
    "plan-again": "kbitq plan SRC -o OUT --save PLAN, with the options of this one, makes a plan again",
    "quantize": "kbitq quantize {path} --k 3",
    "ray-start": "ray start --head starts one here, ray start --address=HEAD:6379 joins it",
    "rows-memory": "allow more with --max-memory, or choose a format whose scales are for one row",
    "start-over": "repeat that run to finish it, or use --force to start over",
    "stream-short": "run it again, which goes on where it stopped; or leave --stream away",
    "tokens": "give a text in UTF-8; token ids are for --tokens",
    "trust": "look at that code; --trust-remote-code runs it",
    "work": "kbitq work {path} --part I/N does what is missing of part I of N",
    "text": "give a text with --text, or ids of this model's tokenizer",
}
"""What to do, by the name that an error of the library gives it (its own hint names arguments of Python)."""


_BITS = "Here it is --k N (bits of an index, 2 to 8), or --bpw X for X bits per weight on average."
_CALLED_HERE = {
    **dict.fromkeys(("--bits", "--bit", "--nbits", "--wbits", "--w-bits", "--w_bit", "-b"), _BITS),
    **dict.fromkeys(("--out", "--out-dir", "--output-dir", "--outfile"), "Here it is -o OUT."),
    **dict.fromkeys(("--group-size", "--group_size", "--groupsize", "-g"), "A scale is always for 32 weights."),
}
"""Options of other quantizers, and what they are called here."""


class Explanation(NamedTuple):
    """What a reader gets to see of an error."""

    sentence: str
    hint: str | None
    exit_code: int


def explain(error: BaseException) -> Explanation:
    """The sentence, the hint and the exit code for any exception."""
    if isinstance(error, KeyboardInterrupt):
        return Explanation("interrupted", console.unfinished, INTERRUPTED)
    if isinstance(error, Stopped):
        return Explanation(f"interrupted{by(error.number)}", console.unfinished, 128 + error.number)
    if is_usage_error(error):
        return _usage(error)
    if isinstance(error, KbitqError):
        return Explanation(_in_flags(error), _remedy(error), FAILED)
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Explanation("out of memory", "free some memory, or use --device cpu if the GPU ran out", FAILED)
    if isinstance(error, ModuleNotFoundError):
        ours = (error.name or "").split(".")[0] == "kbitq"  # an editable install does not see files newer than itself
        again = "pip install -e . again (or make test)" if ours else f"pip install {error.name}"
        return Explanation(f"the Python package {error.name!r} is missing", again, FAILED)
    return Explanation(
        f"internal error: {type(error).__name__}: {error}",
        "this is a bug in kbitq; run again with --debug for the traceback and report it",
        FAILED,
    )


def report(error: BaseException) -> int:
    """Tell the error on stderr and return the exit code."""
    if console.debug and not is_usage_error(error):
        console.traceback(error)
    sentence, hint, exit_code = explain(error)
    if sentence:
        console.error(sentence, hint)
    return exit_code


def is_usage_error(error: BaseException) -> bool:
    """Whether Typer raised it, told by what it has: the class has a public name in some versions of Typer only."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _in_flags(error: KbitqError) -> str:
    """The message, with the argument at fault as the option that it is here."""
    if error.argument is None:
        return str(error)
    flag = f"--{error.argument.replace('_', '-')}"
    return re.sub(rf"\b{re.escape(error.argument)}\b", flag, str(error), count=1)


def _remedy(error: KbitqError) -> str | None:
    if error.remedy is None:
        return error.hint
    return _REMEDIES[error.remedy].format_map(error.data)


def _usage(error: Any) -> Explanation:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kbitq"
    sentence = error.format_message().replace("Value error, ", "")  # the validator's label says nothing to a reader
    called = _CALLED_HERE.get(getattr(error, "option_name", None) or "")
    if called is not None:
        sentence = f"No such option: {error.option_name}. {called}"
    return Explanation(sentence, f"{command} --help shows every option", error.exit_code)


def _os_error(error: OSError) -> Explanation:
    what, hint = _BY_ERRNO.get(error.errno or 0, (error.strerror or str(error), None))
    path = error.filename2 or error.filename
    return Explanation(f"{path}: {what}" if path else what, hint, FAILED)
