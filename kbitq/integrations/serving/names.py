"""Which modules of a folder are quantized, by the names of its tensors or, where those cannot be had, by its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kbitq import format as fmt
from kbitq.codecs.base import part_kinds, part_names


@dataclass(frozen=True)
class StoredNames:
    """What a folder has.

    Attributes:
        codecs: those that its config names.
        quantized: modules with a quantized weight; of fused experts the whole name of the stack.
        kept: modules with an ordinary weight.
        guard: name of the guard tensor, if there is one.
    """

    codecs: tuple[str, ...]
    quantized: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    guard: str | None = None

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
        codecs = tuple(dict.fromkeys(fmt.config_codec(config, name) for name in ("", *config.get("overrides", {}))))
        there = set(names)
        if not there:
            return cls(codecs, kept=frozenset(config.get("modules_to_not_convert") or ()))
        quantized = {stem for codec in codecs for stem in _stems(codec, there)}
        parts = {part for codec in codecs for stem in quantized for part in part_names(codec, stem).values()}
        guards = there & quantized
        plain = {name for name in there - parts - guards if name.endswith(".weight")}
        modules = frozenset(map(fmt.module_name, quantized))
        return cls(codecs, modules, frozenset(map(fmt.module_name, plain)) - modules, min(guards, default=None))

    def renamed(self, rename: Callable[[list[str]], Sequence[str]]) -> StoredNames:
        """The same under the names that a server's model gives to modules."""
        quantized, kept = (frozenset(rename(sorted(names))) for names in (self.quantized, self.kept))
        return replace(self, quantized=quantized, kept=kept)

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
        stem, _, last = module.rpartition(".")
        own = [f"{stem}.{name}" if stem else name for name in fused.get(last, ())]
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


def _stems(codec: str, names: set[str]) -> set[str]:
    """Names of tensors all of whose parts are there."""
    suffixes = list(part_names(codec, "").values())
    first = suffixes[0]
    stems = (name.removesuffix(first) for name in names if name.endswith(first))
    return {stem for stem in stems if all(stem + suffix in names for suffix in suffixes)}
