"""Which modules of a folder are quantized, by the names of its tensors or, where those cannot be had, by its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kbitq import format as fmt
from kbitq.codecs.base import Coding, part_kinds, part_names


@dataclass(frozen=True)
class StoredNames:
    """What a folder has.

    Attributes:
        codecs: those that its config names.
        quantized: modules with a quantized weight; of fused experts the whole name of the stack.
        kept: modules with an ordinary weight.
        guard: name of the guard tensor, if there is one.
        usual: codec and K of quantized modules that ``codings`` does not name.
        codings: those of others, by module.
    """

    codecs: tuple[str, ...]
    quantized: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    guard: str | None = None
    usual: Coding = (fmt.DEFAULT_CODEC, 4)
    codings: Mapping[str, Coding] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str] = ()) -> StoredNames:
        """Sort the names of a folder's tensors.

        Args:
            config: its ``quantization_config``.
            names: of all its tensors; where there are none, the config's ``modules_to_not_convert`` are what is kept.

        Raises:
            FormatError: the config is of a format that this kbitq does not know.
            CodecError: it names a codec that this kbitq does not have.
        """
        fmt.parse_quantization_config(config, fmt.CONFIG_FILE)
        usual = _coding(config, "")
        codings = {name: _coding(config, name) for name in config.get("overrides", {})}
        codecs = tuple(dict.fromkeys(codec for codec, _ in (usual, *codings.values())))
        there = set(names)
        if not there:
            kept = frozenset(config.get("modules_to_not_convert") or ())
            return cls(codecs, kept=kept, usual=usual, codings=codings)
        quantized = {stem for codec in codecs for stem in _stems(codec, there)}
        parts = {part for codec in codecs for stem in quantized for part in part_names(codec, stem).values()}
        guards = there & quantized
        plain = {name for name in there - parts - guards if name.endswith(".weight")}
        modules = frozenset(map(fmt.module_name, quantized))
        kept = frozenset(map(fmt.module_name, plain)) - modules
        return cls(codecs, modules, kept, min(guards, default=None), usual, codings)

    def renamed(self, rename: Callable[[list[str]], Sequence[str]]) -> StoredNames:
        """The same under the names that a server's model gives to modules."""
        quantized, kept = (frozenset(rename(sorted(names))) for names in (self.quantized, self.kept))
        old = list(self.codings)
        new = [[name] for name in rename(old)]
        if len(new) != len(old):  # of some modules the server's model has none
            new = [list(rename([name])) for name in old]
        codings = {name: self.codings[before] for before, after in zip(old, new, strict=True) for name in after}
        return replace(self, quantized=quantized, kept=kept, codings=codings)

    def codings_of(self, modules: Sequence[str]) -> list[Coding | None]:
        """How the config says that modules are coded; None: they are kept."""
        return [None if name in self.kept else self.codings.get(name, self.usual) for name in modules]

    def coding_below(self, module: str) -> Coding:
        """The coding that most of the weights below a module have whose codings are told one by one."""
        below = Counter(coding for name, coding in self.codings.items() if name.startswith(f"{module}."))
        return max(below, key=lambda coding: (below[coding], coding), default=self.usual)

    def part_names(self) -> dict[str, bool]:
        """Part -> whether it is constant, of all codecs of the folder."""
        return {part: constant for codec in self.codecs for part, constant in part_kinds(codec).items()}

    def arriving(self) -> list[tuple[str | None, bool]]:
        """What may arrive of a weight: each part and whether it is constant, and None for an ordinary weight."""
        return [(None, False), *self.part_names().items()]

    def is_quantized(self, module: str, fused: Mapping[str, Sequence[str]]) -> bool | None:
        """Whether a module, or one that it is fused from, is quantized; None if the folder has neither by this name.

        Args:
            module: its name in the server's model.
            fused: by last component of a fused module's name, those of the modules that it takes the place of.
        """
        own = apart(module, fused)
        if any(name in self.quantized for name in (module, *own)):
            return True
        kept = [name in self.kept for name in own]
        if module in self.kept or (any(kept) if self.quantized else kept and all(kept)):
            return False
        return None

    def has_experts(self, module: str) -> bool:
        """Whether experts below a module are quantized, stored one by one or as a stack.

        Where the folder's names are not known they are taken to be, unless the config says that one is kept.
        """
        known = self.quantized or self.kept
        below = any(name.startswith(f"{module}.") for name in known)
        return below if self.quantized else not below


def apart(module: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The modules that one is fused from, as ``is_quantized`` is told of them; none where it is not fused."""
    stem, _, last = module.rpartition(".")
    return [f"{stem}.{name}" if stem else name for name in fused.get(last, ())]


def _coding(config: Mapping[str, Any], module: str) -> Coding:
    overrides = config.get("overrides", {})
    k = {**config, **(overrides.get(module) or {})}.get("k")
    return fmt.config_codec(config, module), k if isinstance(k, int) else 0


def _stems(codec: str, names: set[str]) -> set[str]:
    """Names of tensors all of whose parts are there."""
    suffixes = list(part_names(codec, "").values())
    first = suffixes[0]
    stems = (name.removesuffix(first) for name in names if name.endswith(first))
    return {stem for stem in stems if all(stem + suffix in names for suffix in suffixes)}
