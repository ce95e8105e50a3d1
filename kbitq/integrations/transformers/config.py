"""``KbitqConfig``: how to quantize while loading, or what a quantized folder says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbitq import format as fmt
from kbitq.choose.selection import Selection


class KbitqConfig(QuantizationConfigMixin):
    """How to quantize while loading, or what a quantized folder says of itself.

    Args:
        k: bits of an index, 2 to 8 (of a folder: the most common one).
        scale: ``"mse"`` or ``"absmax"``, as in :func:`kbitq.quantize`.
        codebook: ``"optimal"``, ``"nf"`` or a file.
        include: patterns of weight names to quantize beside the usual ones.
        exclude: patterns of weight names to leave alone.
        keep_embeddings: leave embeddings as they are.
        modules_to_not_convert: names of modules to leave alone, as transformers matches them.
        dequantize: decode a quantized folder while loading it, into an ordinary model.
        stored: the other entries of a folder's ``quantization_config`` (docs/format.md section 2).

    Raises:
        KbitqError: k is out of range, or the folder's format is not known to this version.
    """

    def __init__(
        self,
        k: int = 4,
        scale: str = "mse",
        codebook: Any = "optimal",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        keep_embeddings: bool = True,
        modules_to_not_convert: Sequence[str] | None = None,
        dequantize: bool = False,
        **stored: Any,
    ) -> None:
        stored.pop("quant_method", None)
        if "format_version" in stored:
            fmt.parse_quantization_config({"quant_method": fmt.QUANT_METHOD, **stored}, "config.json")
        self.quant_method: Any = fmt.QUANT_METHOD
        self.k, self.scale, self.codebook = k, scale, codebook
        self.include, self.exclude, self.keep_embeddings = tuple(include), tuple(exclude), keep_embeddings
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.dequantize = dequantize
        self.stored = stored
        self.selection()

    def selection(self) -> Selection:
        """Which weights are quantized while loading."""
        return Selection(self.k, self.include, self.exclude, keep_embeddings=self.keep_embeddings)

    def update_stored(self, config: dict[str, Any]) -> None:
        """Take over what :func:`kbitq.format.build_quantization_config` says of a quantized model."""
        self.k, self.modules_to_not_convert = config["k"], config["modules_to_not_convert"]
        self.stored = {n: v for n, v in config.items() if n not in ("quant_method", "k", "modules_to_not_convert")}

    def to_dict(self) -> dict[str, Any]:
        """Of a quantized model: what docs/format.md says. Before: the options."""
        if self.stored:
            tail = (
                {} if self.modules_to_not_convert is None else {"modules_to_not_convert": self.modules_to_not_convert}
            )
            return {"quant_method": self.quant_method, "k": self.k, **self.stored, **tail}
        options = ("k", "scale", "codebook", "include", "exclude", "keep_embeddings", "modules_to_not_convert")
        return {"quant_method": self.quant_method, **{name: getattr(self, name) for name in options}}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: a folder's config is written whole."""
        return self.to_dict()

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config given to ``from_pretrained`` changes in that of a folder."""
        return {"dequantize": self.dequantize}
