"""Runs a function once a module has been imported, by whomever and whenever. Little of the standard library: it runs at
each import of kbitq, and the sooner that is done, the sooner the program hears signals.

transformers has no entry point for quantizers, and importing it takes seconds, so kbitq waits for others to do so.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any
else:  # the import system asks for methods, not for classes; this module is imported by each use of kbitq
    Loader = MetaPathFinder = object

TRANSFORMERS_REGISTRY = "transformers.quantizers.auto"
"""The module of transformers that holds the tables of quantizers."""


class _AfterImport(MetaPathFinder):
    """A finder that finds nothing itself: the others find ``name``, and ``action`` runs once, after the module's code.

    It leaves ``sys.meta_path`` as soon as the module was imported.
    """

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
                spec.loader = _LoadThenAct(spec.loader, self)
                return spec
        return None

    def finish(self) -> None:
        """The module was imported: leave, then act."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.action()


class _LoadThenAct(Loader):
    """Stands before a module's own loader until the module's code runs, and is gone after."""

    def __init__(self, loader: Loader, finder: _AfterImport) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.finish()

    def __getattr__(self, name: str) -> Any:  # a loader may be asked for the source without importing
        return getattr(self._loader, name)


def after_import(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` as soon as module ``name`` is imported: now, if it is already. Only the first action waits."""
    if name in sys.modules:
        action()
    elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, action))


def _register_with_transformers() -> None:
    """Import the module that registers itself. A failure is a warning: it must not break other uses of transformers."""
    try:
        importlib.import_module("kbitq.integrations.transformers.quantizer")
    except Exception as error:
        import warnings

        from kbitq.errors import KbitqError

        reason = str(error) if isinstance(error, KbitqError) else repr(error)
        warnings.warn(f"kbitq could not register itself with transformers: {reason}", stacklevel=2)


def install() -> None:
    """Called by ``import kbitq``."""
    after_import(TRANSFORMERS_REGISTRY, _register_with_transformers)
