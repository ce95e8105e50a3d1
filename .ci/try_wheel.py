"""Is the installed kbitq a whole one? Run by the Python it is installed for, from a folder without the sources.

python try_wheel.py [--cuda]    --cuda: the CUDA code must be in it (no GPU is needed)
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import save_file

import kbitq
from kbitq import _C

place = pathlib.Path(kbitq.__file__).parent
assert place.is_relative_to(sys.prefix), f"{place} is not in {sys.prefix}"
assert (place / "py.typed").exists(), "py.typed is not in the wheel"
assert importlib.metadata.version("kbitq") == kbitq.__version__
assert _C.has_cuda or "--cuda" not in sys.argv, f"the CUDA code is missing: {_C.cuda_status()}"

w = torch.randn(64, 512)
q = kbitq.quantize(w, 4)
error = float((w - kbitq.dequantize(q)).square().mean() / w.square().mean())
assert error < 0.01, error

with tempfile.TemporaryDirectory() as folder:
    program = [sys.executable, "-m", "kbitq.cli.main"]
    save_file({"layers.0.up.weight": w}, pathlib.Path(folder) / "m.safetensors")
    for command in (["env"], ["quantize", "m.safetensors", "--k", "3", "-q"], ["verify", "m-kbitq-k3.safetensors"]):
        subprocess.run([*program, *command], cwd=folder, check=True)
print(f"{place}: {q.bits_per_weight:.2f} bits per weight, relative error {error:.4f}, CUDA: {_C.has_cuda}")
