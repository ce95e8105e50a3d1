"""One tensor from Python: quantize, see what it cost, use it, save it beside ordinary tensors."""

import tempfile
from pathlib import Path

import torch

import kbitq


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1024, 4096, dtype=torch.bfloat16)

    for k in (2, 3, 4, 5):
        q = kbitq.quantize(weight, k)
        print(f"K={k}  {q.bits_per_weight:.2f} bits a weight  {q.nbytes:9,d} bytes  SQNR {q.sqnr_db:5.2f} dB")

    q = kbitq.quantize(weight, 4)
    x = torch.randn(2, 4096, dtype=torch.bfloat16)
    exact, approximate = x @ weight.T, x @ kbitq.dequantize(q).T
    print(f"x @ W.T moves by {float((exact - approximate).norm() / exact.norm()):.3f} of its length")

    # Columns that matter more get smaller errors; importance is one non-negative number per column.
    importance = torch.ones(4096)
    importance[::16] = 100.0
    weighted = kbitq.quantize(weight, 4, importance=importance)
    for name, other in (("without importance", q), ("with", weighted)):
        error = (weight.float() - kbitq.dequantize(other, dtype=torch.float32)).square().mean(0)
        print(f"mean squared error {name}: every 16th column {error[::16].mean():.5f}, all {error.mean():.5f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        kbitq.save_file({"layer.weight": q, "layer.bias": torch.zeros(1024)}, path)
        loaded = kbitq.load_file(path)
        assert torch.equal(loaded["layer.weight"].dequantize(), q.dequantize())
        print(f"saved and loaded: {path.stat().st_size:,d} bytes, {', '.join(sorted(loaded))}")


if __name__ == "__main__":
    main()
