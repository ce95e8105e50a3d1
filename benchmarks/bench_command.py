"""Seconds that ``kbitq quantize`` takes on a synthetic bfloat16 checkpoint, beside ``cp`` of the same files.

Once with the source in the page cache, once without; each run a process of its own, from start to end. Prints Markdown.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER = 4096, 14336
RUN = "from kbitq.cli.main import run; run()"


def layer(index: int) -> dict[str, torch.Tensor]:
    """The matrices of a Llama-like layer, 436 MB."""
    shapes = {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (1024, HIDDEN),
        "v_proj": (1024, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
    }
    mlp = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        f"model.layers.{index}.{part}.{name}.weight": (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()
        for part, group in (("self_attn", shapes), ("mlp", mlp))
        for name, shape in group.items()
    }


def write_checkpoint(folder: Path, nbytes: int) -> int:
    """Shards of four layers and an index; returns the bytes of data."""
    folder.mkdir()
    layers = max(1, round(nbytes / sum(t.nbytes for t in layer(0).values())))
    shards = -(-layers // 4)
    weight_map, total = {}, 0
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {k: v for i in range(4 * shard, min(layers, 4 * shard + 4)) for k, v in layer(i).items()}
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(t.nbytes for t in tensors.values())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def seconds(command: list[str], source: Path, out: Path, cold: bool) -> float:
    """Of one run; what it wrote is removed."""
    if cold:
        drop_from_cache(source)
    else:
        for path in source.iterdir():
            with path.open("rb", buffering=0) as file:
                while file.read(64 << 20):
                    pass
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    taken = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr}")
    shutil.rmtree(out)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--k", default="3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, out = Path(work) / "source", Path(work) / "out"
        total = write_checkpoint(source, int(options.gigabytes * 1e9))
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        print(
            f"{total / 1e9:.2f} GB of bfloat16 in {len(list(source.glob('*.safetensors')))} files; {gpus or 'no GPU'}\n"
        )
        print("| command | source in the page cache, s | x cp | not in it, s | x cp |\n|---|---|---|---|---|")
        commands = {"cp": ["cp", "-r", "--reflink=never", str(source), str(out)]}
        start = f"import pathlib, torch; pathlib.Path({str(out)!r}).mkdir(); torch.zeros(1, device=DEVICE)"
        device = "cuda" if gpus else "cpu"
        commands["start of Python, torch and CUDA"] = [sys.executable, "-c", start.replace("DEVICE", repr(device))]
        for k in options.k.split(","):
            arguments = ["quantize", str(source), "-o", str(out), "-k", k, "--device", options.device]
            commands[f"kbitq quantize -k {k}"] = [sys.executable, "-c", RUN, *arguments]
        copied: list[float] = []
        for name, command in commands.items():
            taken = [min(seconds(command, source, out, False) for _ in range(2)), seconds(command, source, out, True)]
            copied = copied or taken
            cells = [f"{t:.2f} | {t / c:.2f}" for t, c in zip(taken, copied, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
