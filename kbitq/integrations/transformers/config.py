"""``KbitqConfig``: how to quantize while loading, or what a quantized folder says of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbitq import format as fmt
from kbitq.checkpoint.plan.options import QuantizeOptions
from kbitq.choose.recipe import rule_text
from kbitq.choose.selection import TensorRule
from kbitq.on_the_fly.options import OPTIONS, checked_names, checked_switch, levels_of, quantize_options, refuse_unknown

_KNOWN = (*OPTIONS, "modules_to_not_convert", "dequantize")
_ALWAYS = ("k", "scale", "codebook", "include", "exclude", "keep_embeddings", "modules_to_not_convert")
_IF_GIVEN = ("codec", "bpw", "rules", "importance", "calibration")  # what a config says of itself, before quantizing
_OF_A_FOLDER = ("format_version", "block_size", "scale_format", "dtype", "overrides", "shapes", "dtypes")


class KbitqConfig(QuantizationConfigMixin):
    """How to quantize while loading, or what a quantized folder says of itself.

    The options choose and code weights as those of ``kbitq quantize`` do. The defaults need no data.

    Args:
        k: bits of an index, 2 to 8 for the codec ``planes``; 4 where neither it nor ``bpw`` is given.
        scale: ``"mse"`` or ``"absmax"``, as in :func:`kbitq.quantize`.
        codebook: ``"optimal"``, ``"nf"``, ``"fit"`` (fitted to each weight), a file, or 2^k levels.
        include: patterns of weight names to quantize beside the usual ones, as the files have them.
        exclude: patterns of weight names to leave alone.
        keep_embeddings: leave embeddings as they are.
        modules_to_not_convert: names of modules to leave alone, as transformers matches them.
        dequantize: decode a quantized folder while loading it, into an ordinary model.
        codec: how weights are coded, as in :func:`kbitq.quantize`; with ``bpw`` also ``"auto"``.
        scale_block: columns that share a scale, of the codec ``trellis``: 32 or 128.
        bpw: bits per weight, on average, that K is chosen within for each weight: all are measured before the first
            is loaded, as ``kbitq quantize --bpw`` does.
        rules: of K, scale, codebook and codec by name, as the command line has them: ``"*.down_proj.weight=k4"``.
        importance: a file of error weights by column, or a folder of ``kbitq calibrate``.
        calibration: a folder of ``kbitq calibrate``: weights are quantized with error feedback.

    ``stored`` holds the other entries of a folder's ``quantization_config`` (docs/format.md, "Metadata"). One that is
    ``unknown`` is refused.

    Raises:
        OptionError: there is no such option, it does not take the value, or two do not go together.
        SelectionError: a rule is not understood.
        CodebookError: the codebook is not 2^k ascending finite levels.
    """

    def __init__(
        self,
        k: int | None = None,
        scale: str = "mse",
        codebook: Any = "optimal",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        keep_embeddings: bool = True,
        modules_to_not_convert: Sequence[str] | None = None,
        dequantize: bool = False,
        codec: str = fmt.DEFAULT_CODEC,
        scale_block: int | None = None,
        bpw: float | None = None,
        rules: Sequence[str | TensorRule] = (),
        importance: str | os.PathLike[str] | None = None,
        calibration: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("KbitqConfig", unknown, _KNOWN)
        self.quant_method: Any = fmt.QUANT_METHOD
        self.k, self.scale, self.codebook, self.codec, self.scale_block = k, scale, codebook, codec, scale_block
        self.bpw, self.rules, self.importance, self.calibration = bpw, rules, importance, calibration
        self.include, self.exclude, self.keep_embeddings = include, exclude, keep_embeddings
        checked = self.quantize_options()
        self.k, self.codec, self.scale_block = checked.k, checked.codec, None
        self.include, self.exclude = checked.include, checked.exclude
        self.rules = [rule_text(rule) for rule in checked.rules]
        skipped = modules_to_not_convert
        self.modules_to_not_convert = (
            None if skipped is None else list(checked_names("modules_to_not_convert", skipped))
        )
        self.dequantize = checked_switch("dequantize", dequantize)
        self.stored: dict[str, Any] = {}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> KbitqConfig | tuple[KbitqConfig, dict[str, Any]]:
        """A config from what a folder says of itself, whose unknown entries are ignored, or from options, which must
        all be known. transformers calls it for both.

        Args:
            config_dict: of a ``quantization_config``, or options by name.
            return_unused_kwargs: return a pair; the second is what of ``kwargs`` is no option.
            kwargs: options that win over those of ``config_dict``.

        Raises:
            FormatError: the folder's format is not known to this version. OptionError: as of the class.
        """
        given = {name: value for name, value in config_dict.items() if name != "quant_method"}
        if any(name in given for name in _OF_A_FOLDER):
            fmt.parse_quantization_config({"quant_method": fmt.QUANT_METHOD, **given}, fmt.CONFIG_FILE)
            own = {name: given.pop(name) for name in ("k", "modules_to_not_convert", "dequantize") if name in given}
            made = cls(**own, codec=fmt.coding_of(given, fmt.CONFIG_FILE))
            made.stored = given
        else:
            made = cls(**given)
        unused = made.update(**kwargs)
        return (made, unused) if return_unused_kwargs else made

    def quantize_options(self) -> QuantizeOptions:
        """What ``kbitq quantize`` would be told. Raises as the class does."""
        return quantize_options(**{name: getattr(self, name) for name in OPTIONS})

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
        options = {name: getattr(self, name) for name in (*_ALWAYS, *_IF_GIVEN)}
        for name in _IF_GIVEN:
            if options[name] in (None, [], fmt.DEFAULT_CODEC):
                del options[name]
        if not isinstance(self.codebook, str):
            given = isinstance(self.codebook, os.PathLike)
            options["codebook"] = os.fspath(self.codebook) if given else list(levels_of(self.codebook))
        return {"quant_method": self.quant_method, **options}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: a folder's config is written whole."""
        return self.to_dict()

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config given to ``from_pretrained`` changes in that of a folder."""
        return {"dequantize": self.dequantize}
