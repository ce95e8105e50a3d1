"""What vLLM is asked for and quantized folders cannot do: a sentence while the layers are made."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: `make test-vllm` makes an environment that has it")
pytestmark = [pytest.mark.slow, pytest.mark.vllm]  # its import takes half a minute


def server(load_format: str = "auto", eplb: bool = False, lora: tuple[str, ...] | None = ()) -> Any:
    """Its config; ``lora``: the modules that get it, None: all, (): LoRA is off."""
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(enable_eplb=eplb),
        lora_config=None if lora == () else SimpleNamespace(target_modules=lora),
    )


def test_load_formats() -> None:
    from kbitq.integrations.vllm import config

    assert [config._is_dummy(server(name)) for name in ("auto", "safetensors", "dummy")] == [False, False, True]
    for name in ("sharded_state", "tensorizer"):
        with pytest.raises(ValueError, match=f"load format {name}: it is for weights as vLLM has prepared"):
            config._is_dummy(server(name))


def test_experts() -> None:
    from kbitq.integrations.vllm import config

    for taken in (server(), server(lora=("q_proj",))):
        config._check_experts("model.layers.0.mlp.experts", taken)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: quantized experts stay on the device that loaded"):
        config._check_experts("model.layers.0.mlp.experts", server(eplb=True))
    for lora in (None, ("experts",)):
        with pytest.raises(ValueError, match=r"vLLM adds LoRA to experts .* give lora_target_modules without the"):
            config._check_experts("model.layers.0.mlp.experts", server(lora=lora))
