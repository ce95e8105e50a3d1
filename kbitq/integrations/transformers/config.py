"""``KbitqConfig``: how to quantize while loading, or what a quantized folder says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbitq import format as fmt
from kbitq.choose.selection import Selection
from kbitq.codecs.base import Codec, codec_names, get_codec
from kbitq.errors import OptionError

_OPTIONS = ("k", "scale", "codebook", "codec", "include", "exclude", "keep_embeddings", "modules_to_not_convert")
_ELSEWHERE = {
    "bits": "k", "nbits": "k", "n_bits": "k", "num_bits": "k", "w_bit": "k", "weight_bits": "k",
    "ignore": "modules_to_not_convert", "skip_modules": "modules_to_not_convert",
    "llm_int8_skip_modules": "modules_to_not_convert",
}  # fmt: skip
"""What other quantizers call our options."""
_COMMAND_ONLY = ("bpw", "size", "rule", "recipe", "importance", "only")
"""Options of ``kbitq quantize`` that need more than one weight at a time."""
_OF_A_FOLDER = ("format_version", "block_size", "scale_format", "dtype", "overrides", "shapes", "dtypes")


class KbitqConfig(QuantizationConfigMixin):
    """How to quantize while loading, or what a quantized folder says of itself.

    Args:
        k: bits of an index, 2 to 8 for the codec ``planes``.
        scale: ``"mse"`` or ``"absmax"``, as in :func:`kbitq.quantize`.
        codebook: ``"optimal"``, ``"nf"``, ``"fit"`` (fitted to each weight), a file, or 2^k levels.
        include: patterns of weight names to quantize beside the usual ones.
        exclude: patterns of weight names to leave alone.
        keep_embeddings: leave embeddings as they are.
        modules_to_not_convert: names of modules to leave alone, as transformers matches them.
        dequantize: decode a quantized folder while loading it, into an ordinary model.
        codec: how weights are coded, as in :func:`kbitq.quantize`.

    ``stored`` holds the other entries of a folder's ``quantization_config`` (docs/format.md, "Metadata"). One that is
    ``unknown`` is refused.

    Raises:
        OptionError: there is no such option, or it does not take the value.
        CodebookError: the codebook is not 2^k ascending finite levels.
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
        codec: str = fmt.DEFAULT_CODEC,
        **unknown: Any,
    ) -> None:
        for name, value in unknown.items():
            raise OptionError(f"KbitqConfig has no option '{name}': {_instead_of(name, value)}", argument=name)
        self.quant_method: Any = fmt.QUANT_METHOD
        coder = _checked_codec(codec)
        self.codec, self.k = codec, _checked_k(k, coder)
        self.scale, self.codebook = _checked_scale(scale), codebook
        self.include, self.exclude = _checked_names("include", include), _checked_names("exclude", exclude)
        self.keep_embeddings = _checked_switch("keep_embeddings", keep_embeddings)
        skipped = modules_to_not_convert
        self.modules_to_not_convert = (
            None if skipped is None else list(_checked_names("modules_to_not_convert", skipped))
        )
        self.dequantize = _checked_switch("dequantize", dequantize)
        self.stored: dict[str, Any] = {}
        _check_codebook(codebook, k, coder)

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

    def selection(self) -> Selection:
        """Which weights are quantized while loading."""
        return Selection(self.k, self.include, self.exclude, keep_embeddings=self.keep_embeddings, codec=self.codec)

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
        options = {name: getattr(self, name) for name in _OPTIONS}
        if self.codec == fmt.DEFAULT_CODEC:  # as in metadata
            del options["codec"]
        if not isinstance(self.codebook, str):
            levels, _ = get_codec(self.codec).levels(self.codebook, self.k)
            options["codebook"] = None if levels is None else levels.tolist()
        return {"quant_method": self.quant_method, **options}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: a folder's config is written whole."""
        return self.to_dict()

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config given to ``from_pretrained`` changes in that of a folder."""
        return {"dequantize": self.dequantize}


def _instead_of(name: str, value: Any) -> str:
    """What to do, where there is no option of this name."""
    known = (*_OPTIONS, "dequantize")
    if name in _COMMAND_ONLY:
        return _with_the_command(name, value)
    if near := [_ELSEWHERE.get(name.lower())] if name.lower() in _ELSEWHERE else get_close_matches(name, known, 1):
        return f"did you mean '{near[0]}'?"
    return f"it has {', '.join(known[:-1])} and {known[-1]}"


def _with_the_command(option: str, value: Any) -> str:
    return f"run `kbitq quantize --{option} {value}` and load the folder that it writes"


def _checked_codec(codec: Any) -> Codec:
    if codec not in codec_names():
        raise OptionError(f"codec must be one of {', '.join(codec_names())}, not {codec!r}", argument="codec")
    return get_codec(codec)


def _checked_k(k: Any, codec: Codec) -> int:
    if isinstance(k, int) and not isinstance(k, bool) and k in codec.ks:
        return k
    least, most = codec.ks[0], codec.ks[-1]
    whole = f"k must be a whole number from {least} to {most}, not {k!r}"
    between = isinstance(k, float) and least < k < most and not k.is_integer()
    other = f": for an average, {_with_the_command('bpw', k)}" if between else ""
    raise OptionError(whole + other, argument="k")


def _checked_scale(scale: Any) -> str:
    if scale not in fmt.SCALE_RULES:
        raise OptionError(f"scale must be 'mse' or 'absmax', not {scale!r}", argument="scale")
    return str(scale)


def _check_codebook(codebook: Any, k: int, codec: Codec) -> None:
    name = codebook if isinstance(codebook, str) else None
    if name == "fit-shared":
        sentence = f"codebook 'fit-shared' takes many weights at a time: {_with_the_command('codebook', name)}"
        raise OptionError(sentence, argument="codebook")
    if name != "fit":
        codec.levels(codebook, k)


def _checked_names(option: str, names: Any) -> tuple[str, ...]:
    found = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if found is None or not all(isinstance(name, str) for name in found):
        raise OptionError(f"{option} must be a list of strings, not {names!r}", argument=option)
    return found


def _checked_switch(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{option} must be True or False, not {value!r}", argument=option)
    return value
