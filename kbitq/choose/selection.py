"""Which tensors of a checkpoint are quantized, with what K, and why: from names, shapes and dtypes alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from kbitq.codecs.base import codec_names, coded_nbytes, constant_nbytes, get_codec
from kbitq.errors import SelectionError
from kbitq.format import (
    DEFAULT_CODEC,
    SCALE_RULES,
    element_count,
    is_fused_experts,
    stored_dtype,
    tensor_nbytes,
)

MIN_ELEMENTS = 4096  # below this a tensor saves next to nothing and often matters much
REGEX_PREFIX = "re:"


@dataclass(frozen=True)
class Verdict:
    """What happens to one tensor. ``k`` is None for a kept one; ``reason`` is short, as in ``kept: norm``.

    ``rule`` is the rule that matched, if one did: what it sets goes before the options of the run. ``codec`` is that of
    the rule or of the run.
    """

    quantize: bool
    reason: str
    k: int | None = None
    rule: TensorRule | None = None
    codec: str = DEFAULT_CODEC

    @property
    def word(self) -> str:
        return "quantized" if self.quantize else "kept"


@dataclass(frozen=True)
class Rule:
    """A pattern on tensor names: a glob over the whole name, or after ``re:`` a regular expression searched in it."""

    pattern: str

    def matches(self, name: str) -> bool:
        if self.pattern.startswith(REGEX_PREFIX):
            return self.search(name) is not None
        return fnmatchcase(name, self.pattern)

    def search(self, name: str) -> re.Match[str] | None:
        """Where a regular expression is found in a name."""
        return _compiled(self.pattern[len(REGEX_PREFIX) :]).search(name)


@dataclass(frozen=True)
class TensorRule(Rule):
    """What to do with the tensors that a pattern matches. What is None is left to the options of the run.

    ``keep`` leaves them as they are; a ``k`` quantizes them whatever the default selection says. Without either, the
    rule only says how: ``scale``, ``codebook`` and ``codec`` as in ``kbitq.quantize`` (``trellis/128`` for a trellis
    whose scales are for 128 columns).
    """

    keep: bool = False
    k: int | None = None
    scale: str | None = None
    codebook: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and self.codec not in codec_names():
            known = ", ".join(codec_names())
            raise SelectionError(f"rule '{self.pattern}': codec must be one of {known}, not {self.codec!r}")
        if self.k is not None:
            check_k(self.k, codec_names() if self.codec is None else (self.codec,), f"rule '{self.pattern}': ")
        if self.scale is not None and self.scale not in SCALE_RULES:
            raise SelectionError(f"rule '{self.pattern}': scale must be {' or '.join(SCALE_RULES)}, not {self.scale!r}")
        if self.keep and (self.k, self.scale, self.codebook, self.codec) != (None, None, None, None):
            raise SelectionError(f"rule '{self.pattern}': a tensor that is kept takes no K, scale, codebook or codec")


def check_k(k: int, codecs: Sequence[str], where: str = "") -> None:
    """Raise SelectionError, which begins with ``where``, for a K that none of the codecs has."""
    found = [get_codec(name).ks for name in codecs]
    if not any(k in ks for ks in found):
        least, most = min(min(ks) for ks in found), max(max(ks) for ks in found)
        of = f" of the codec {codecs[0]}" if len(codecs) == 1 and codecs[0] != DEFAULT_CODEC else ""
        if len(codecs) == 1 and len(found[0]) <= most - least:
            raise SelectionError(f"{where}K = {k} is none{of}, which has {' and '.join(map(str, found[0]))}")
        raise SelectionError(f"{where}K = {k} is outside {least}..{most}{of}")


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise SelectionError(f"pattern '{REGEX_PREFIX}{expression}' is not a regular expression: {error}") from None


@dataclass(frozen=True)
class Selection:
    """The default selection with the user's patterns laid over it.

    ``only`` replaces the default selection, ``include`` adds to it, ``exclude`` takes away and wins. The first of
    ``rules`` that matches a tensor goes before all of them. No pattern can quantize what has no quantized form
    (integers, vectors, empty tensors) or would not shrink.
    """

    k: int
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    only: Sequence[str] = ()
    keep_embeddings: bool = True
    rules: Sequence[TensorRule] = ()
    codec: str = DEFAULT_CODEC
    codecs: Sequence[str] = ()  # that a budget chooses from, where it does

    def __post_init__(self) -> None:
        check_k(self.k, (self.codec,))

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise SelectionError for a pattern that matches none of ``names``."""
        names = list(names)
        given = {o: getattr(self, o) for o in ("include", "exclude", "only")}
        given["rule"] = [rule.pattern for rule in self.rules]
        for option, patterns in given.items():
            for pattern in patterns:
                if not any(map(Rule(pattern).matches, names)):
                    raise SelectionError(
                        f"{option} '{pattern}' matches no tensor",
                        argument=option,
                        hint="kbitq inspect lists the tensor names; globs match a whole name, so try "
                        f"'*{pattern.strip('*')}*'",
                    )

    def verdict(self, name: str, shape: Sequence[int], dtype: str) -> Verdict:
        """The verdict on a tensor; ``dtype`` in safetensors' spelling."""
        rule = next((r for r in self.rules if r.matches(name)), None)
        if rule is not None and rule.keep:
            return Verdict(False, f"rule '{rule.pattern}'", rule=rule)
        pinned = rule is not None and rule.k is not None
        if not pinned and (pattern := _first_match(self.exclude, name)):
            return Verdict(False, f"excluded by '{pattern}'")
        if reason := _no_quantized_form(name, shape, dtype):
            return Verdict(False, reason)
        if rule is not None and rule.k is not None:
            reason = f"rule '{rule.pattern}'"
        elif pattern := _first_match(self.include, name):
            reason = f"included by '{pattern}'"
        elif self.only:
            if not (pattern := _first_match(self.only, name)):
                return Verdict(False, "not matched by --only")
            reason = f"selected by '{pattern}'"
        elif kept := self._kept_by_default(name, shape):
            return Verdict(False, kept)
        else:
            reason = "fused experts" if is_fused_experts(name, shape) else "matrix"
        k = self.k if rule is None or rule.k is None else rule.k
        codec = self._codec_of(rule)
        check_k(k, (codec,), f"{name}: ")
        if not shrinks(name, shape, dtype, k, codec):
            return Verdict(False, "would not shrink")
        return Verdict(True, reason, k, rule, codec)

    def _codec_of(self, rule: TensorRule | None) -> str:
        """That of the rule or of the run; of several, where a rule sets K alone, the last that has this K."""
        if rule is not None and rule.codec is not None:
            return rule.codec
        if rule is None or rule.k is None:
            return self.codec
        return next((codec for codec in reversed(self.codecs) if rule.k in get_codec(codec).ks), self.codec)

    def _kept_by_default(self, name: str, shape: Sequence[int]) -> str | None:
        for reason, belongs in _ROLES:
            if belongs(name) and not (reason == "embedding" and not self.keep_embeddings):
                return reason
        if not name.endswith(".weight") and not is_fused_experts(name, shape):
            return "not a .weight"
        if element_count(shape) < MIN_ELEMENTS:
            return f"fewer than {MIN_ELEMENTS:,} elements"
        return None


def _first_match(patterns: Sequence[str], name: str) -> str | None:
    return next((p for p in patterns if Rule(p).matches(name)), None)


def _owner(name: str) -> str:
    """The component that owns the parameter: ``norm1`` of ``blocks.0.norm1.weight``."""
    return name.split(".")[-2] if "." in name else ""


def _is_norm(name: str) -> bool:
    # Only the owner counts: `norm1.linear.weight` of an adaptive norm is an ordinary, often large, matrix.
    owner = _owner(name).lower()
    return "norm" in owner or re.fullmatch(r"ln(_?[a-z0-9]+)?", owner) is not None


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


def _is_embedding(name: str) -> bool:
    return any("embed" in part.lower() or part in ("wte", "wpe") for part in name.split("."))


def _is_head(name: str) -> bool:
    return any(part in ("lm_head", "score", "classifier") for part in name.split("."))


def _is_router(name: str) -> bool:
    return "router" in name.lower() or _owner(name) in ("gate", "shared_expert_gate")


_ROLES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("norm", _is_norm),
    ("bias", _is_bias),
    ("embedding", _is_embedding),
    ("output head", _is_head),
    ("router", _is_router),
)


def _no_quantized_form(name: str, shape: Sequence[int], dtype: str) -> str | None:
    """Why no option can quantize this tensor, or None. A vector's role says more than its dimensions."""
    kind = stored_dtype(dtype).kind
    if kind == "opaque":
        return f"{dtype} is carried byte for byte"
    if kind != "float":
        return {"int": "integers", "bool": "booleans"}.get(kind, kind)
    if 0 in shape:
        return "has no elements"
    if len(shape) >= 2:
        return None
    if _is_norm(name):
        return "norm"
    if _is_bias(name):
        return "bias"
    return "a vector" if shape else "a scalar"


def shrinks(name: str, shape: Sequence[int], dtype: str, k: int, codec: str = DEFAULT_CODEC) -> bool:
    """Whether a tensor takes fewer bytes at ``k`` bits, codebook included, than as it is."""
    source = tensor_nbytes(dtype, shape)
    return source is not None and coded_nbytes(codec, name, shape, k) + constant_nbytes(codec, name, shape, k) < source
