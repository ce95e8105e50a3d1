"""kbitq: any safetensors checkpoint to 2..8 bits a weight, fast and exact, without calibration data.

The names below are loaded when first used, so that ``import kbitq`` costs nothing and does not import torch.
"""

from __future__ import annotations

import importlib

from kbitq import _moved
from kbitq.integrations import import_hook as _hook

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "QuantizedTensor": "kbitq.quantized",
    "quantize": "kbitq.quantized",
    "dequantize": "kbitq.quantized",
    "load_file": "kbitq.checkpoint",
    "save_file": "kbitq.checkpoint",
    "KbitqConfig": "kbitq.integrations.transformers.config",
    "KbitqError": "kbitq.errors",
    "save_pretrained": "kbitq.integrations.transformers.saving",
}
_SUBMODULES = ("checkpoint", "choose", "codecs", "errors", "eval", "format", "functional", "nn", "ops")

__all__ = [
    "KbitqConfig",
    "KbitqError",
    "QuantizedTensor",
    "__version__",
    "dequantize",
    "load_file",
    "quantize",
    "save_file",
    "save_pretrained",
]

if TYPE_CHECKING:
    from kbitq import checkpoint, choose, codecs, errors, eval, format, functional, nn, ops  # noqa: F401
    from kbitq.checkpoint import load_file, save_file
    from kbitq.errors import KbitqError
    from kbitq.integrations.transformers.config import KbitqConfig
    from kbitq.integrations.transformers.saving import save_pretrained
    from kbitq.quantized import QuantizedTensor, dequantize, quantize


if not TYPE_CHECKING:  # a checker of types knows the names above and no others

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in _SUBMODULES:
            return importlib.import_module(f"kbitq.{name}")
        if (module := _moved.moved(name)) is not None:
            return module
        raise AttributeError(f"module 'kbitq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])


_moved.install()
_hook.install()  # so that transformers, whenever it is imported, knows quant_method "kbitq"
