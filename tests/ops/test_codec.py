"""The torch ops: registration (opcheck), graphs that see through them (compile, export), arguments that are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kbitq import format as fmt
from kbitq import ops
from kbitq._core import core
from kbitq.codecs import codebooks


@pytest.fixture
def matrix(device: str) -> torch.Tensor:
    return torch.randn(6, 70, generator=torch.Generator().manual_seed(3)).to(device)


@pytest.fixture
def levels(device: str) -> torch.Tensor:
    return torch.as_tensor(codebooks.nf(3)).to(device)


def triple(matrix: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ops.quantize(matrix, levels, amax=ops.scan(matrix)[0])


def test_opcheck(matrix: torch.Tensor, levels: torch.Tensor) -> None:
    amax, _ = ops.scan(matrix)
    packed, absmax, codebook = triple(matrix, levels)
    kbitq_ops = torch.ops.kbitq
    for op, args in (
        (kbitq_ops.scan.default, (matrix,)),
        (kbitq_ops.quantize.default, (matrix, levels, amax, None, "mse")),
        (kbitq_ops.quantize.default, (matrix.bfloat16(), levels, amax, torch.rand(2, 70).to(matrix.device), "mse")),
        (kbitq_ops.dequantize.default, (packed, absmax, codebook, 70, torch.bfloat16)),
        (kbitq_ops.stats.default, (matrix, packed, absmax, codebook)),
    ):
        torch.library.opcheck(op, args)


def round_trip(w: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    amax, _status = ops.scan(w * 2)
    packed, absmax, codebook = ops.quantize(w * 2, levels, amax=amax)
    return ops.dequantize(packed, absmax, codebook, w.shape[1]) / 2


def test_compile_sees_through(matrix: torch.Tensor, levels: torch.Tensor) -> None:
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(matrix, levels), round_trip(matrix, levels))


def test_export_sees_through(matrix: torch.Tensor, levels: torch.Tensor) -> None:
    class RoundTrip(torch.nn.Module):
        def forward(self, w: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
            return round_trip(w, levels)

    program = torch.export.export(RoundTrip(), (matrix, levels))
    assert torch.equal(program.module()(matrix, levels), round_trip(matrix, levels))


def test_fake_shapes_are_the_real_ones(matrix: torch.Tensor, levels: torch.Tensor) -> None:
    real = triple(matrix, levels)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = triple(mode.from_tensor(matrix), mode.from_tensor(levels))
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_into_the_callers_buffers(matrix: torch.Tensor, levels: torch.Tensor) -> None:
    amax, _ = ops.scan(matrix)
    packed, absmax, codebook = triple(matrix, levels)
    into = [torch.full_like(t, 77) for t in (packed, absmax, codebook)]
    ops.quantize_into(matrix, levels, *into, amax=amax)
    assert all(torch.equal(a, b) for a, b in zip(into, (packed, absmax, codebook), strict=True))
    out = torch.full_like(matrix, torch.nan)
    assert ops.dequantize(packed, absmax, codebook, 70, out=out) is out
    assert torch.equal(out, ops.dequantize(packed, absmax, codebook, 70))


def wrong_arguments() -> list[tuple[str, dict[str, object], str]]:
    return [
        ("rank", {"w": torch.zeros(64)}, "w: must have 2 dimensions, got 1"),
        ("integer", {"w": torch.zeros(2, 64, dtype=torch.int32)}, "w: must be float32, bfloat16 or float16, got int32"),
        ("strided", {"w": torch.zeros(64, 2).t()}, "w: must be contiguous"),
        ("levels", {"levels": torch.zeros(9)}, "levels"),
        ("double", {"levels": torch.zeros(8, dtype=torch.float64)}, "levels: must be float32, got float64"),
        ("packed", {"packed": torch.zeros(2, 5, dtype=torch.int32)}, "packed: has size 5 in dimension 1, needs 6"),
        ("absmax", {"absmax": torch.zeros(2, 2, dtype=torch.int8)}, "absmax: must be uint8, got another type"),
        ("codebook", {"codebook": torch.zeros(12)}, "codebook: has 12 levels, needs 2\\^K with K from 2 to 8"),
        ("amax", {"amax": None}, "codebook: goes with amax"),
        ("importance", {"importance": torch.zeros(2, 63)}, "importance: has size 63 in dimension 1, needs 64"),
        ("groups", {"importance": torch.zeros(3, 64)}, "importance: its rows must divide"),
        (
            "scale",
            {"scale": "median"},
            r"scale: must be 'absmax' or 'mse' \(of the trellis, 'given' too\), got 'median'",
        ),
        ("not a tensor", {"w": [1.0]}, "w: a tensor is needed"),
    ]


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=i) for i, c, m in wrong_arguments()])
def test_the_core_names_the_argument_that_is_wrong(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "w": torch.zeros(2, 64),
        "levels": torch.as_tensor(codebooks.nf(3)),
        "amax": torch.ones(1),
        "importance": None,
        "packed": torch.zeros(2, 6, dtype=torch.int32),
        "absmax": torch.zeros(2, 2, dtype=torch.uint8),
        "codebook": torch.zeros(8),
        "scale": "mse",
    }
    core.quantize(**arguments)  # as it stands it is right
    with pytest.raises((ValueError, TypeError), match=message):
        core.quantize(**{**arguments, **change})


def test_devices_must_agree() -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA: torch sees no GPU")
    with pytest.raises(ValueError, match="levels: is on the CPU, the other arguments are on cuda:0"):
        w = torch.zeros(2, 64, device="cuda")
        ops.quantize(w, torch.as_tensor(codebooks.nf(3)), amax=torch.ones(1, device="cuda"))


def test_importance_is_scaled_by_a_power_of_two() -> None:
    for largest in (1e-40, 3.0, 1.0, 1.999, 2.0, 1e38):
        weights = torch.tensor([0.0, largest / 3, largest])
        scaled = ops.prepare_importance(weights)
        assert scaled.shape == (1, 3)
        assert 1 <= scaled.max() < 2
        ratio = scaled[0, 2].double() / weights[2].double()
        assert torch.frexp(ratio)[0] == 0.5
    for bad in (torch.tensor([-1.0]), torch.tensor([torch.nan]), torch.tensor([torch.inf]), torch.zeros(1, 1, 1)):
        with pytest.raises(ValueError, match="importance"):
            ops.prepare_importance(bad)


def test_an_empty_matrix_is_no_work() -> None:
    amax, status = ops.scan(torch.zeros(0, 5))
    assert (amax.item(), status.tolist()) == (0.0, [0, -1])
    out = ops.dequantize(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.uint8), torch.zeros(8), 5)
    assert out.shape == (0, 5)
    assert fmt.block_count(5) == 1


@pytest.mark.slow
def test_the_first_call_does_not_import_the_compiler() -> None:
    """``torch.library.custom_op`` would: some seconds at the start of every command."""
    program = "import sys, torch, kbitq.ops as ops; ops.scan(torch.ones(2, 3)); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
