"""Recipes: rules for K, scale, codebook and what is kept, on the command line and in TOML files.

k = 3                       # for tensors that no rule gives a K; likewise scale, codebook, codec, include, exclude,
codebook = "optimal"        # only, keep_embeddings and max_shard_size, all optional

[[rule]]                    # the first rule that matches a tensor wins
match = "*.down_proj.weight"
k = 4
codec = "trellis/128"
codebook = "fit"

[[rule]]
match = "re:layers\\.0\\."
keep = true
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbitq.choose.selection import REGEX_PREFIX, TensorRule
from kbitq.codecs.base import codec_names
from kbitq.errors import SelectionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OPTIONS: dict[str, type] = {
    "k": int, "scale": str, "codebook": str, "codec": str, "include": list, "exclude": list, "only": list,
    "keep_embeddings": bool, "max_shard_size": int, "on_nonfinite": str, "importance": str,
    "calibration": str,
}  # fmt: skip
_RULE: dict[str, type] = {"match": str, "keep": bool, "k": int, "scale": str, "codebook": str, "codec": str}
_RULE_HINT = "write PATTERN=k4, PATTERN=keep, PATTERN=trellis:k2/128, or PATTERN=k4,scale=absmax,codebook=fit"


@dataclass(frozen=True)
class Recipe:
    """``options`` as in ``checkpoint.QuantizeOptions``; ``importance`` is the SHA-256 of the file it was made with, and
    ``calibration`` the fingerprint of the statistics."""

    options: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[TensorRule, ...] = ()
    importance: str | None = None
    calibration: str | None = None


def parse_rule(text: str) -> TensorRule:
    """A rule as written on the command line. Raises SelectionError."""
    pattern, equals, settings = text.rpartition("=")
    words = [settings]
    # A pattern may hold '=' and ',' itself: what follows the first '=' after which everything is a setting is the rule.
    for match in re.finditer("=", text):
        words = text[match.end() :].split(",")
        if all(_settings(word) for word in words):
            pattern = text[: match.start()]
            break
    if not equals or not pattern or not all(_settings(word) for word in words):
        raise SelectionError(f"rule '{text}' is not understood", hint=_RULE_HINT)
    chosen: dict[str, Any] = {}
    for key, value in (setting for word in words for setting in _settings(word)):
        if key in chosen:
            raise SelectionError(f"rule '{text}' sets {key} twice", hint=_RULE_HINT)
        chosen[key] = value
    return TensorRule(pattern, **chosen)


def rule_text(rule: TensorRule) -> str:
    """A rule as ``parse_rule`` reads it."""
    words = ["keep"] if rule.keep else []
    name, _, scale_block = (rule.codec or "").partition("/")
    coded = ":".join(filter(None, (name, f"k{rule.k}" if rule.k is not None else "")))
    words += [coded + (f"/{scale_block}" if scale_block else "")] if coded else []
    words += [f"{key}={getattr(rule, key)}" for key in ("scale", "codebook") if getattr(rule, key) is not None]
    return f"{rule.pattern}={','.join(words)}"


def _settings(word: str) -> list[tuple[str, Any]]:
    """What one word of a rule sets; nothing if it is not understood.

    ``k4``, ``trellis:k4`` (K and codec), ``trellis:k4/128`` (with the columns that share a scale) and ``trellis/128``.
    """
    word = word.strip()
    if word == "keep":
        return [("keep", True)]
    key, _, value = word.partition("=")
    if key in ("scale", "codebook") and value:
        return [(key, value)]
    if re.fullmatch(r"k\d+", word):
        return [("k", int(word[1:]))]
    found = re.fullmatch(r"([a-z]\w*)(?::k(\d+))?(?:/(\d+))?", word)
    if found is None or found[1] not in {name.partition("/")[0] for name in codec_names()}:
        return []
    coding = ("codec", found[1] + (f"/{found[3]}" if found[3] else ""))
    return [coding, ("k", int(found[2]))] if found[2] else [coding]


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe. Raises SelectionError, which names the file and what in it is wrong."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SelectionError(f"{path}: the recipe cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SelectionError(f"{path}: not a TOML file ({error})") from None
    rules = raw.pop("rule", [])
    options = _checked(raw, _OPTIONS, str(path))
    importance, calibration = (options.pop(name, None) for name in ("importance", "calibration"))
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise SelectionError(f"{path}: 'rule' must be tables, each under [[rule]]")
    made = [_rule(rule, f"{path}: rule {number}") for number, rule in enumerate(rules, start=1)]
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return Recipe(frozen, tuple(made), importance, calibration)


def _rule(raw: Mapping[str, Any], where: str) -> TensorRule:
    settings = _checked(raw, _RULE, where)
    if "match" not in settings:
        raise SelectionError(f"{where} has no 'match'")
    return TensorRule(settings.pop("match"), **settings)


def _checked(raw: Mapping[str, Any], known: Mapping[str, type], where: str) -> dict[str, Any]:
    """Raise SelectionError for a key that is not known or a value of another type."""
    for key, value in raw.items():
        if key not in known:
            raise SelectionError(f"{where}: {key!r} is not known", hint=f"known are {', '.join(known)}")
        strings = known[key] is list and isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not strings and (known[key] is list or type(value) is not known[key]):
            wanted = {int: "a whole number", bool: "true or false", str: "a text", list: "a list of texts"}
            raise SelectionError(f"{where}: {key} must be {wanted[known[key]]}, not {value!r}")
    return dict(raw)


def recipe_text(options: Mapping[str, Any], rules: Iterable[TensorRule]) -> str:
    """A recipe as TOML; an option that is None or empty is left out."""
    lines = [f"{key} = {_toml(value)}" for key, value in options.items() if value not in (None, (), [])]
    for rule in rules:
        lines += ["", "[[rule]]", f"match = {_toml(rule.pattern)}"]
        lines += ["keep = true"] if rule.keep else []
        for key in ("k", "codec", "scale", "codebook"):
            if (value := getattr(rule, key)) is not None:
                lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def exactly(name: str) -> str:
    """A pattern that matches this name and no other."""
    return f"{REGEX_PREFIX}^{re.escape(name)}\\Z" if re.search(r"[*?\[\]]|^re:", name) else name


def _toml(value: Any) -> str:
    """JSON of these types is TOML, but for the one control character that JSON leaves as it is."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
