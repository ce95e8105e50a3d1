"""What `kbitq calibrate` takes beside the forward pass alone, on a Llama with the layers of an 8B and random weights.

    python benchmarks/bench_calibrate.py [--layers 32] [--samples 128] [--length 2048]

The model is written as bfloat16 safetensors first, its tokens are drawn at random. The forward pass is timed over the
same windows, in the same batches, with the model on the device already. One H is checked against float64. Prints
Markdown.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kbitq.calibration import calibrate as job
from kbitq.calibration.collect import Sums
from kbitq.calibration.samples import windows_at_once
from kbitq.calibration.weights import find_weights
from kbitq.checkpoint.source.open import open_checkpoint

VOCABULARY = 32000  # of the 8B it is 128,256; embeddings are not calibrated, and a smaller file is sooner written


def make_model(folder: Path, layers: int) -> None:
    """A folder with a config and random weights of Llama-3-8B's shapes."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=8192, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()

    tensors = {name: drawn(tensor.shape) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def seconds(call: Callable[[], object]) -> float:
    """Of one call, whatever it left in a GPU's queue included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def forward(model: LlamaForCausalLM, windows: torch.Tensor) -> None:
    """The model's base over all windows, as calibrating runs it."""
    with torch.no_grad():
        for ids in windows.split(windows_at_once(windows)):
            model.base_model(input_ids=ids.to(model.device))


def check(columns: int) -> float:
    """The largest error of an H, relative to its largest element, on inputs of bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(5000, columns, device=device).bfloat16()
    sums = Sums(columns, None)
    sums.add(x)
    assert sums.matrices is not None
    exact = x.double().T @ x.double()
    error = float((sums.matrices[0].tril().double() - exact.tril()).abs().max() / exact.abs().max())
    if error > 1e-5:
        raise SystemExit(f"error: an H is wrong by {error:.1e} of its largest element")
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    options = parser.parse_args()
    print(f"an H of 1,536 columns is right to {check(1536):.1e} of its largest element\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder, tokens = Path(work) / "model", Path(work) / "text.tokens"
        make_model(folder, options.layers)
        count = options.samples * options.length
        np.random.default_rng(0).integers(0, VOCABULARY, count).astype("<u2").tofile(tokens)
        windows = torch.from_numpy(np.fromfile(tokens, "<u2").astype(np.int64)).reshape(-1, options.length)
        rows = run(folder, tokens, Path(work) / "stats", windows, options)
    print(f"| {options.layers} layers, {options.samples} x {options.length} tokens | seconds | of the forward pass |")
    print("|---|---|---|")
    for name, taken in rows.items():
        print(f"| {name} | {taken:.2f} | {taken / rows['forward pass']:.2f} |")


def run(folder: Path, tokens: Path, out: Path, windows: torch.Tensor, options: argparse.Namespace) -> dict[str, float]:
    """Seconds by step."""
    model = job.load_any_model(folder)
    weights, _ = find_weights(model, open_checkpoint(folder).tensors)
    forward(model, windows[:4])
    rows = {"forward pass": seconds(partial(forward, model, windows))}
    rows["forward pass and sums"] = seconds(partial(job.collect, model, weights, windows, job.HESSIAN_BLOCK))
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    asked = job.Options(samples=options.samples, length=options.length)
    rows["the whole command"] = seconds(lambda: job.calibrate(folder, [tokens], out, asked))
    written = sum(file.stat().st_size for file in out.iterdir())
    print(json.dumps({"statistics, bytes": written}) + "\n")
    return rows


if __name__ == "__main__":
    main()
