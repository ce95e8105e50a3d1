"""Formats that do not add up: refused with a sentence that names the tensor, before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.reading import write_folder
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def small(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def gptq() -> Tensors:
    return {
        "a.qweight": words(16, 64), "a.qzeros": words(2, 8), "a.scales": torch.ones(2, 64).half(),
        "a.g_idx": (torch.arange(128) // 64).int(),
    }  # fmt: skip


def awq() -> Tensors:
    return {"a.qweight": words(128, 8), "a.qzeros": words(2, 8), "a.scales": torch.ones(2, 64).half()}


def awq_rows() -> Tensors:
    return {"a.qweight": words(64, 16), "a.qzeros": words(64, 1), "a.scales": torch.ones(64, 8).half()}


def awq_fast() -> Tensors:
    codes = words(16, 64).view(torch.int16)
    return {"a.qweight": codes, "a.qzeros": torch.zeros(8, 64).half(), "a.scales": torch.ones(8, 64).half()}


def awq_config(version: str, group: object = 64) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": version}


def pressed() -> Tensors:
    return {
        "a.weight_packed": words(64, 16), "a.weight_scale": torch.ones(64, 4), "a.weight_zero_point": words(8, 4),
        "a.weight_shape": torch.tensor([64, 128]),
    }  # fmt: skip


def nf4(**changed: Any) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64], **changed}
    return {
        "a.weight": small(2048, 1), "a.weight.absmax": torch.ones(64), "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.quant_state.bitsandbytes__nf4": text(json.dumps(state)),
    }  # fmt: skip


def hqq() -> Tensors:
    return {
        "a.W_q": small(32, 64), "a.scale": torch.ones(64, 1), "a.zero": torch.ones(64, 1), "a.nbits": torch.tensor(4),
        "a.shape": torch.tensor([32, 128]), "a.axis": torch.tensor(1).int(), "a.packing": text("4bit_u8"),
    }  # fmt: skip


def mlx() -> Tensors:
    return {"a.weight": words(64, 16).view(torch.uint32), "a.scales": torch.ones(64, 2), "a.biases": torch.ones(64, 2)}


def hostile(place: Path, tensors: Tensors, config: dict[str, Any] | None = None, **metadata: str) -> None:
    folder = write_folder(place / "m", tensors, config or {}, metadata)
    run(plan_quantize(folder, place / "out", QuantizeOptions(k=3)))


@pytest.mark.parametrize("make", [gptq, awq, pressed, nf4, hqq, mlx])
def test_the_honest_ones_are_read(tmp_path: Path, make: Callable[[], Tensors]) -> None:
    hostile(tmp_path, make())
    assert (tmp_path / "out" / "model.safetensors").is_file()


CASES: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "gptq: a group that there is not": ({**gptq(), "a.g_idx": torch.full((128,), 2).int()}, {}, "a group of columns"),
    "gptq: a negative group": ({**gptq(), "a.g_idx": torch.full((128,), -1).int()}, {}, "a group of columns"),
    "gptq: g_idx too short": ({**gptq(), "a.g_idx": torch.zeros(64).int()}, {}, r"a\.g_idx: its shape \[64\]"),
    "gptq: scales too short": ({**gptq(), "a.scales": torch.ones(3, 64).half()}, {}, r"a\.qzeros: its shape"),
    "gptq: no groups": ({**gptq(), "a.scales": torch.ones(0, 64).half()}, {}, "is not .groups, out."),
    "gptq: 5 bits": ({**gptq(), "a.qzeros": words(2, 10)}, {}, "GPTQ with 5 bits"),
    "gptq: words of floats": ({**gptq(), "a.qweight": torch.ones(16, 64)}, {}, "dtype F32 should be I32"),
    "gptq: another layout": (gptq(), {"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
    "gptq: the weight is there twice": ({**gptq(), "a.weight": torch.ones(64, 128)}, {}, "is there twice"),
    "awq: another layout": (awq(), awq_config("marlin"), "'marlin'"),
    "awq by rows: no group": (awq_rows(), awq_config("gemv", None), "128 columns are not whole groups of None"),
    "awq by rows: a group of 0": (awq_rows(), awq_config("gemv", 0), "not whole groups of 0"),
    "awq by rows: groups that do not divide": (awq_rows(), awq_config("gemv", 48), "not whole groups of 48"),
    "awq by rows: too few scales": (awq_rows(), awq_config("gemv", 8), "no scale for each of the 16 groups"),
    "awq by rows: zeros": ({**awq_rows(), "a.qzeros": words(63, 1)}, awq_config("gemv"), r"a\.qzeros: its shape"),
    "awq by rows: scales": ({**awq_rows(), "a.scales": torch.ones(64, 7).half()}, awq_config("gemv"), "do not fit"),
    "awq by rows: as GEMM stores it": (awq(), awq_config("gemv"), r"a\.qzeros: its shape"),
    "awq by rows: 8 bits": (awq_rows(), {**awq_config("gemv"), "bits": 8}, "AWQ of 8 bits"),
    "awq fast: words": ({**awq_fast(), "a.qweight": words(16, 64)}, awq_config("gemv_fast"), "I32 should be I16"),
    "awq fast: no run": (
        {**awq_fast(), "a.qweight": words(16, 16).view(torch.int16)}, awq_config("gemv_fast", 32), "whole runs of 64",
    ),
    "awq fast: scales": ({**awq_fast(), "a.scales": torch.ones(8, 60).half()}, awq_config("llm-awq"), r"be \[2, 64\]"),
    "awq fast: zeros": (
        {**awq_fast(), "a.qzeros": torch.zeros(7, 64).half()}, awq_config("gemv_fast"), r"a\.qzeros: its shape",
    ),
    "awq: groups that do not divide": ({**awq(), "a.qweight": words(127, 8)}, {}, "do not divide 127"),
    "awq: zeros too short": ({**awq(), "a.qzeros": words(2, 7)}, {}, r"a\.qzeros: its shape"),
    "pressed: another shape": ({**pressed(), "a.weight_shape": torch.tensor([64, 2**40])}, {}, "says a shape"),
    "pressed: no bits fit": ({**pressed(), "a.weight_shape": torch.tensor([64, 32])}, {}, "does not fit a weight"),
    "pressed: scales": ({**pressed(), "a.weight_scale": torch.ones(63, 4)}, {}, "does not fit a weight"),
    "pressed: zeros": ({**pressed(), "a.weight_zero_point": words(8, 3)}, {}, r"a\.weight_zero_point: its shape"),
    "pressed: groups": ({**pressed(), "a.weight_g_idx": torch.full((128,), 9).int()}, {}, "a group of columns"),
    "pressed: sparse": (
        pressed(), {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "sparse weights",
    ),
    "nf4: short": ({**nf4(), "a.weight": small(2047, 1)}, {}, r"2,047 bytes are not those of 4,096 codes"),
    "nf4: scales": ({**nf4(), "a.weight.absmax": torch.ones(63)}, {}, r"absmax: its shape"),
    "nf4: blocks": (nf4(blocksize=3), {}, "are not those of a weight"),
    "nf4: a shape of texts": (nf4(shape=["64", 64]), {}, "are not those of a weight"),
    "nf4: an absurd shape": (nf4(shape=[2**62, 64]), {}, "are not those of"),
    "nf4: no state": ({**nf4(), "a.weight.quant_state.bitsandbytes__nf4": text("[1")}, {}, "a JSON object"),
    "nf4: a long state": ({**nf4(), "a.weight.quant_state.bitsandbytes__nf4": small(1 << 17)}, {}, "far more than"),
    "int8: by columns": (
        {"a.weight": small(64, 64).view(torch.int8), "a.SCB": torch.ones(64), "a.weight_format": small()}, {},
        "only the layout by rows",
    ),
    "hqq: packing": ({**hqq(), "a.packing": text("4bit_i7")}, {}, "'4bit_i7'"),
    "hqq: axis": ({**hqq(), "a.axis": torch.tensor(2).int()}, {}, "axis 2"),
    "hqq: shape": ({**hqq(), "a.shape": torch.tensor([-32, 128])}, {}, "do not fit"),
    "hqq: short": ({**hqq(), "a.W_q": small(31, 64)}, {}, "are not those of a weight"),
    "hqq: quantized scales": ({k: v for k, v in hqq().items() if k != "a.zero"}, {}, "quantized scales"),
    "mlx: groups": ({**mlx(), "a.scales": torch.ones(64, 3), "a.biases": torch.ones(64, 3)}, {}, "do not fit 4 bits"),
    "mlx: bits": (mlx(), {"bits": 9, "group_size": 64}, "says"),
    "mlx: mode": (mlx(), {"mode": "mxfp5"}, "'mxfp5'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    tensors, quantization, message = CASES[case]
    key = "quantization" if case.startswith("mlx") else "quantization_config"
    with pytest.raises(CheckpointError, match=message):
        hostile(tmp_path, tensors, {key: quantization} if quantization else None)
    assert not (tmp_path / "out").exists()


def test_a_type_of_torchao_that_is_not_read(tmp_path: Path) -> None:
    said = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, 32]}})
    tensors = {"a._weight_qdata": words(8, 8), "a._weight_scale_and_zero": torch.ones(8, 2)}
    with pytest.raises(CheckpointError, match="torchao's Int4TilePackedTo4dTensor"):
        hostile(tmp_path, tensors, None, **{"a.weight": said})


def test_a_scheme_that_no_tensor_shows_is_refused(tmp_path: Path) -> None:
    """Nothing is passed over in silence: what is left of a format that is only partly there."""
    tensors = {**gptq(), "b.qweight": words(16, 64), "b.scales": torch.ones(2, 64).half()}
    with pytest.raises(CheckpointError, match="already quantized with AWQ or GPTQ"):
        hostile(tmp_path, tensors)
