"""What servers ask of a quantized folder's config, whatever the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kbitq.format import QUANT_METHOD
from kbitq.integrations.serving.names import StoredNames

if TYPE_CHECKING:
    from typing_extensions import Self


class ServedConfig:
    """A folder that kbitq wrote. It stands before a server's own class of configs, whose questions it answers.

    Args:
        config: its ``quantization_config``.

    Raises:
        FormatError: the config is of a format that this kbitq does not know.
        CodecError: it names a codec that this kbitq does not have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.stored = StoredNames.of(config)

    @classmethod
    def get_name(cls) -> str:
        """``kbitq``."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those that the operators multiply in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU: 8.0, for which kbitq has fused kernels."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it stands in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """From the ``quantization_config`` of config.json."""
        return cls(config)
