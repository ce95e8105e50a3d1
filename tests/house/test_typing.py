"""The types that kbitq promises (py.typed): a program that uses its documented names passes, wrong calls do not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed: pip install 'kbitq[lint]'")

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
from pathlib import Path

import kbitq
import torch
from kbitq.checkpoint import (
    Progress, QuantizeOptions, RunReport, choose, dequantize_checkpoint, estimate, inspect, plan_quantize, plan_recipe,
    run, verify, write_recipe,
)
from kbitq.choose.knapsack import Budget
from kbitq.errors import CheckpointError
from kbitq.functional import decode_absmax_e4m4, encode_absmax_e4m4
from kbitq.nn import KbitLinear, replace_linears

q: kbitq.QuantizedTensor = kbitq.quantize(torch.randn(64, 64), 4, scale="mse", codebook="optimal")
bits: float = q.bits_per_weight
w: torch.Tensor = kbitq.dequantize(q, torch.float32)
packed: torch.Tensor = q.cpu().packed
tensors = kbitq.load_file(Path("model.safetensors"))
for name, tensor in tensors.items():
    plain: torch.Tensor = tensor.dequantize() if isinstance(tensor, kbitq.QuantizedTensor) else tensor
kbitq.save_file({"layer.weight": q, "layer.bias": w}, "layer.safetensors")
kbitq.save_pretrained(torch.nn.Linear(2, 2), "folder")
version: str = kbitq.__version__


def show(progress: Progress) -> None:
    print(progress)


try:
    plan = choose(plan_quantize("model/", None, QuantizeOptions(budget=Budget(bpw=3.5), codebook="fit")))
    fits: bool = estimate(plan).fits
    report: RunReport = run(plan, show)
    recipe: str = plan_recipe(plan)
    write_recipe(plan, Path("recipe.toml"))
    rows = [row["name"] for row in inspect(report.out, against="model/").tensors]
    restored: Path = dequantize_checkpoint(report.out, "restored/").out
    fine: bool = verify(report.out).ok
except CheckpointError as error:
    print(error, error.hint)
except kbitq.KbitqError:
    raise
layer: KbitLinear = KbitLinear.from_linear(torch.nn.Linear(64, 64), k=3)
y: torch.Tensor = layer(torch.randn(1, 64))
reasons: dict[str, str] = replace_linears(torch.nn.Sequential(layer), 4, exclude=["*.down_proj.weight"])
scales: torch.Tensor = decode_absmax_e4m4(encode_absmax_e4m4(torch.ones(4)))
config = kbitq.KbitqConfig(k=3)
"""

WRONG = """
import kbitq
import torch
from kbitq.checkpoint import QuantizeOptions, plan_quantize

kbitq.quantize(torch.randn(2, 2), "4")  # line 6
kbitq.dequantize(torch.randn(2, 2))  # line 7
kbitq.quantise  # line 8
plan_quantize("model/", None, 3)  # line 9
QuantizeOptions(bits=3)  # line 10
size: int = kbitq.quantize(torch.randn(2, 2), 4).bits_per_weight  # line 11
"""


@pytest.mark.slow
def test_a_program_that_uses_kbitq_is_checked(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    cache = ROOT / ".mypy_cache"
    # With `make lint`'s options, so that what that run found out about torch, a minute's work, is not found out again.
    command = [
        sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={cache}",
        "--no-error-summary", "right.py", "wrong.py",
    ]  # fmt: skip
    environment = {"PATH": "", "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if not line.startswith("wrong.py:")] == []
    assert {int(re.split(":", line)[1]) for line in errors} == set(range(6, 12)), done.stdout


def test_the_marker_of_types_is_in_the_package() -> None:
    import kbitq

    assert (Path(kbitq.__file__).parent / "py.typed").exists()
