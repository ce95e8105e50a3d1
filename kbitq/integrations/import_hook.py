"""Calls a function once a module has been imported, by whomever and whenever. Standard library only: it runs at import.

transformers has no entry point for quantizers, and importing it takes seconds, so kbitq waits for others to do so.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

TRANSFORMERS_REGISTRY = "transformers.quantizers.auto"
"""The module of transformers that holds the tables of quantizers."""

PEFT_LORA = "peft.tuners.lora"
"""The package of PEFT that holds LoRA's config and layers."""


class _AfterImport:
    """A finder that finds nothing itself: it lets the others find ``name`` and has ``action`` run after its code."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                self._extend(spec)
                return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        loader, action = spec.loader, self.action
        run = loader.exec_module  # type: ignore[union-attr]

        def run_and_act(module: ModuleType) -> None:
            run(module)
            action()

        loader.exec_module = run_and_act  # type: ignore[union-attr, method-assign]


def after_import(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` as soon as module ``name`` is imported: now, if it is already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


def _register(library: str, module: str) -> None:
    """Make kbitq known to a library. A failure is a warning: it must not break what has nothing to do with kbitq."""
    try:
        importlib.import_module(f"kbitq.integrations.{module}").register()
    except Exception as error:
        warnings.warn(f"kbitq could not register itself with {library}: {error!r}", stacklevel=2)


def install() -> None:
    """Called by ``import kbitq``."""
    after_import(TRANSFORMERS_REGISTRY, partial(_register, "transformers", "transformers.quantizer"))
    after_import(PEFT_LORA, partial(_register, "peft", "peft"))
