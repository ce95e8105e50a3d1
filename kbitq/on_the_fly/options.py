"""The options of quantizing on the fly: those of ``kbitq quantize`` by their names in Python, each checked alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from kbitq import format as fmt
from kbitq.checkpoint.plan.options import AUTO, QuantizeOptions
from kbitq.choose.knapsack import Budget
from kbitq.choose.recipe import parse_rule
from kbitq.choose.selection import TensorRule
from kbitq.codecs.base import codec_names, get_codec
from kbitq.errors import BudgetError, OptionError

DEFAULT_K = 4
_LEVELS = "codebook"
OPTIONS = (
    "k", "scale", _LEVELS, "codec", "scale_block", "bpw", "rules", "importance", "calibration", "include", "exclude",
    "keep_embeddings",
)  # fmt: skip
_ELSEWHERE = {
    "bits": "k", "nbits": "k", "n_bits": "k", "num_bits": "k", "w_bit": "k", "weight_bits": "k",
    "ignore": "modules_to_not_convert", "skip_modules": "modules_to_not_convert",
    "llm_int8_skip_modules": "modules_to_not_convert", "rule": "rules", "recipe": "rules",
}  # fmt: skip
"""What other quantizers, and the command line, call our options."""
_COMMAND_ONLY = ("size", "only", "kl", "on_nonfinite", "max_memory", "min_coverage")
"""Options of ``kbitq quantize`` that are about files, or that there is another option for here."""


def quantize_options(**given: Any) -> QuantizeOptions:
    """What is to be done, as ``kbitq quantize`` would be told; without ``k`` and ``bpw`` K is 4.

    ``given``: all of :data:`OPTIONS`, by name. ``codebook`` may be levels too, which become a tuple.

    Raises:
        OptionError: an option does not take its value, or two do not go together.
        SelectionError: a rule is not understood.
        CodebookError: the codebook is not 2^k ascending finite levels.
        BudgetError: no number of bits a weight.
    """
    bpw = given["bpw"]
    name = _checked_codec(given["codec"], given["scale_block"], bpw)
    bits = _checked_k(given["k"], bpw, name)
    levels = _checked_levels(given[_LEVELS], bits, name)
    if given["importance"] is not None and given["calibration"] is not None:
        raise OptionError(
            "importance and calibration do not go together: error feedback has weights of its own",
            argument="importance",
        )
    return QuantizeOptions(
        bits,
        _checked_scale(given["scale"]),
        levels,
        checked_names("include", given["include"]),
        checked_names("exclude", given["exclude"]),
        keep_embeddings=checked_switch("keep_embeddings", given["keep_embeddings"]),
        rules=_checked_rules(given["rules"]),
        importance=_checked_path("importance", given["importance"]),
        calibration=_checked_path("calibration", given["calibration"]),
        budget=None if bpw is None else Budget(bpw=bpw),
        codec=name,
    )


def refuse_unknown(where: str, unknown: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise OptionError for the first of the ``unknown`` options of ``where``, naming the nearest of ``known``."""
    for name, value in unknown.items():
        raise OptionError(f"{where} has no option '{name}': {_instead_of(name, value, known)}", argument=name)


def levels_of(spec: Any) -> tuple[float, ...]:
    """Levels as a tuple, which compares and can be a key."""
    return tuple(float(level) for level in spec)


def _instead_of(name: str, value: Any, known: Sequence[str]) -> str:
    if name in _COMMAND_ONLY:
        return _with_the_command(name, value)
    if (meant := _ELSEWHERE.get(name.lower())) in known:
        return f"did you mean '{meant}'?"
    if near := get_close_matches(name, known, 1):
        return f"did you mean '{near[0]}'?"
    return f"it has {', '.join(known[:-1])} and {known[-1]}"


def _with_the_command(option: str, value: Any) -> str:
    return f"run `kbitq quantize --{option.replace('_', '-')} {value}` and load the folder that it writes"


def _checked_codec(codec: Any, scale_block: Any, bpw: Any) -> str:
    names = (*codec_names(), *((AUTO,) if bpw is not None else ()))
    if codec not in names:
        by_budget = " (auto needs bpw)" if codec == AUTO else ""
        raise OptionError(f"codec must be one of {', '.join(names)}, not {codec!r}{by_budget}", argument="codec")
    if scale_block is None or codec == AUTO:
        return str(codec)
    made = fmt.with_scale_block(codec.partition("/")[0], scale_block)
    if made not in names:
        raise OptionError(f"scale_block of the codec {codec} cannot be {scale_block!r}", argument="scale_block")
    return made


def _checked_k(k: Any, bpw: Any, codec: str) -> int | None:
    if bpw is not None:
        if k is not None:
            raise OptionError(f"k and bpw do not go together: bpw={bpw!r} chooses a K for each weight", argument="k")
        if isinstance(bpw, bool) or not isinstance(bpw, int | float):
            raise BudgetError(f"bpw must be a number, not {bpw!r}", argument="bpw")
        return None
    ks = get_codec(codec).ks
    k = DEFAULT_K if k is None else k
    if isinstance(k, int) and not isinstance(k, bool) and k in ks:
        return k
    whole = f"k must be a whole number from {ks[0]} to {ks[-1]}, not {k!r}"
    between = isinstance(k, float) and ks[0] < k < ks[-1] and not k.is_integer()
    raise OptionError(whole + (f": for an average, bpw={k!r}" if between else ""), argument="k")


def _checked_scale(scale: Any) -> str:
    if scale not in fmt.SCALE_RULES:
        raise OptionError(f"scale must be 'mse' or 'absmax', not {scale!r}", argument="scale")
    return str(scale)


def _checked_levels(spec: Any, k: int | None, codec: str) -> Any:
    """A name or path as it is; levels as a tuple."""
    named = isinstance(spec, str | os.PathLike)
    if not named and k is None:
        raise OptionError(f"{_LEVELS} must have a name where bpw chooses K: levels are for one K", argument=_LEVELS)
    if isinstance(spec, str) and spec == "fit-shared":
        sentence = f"{_LEVELS} '{spec}' takes many weights at a time: {_with_the_command(_LEVELS, spec)}"
        raise OptionError(sentence, argument=_LEVELS)
    if k is not None and not (isinstance(spec, str) and spec == "fit"):
        get_codec(codec).levels(spec, k)
    return spec if named else levels_of(spec)


def _checked_rules(rules: Any) -> tuple[TensorRule, ...]:
    found = None if isinstance(rules, str) or not isinstance(rules, Iterable) else tuple(rules)
    if found is None or not all(isinstance(rule, str | TensorRule) for rule in found):
        raise OptionError(f"rules must be a list of strings such as '*.down_proj.weight=k4', not {rules!r}")
    made = tuple(rule if isinstance(rule, TensorRule) else parse_rule(rule) for rule in found)
    for rule in made:
        _checked_levels(getattr(rule, _LEVELS) or "optimal", None, fmt.DEFAULT_CODEC)
    return made


def _checked_path(option: str, path: Any) -> Any:
    if path is not None and not isinstance(path, str | os.PathLike):
        raise OptionError(f"{option} must be a path, not {path!r}", argument=option)
    return None if path is None else os.fspath(path)


def checked_names(option: str, names: Any) -> tuple[str, ...]:
    """A list of strings as a tuple. Raises OptionError for anything else."""
    found = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if found is None or not all(isinstance(name, str) for name in found):
        raise OptionError(f"{option} must be a list of strings, not {names!r}", argument=option)
    return found


def checked_switch(option: str, value: Any) -> bool:
    """True or False. Raises OptionError for anything else."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} must be True or False, not {value!r}", argument=option)
    return value
