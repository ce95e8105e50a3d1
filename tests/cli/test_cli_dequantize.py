"""``kbitq dequantize``: an ordinary checkpoint again."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from helpers.program import Kbitq, tiny_tensors


def test_round_trip(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    out = tiny.with_name("restored.safetensors")
    code, said, err = kbitq("dequantize", tiny_k3, "-o", out)
    assert (code, err) == (0, "")
    assert "2 dequantized, 8 copied" in said
    assert said.splitlines()[-1] == str(out)
    source, restored = tiny_tensors(), load_file(out)
    assert set(restored) == set(source)
    for name, tensor in source.items():
        assert (restored[name].dtype, restored[name].shape) == (tensor.dtype, tensor.shape)
        if "up_proj.weight" in name:
            noise = np.sum((restored[name] - tensor) ** 2) / np.sum(tensor**2)
            assert 15 < -10 * np.log10(noise) < 17
        else:
            np.testing.assert_array_equal(restored[name], tensor)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_dtype(dtype: str, stored: str, kbitq: Kbitq, tiny_k3: Path) -> None:
    out = tiny_k3.with_name("restored.safetensors")
    assert kbitq("dequantize", tiny_k3, "-o", out, "--dtype", dtype).code == 0
    with safe_open(out, "np") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == stored


def test_json_and_quiet(kbitq: Kbitq, tiny_k3: Path) -> None:
    out = tiny_k3.with_name("restored.safetensors")
    report = json.loads(kbitq("dequantize", tiny_k3, "-o", out, "--json").out)
    assert report["out"] == str(out)
    assert report["totals"]["quantized"] == 2
    assert kbitq("dequantize", tiny_k3, "-o", out, "--quiet", "--force") == (0, f"{out}\n", "")
