"""transformers: ``quant_method: kbitq``. Registered by ``import kbitq``, before or after transformers is imported.

import kbitq
model = AutoModelForCausalLM.from_pretrained("model-kbitq-k3")                        # a folder of kbitq quantize
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=kbitq.KbitqConfig(k=3))   # on the fly
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from kbitq import format as fmt
from kbitq.codecs.base import get_codec, part_kinds, part_name
from kbitq.errors import FormatError, KbitqError, OptionError
from kbitq.integrations.transformers.config import KbitqConfig
from kbitq.integrations.transformers.manifest import DTYPES, Manifest, read_manifest
from kbitq.nn import dequantize_modules, tile_weights
from kbitq.nn.packed import PackedModule

OLDEST_TRANSFORMERS = "5.17"  # as in pyproject.toml


class KbitqHfQuantizer(HfQuantizer):
    """Carries a model through transformers' loader; made by it."""

    requires_calibration = False
    quantization_config: KbitqConfig

    def __init__(self, quantization_config: KbitqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.manifest = Manifest()
        self._routes: Any = None
        self._decided: Any = None
        self._dtype: torch.dtype | None = None

    # -- before loading --------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        devices = kwargs.get("device_map")
        wanted = devices.values() if isinstance(devices, dict) else [devices]
        if any("mps" in str(device) for device in wanted):
            raise KbitqError("kbitq computes on CPUs and CUDA devices, not on 'mps': give device_map='cpu'")
        if self.quantization_config.dequantize and not self.pre_quantized:
            raise OptionError(
                "dequantize=True is for a folder that kbitq has quantized, which this is not: leave it away",
                argument="dequantize",
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        return self._as_read(config)

    def update_tp_plan(self, config: Any) -> Any:  # transformers 5.17 has this one and not the one above
        return self._as_read(config)

    def _as_read(self, config: Any) -> Any:
        """Without the guard that stops others. Where a folder's config has no dtype, transformers would take that of
        the float32 codebooks."""
        stored = self.quantization_config.stored
        dtype = DTYPES.get(stored.get("dtype", ""))
        if getattr(config, "dtype", None) is None and dtype is not None:
            config.dtype = dtype
        if fmt.is_guard(getattr(config, fmt.GUARD_KEY, None)):
            delattr(config, fmt.GUARD_KEY)
            if fmt.GUARD_KEY in stored:
                setattr(config, fmt.GUARD_KEY, stored[fmt.GUARD_KEY])
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files")
        if not self.pre_quantized:
            from kbitq.integrations.transformers.on_the_fly import OnTheFly

            self._decided = OnTheFly(model, files, self.quantization_config)
            return
        from kbitq.integrations.transformers import routes
        from kbitq.integrations.transformers.conversions import GUARD_ROUTE

        if files and not all(str(file).endswith(".safetensors") for file in files):
            raise FormatError(f"{files[0]} is not a safetensors file, and kbitq reads no other")
        config = self.quantization_config
        self.manifest = read_manifest(files, config.stored) if files else _expected(model, config)
        self._routes = routes.find_routes(model, self.manifest, decode=config.dequantize)
        routes.pack_model(model, self._routes, self.manifest)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {GUARD_ROUTE}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        from kbitq.integrations.transformers import routes

        if self.pre_quantized and self._routes is not None:
            return routes.conversions(self._routes, self.manifest, weight_conversions)
        return weight_conversions

    # -- on the fly ------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._decided is not None and self._decided.quantizes(param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return self._decided.bits(param_name) / 8
        return param.element_size()

    def get_quantize_ops(self) -> Any:
        from kbitq.integrations.transformers.on_the_fly import QuantizeOnLoad

        return QuantizeOnLoad(self._decided)

    # -- after loading ---------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from kbitq.integrations.transformers import packed_model, routes, saving

        used = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = routes.conversions_for_saving(used)
        _freeze(model)
        if self.pre_quantized:
            _check_constants(model)
            routes.describe(model, self._routes, self.manifest)
        else:
            self.manifest = saving.finish_on_the_fly(model, self._decided.decisions.described, self._decided.kept())
        if not hasattr(HfQuantizer, "get_new_dtype") and self._dtype is not None:
            _cast_plain(model, self._dtype)
        if not self.quantization_config.dequantize:
            model.kbitq_manifest = self.manifest
        packed_model.mark_packed(model)
        tile_weights(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        from kbitq.integrations.transformers import packed_model

        dequantize_modules(model, dtype)
        packed_model.mark_ordinary(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        from kbitq.integrations.transformers import saving

        return saving.state_for_transformers(model, self.quantization_config)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _expected(model: Any, config: KbitqConfig) -> Manifest:
    """What a folder should hold by its config, for tensors that come without files (a ``state_dict``)."""
    manifest = Manifest()
    skipped = config.modules_to_not_convert or []
    stored = config.stored
    for prefix, module in model.named_modules():
        if type(module) in (torch.nn.Linear, torch.nn.Embedding) and prefix not in skipped:
            name = f"{prefix}.weight"
            k = stored.get("overrides", {}).get(prefix, {}).get("k", config.k)
            dtype = stored.get("dtypes", {}).get(name, stored.get("dtype", "F32"))
            codec, shape = fmt.config_codec(stored, name), tuple(module.weight.shape)
            manifest.quantized[name] = fmt.TensorMeta(k, shape, dtype, "unknown", "unknown", codec=codec)
    return manifest


def _coded_weights(model: torch.nn.Module) -> Iterator[tuple[str, str, dict[str, torch.nn.Parameter]]]:
    """(name, codec, parts) of every packed weight."""
    for prefix, module in model.named_modules():
        if isinstance(module, PackedModule):
            for leaf in module.packed_names():
                yield f"{prefix}.{leaf}", module.codec_of(leaf), module.parts_of(leaf)


def _freeze(model: torch.nn.Module) -> None:
    """transformers gives every loaded float tensor a gradient."""
    for _, _, parts in _coded_weights(model):
        for parameter in parts.values():
            parameter.requires_grad_(False)


def _check_constants(model: torch.nn.Module) -> None:
    for name, codec, parts in _coded_weights(model):
        for part, constant in part_kinds(codec).items():
            if constant and parts[part].device.type != "meta":
                get_codec(codec).check({part: parts[part]}, f"tensor {part_name(name, part)}")


def _cast_plain(model: Any, dtype: torch.dtype) -> None:
    """transformers 5.17 leaves renamed tensors of a quantized file in the file's dtype."""
    kept = list(model._get_dtype_plan(dtype))
    coded = {id(parameter) for _, _, parts in _coded_weights(model) for parameter in parts.values()}
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and id(parameter) not in coded
        if plain and not any(re.search(pattern, name) for pattern in kept):
            parameter.data = parameter.data.to(dtype)


def _register() -> None:
    """Enter the config and the quantizer into transformers' three tables."""
    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        found = f"transformers {transformers.__version__} is too old for kbitq"
        raise KbitqError(f"{found}: pip install 'transformers>={OLDEST_TRANSFORMERS}'")
    if fmt.QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:  # this module is loaded again
        return
    auto.register_quantization_config(fmt.QUANT_METHOD)(KbitqConfig)
    auto.register_quantizer(fmt.QUANT_METHOD)(KbitqHfQuantizer)
    known: Any = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*known, KbitqConfig)  # so that dequantize=True counts for a folder


# By importing this module, as transformers' own decorators would: whoever comes first, the import hook or a user, the
# entries are made once, and after the classes.
_register()
