"""The modules that stood elsewhere before version 0.2, under their old names: importable still, with a warning.

An alias costs nothing until a name is asked of it, and then it is the module that replaced it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

MOVED = {
    "budget": "choose.knapsack",
    "codebooks": "codecs.codebooks",
    "evaluate": "eval.perplexity",
    "fit": "codecs.fit",
    "generate": "eval.generation",
    "gpu_linear": "ops.tiled_linear",
    "importance": "choose.importance",
    "linear_op": "ops.linear",
    "recipe": "choose.recipe",
    "reference": "codecs.reference",
    "roles": "choose.tensor_names",
    "selection": "choose.selection",
}
"""Old name -> new name, both within ``kbitq``."""


class _Alias(ModuleType):
    """A module that stands for another one."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Moved to ``{new}``.")
        self._new = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import machinery and inspection ask for: nobody uses the module yet
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        warnings.warn(f"{self.__name__} is now {self._new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(self._new), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._new))


def install() -> None:
    """Called by ``import kbitq``: the old names are found in ``sys.modules``."""
    for old, new in MOVED.items():
        sys.modules.setdefault(f"kbitq.{old}", _Alias(f"kbitq.{old}", f"kbitq.{new}"))


def moved(name: str) -> ModuleType | None:
    """The alias for ``kbitq.name``, or None if nothing of that name has moved."""
    return sys.modules[f"kbitq.{name}"] if name in MOVED else None
