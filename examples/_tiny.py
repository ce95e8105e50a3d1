"""A tiny language model for the examples: made here, in half a minute, out of Python's own documentation.

It reads bytes, has 0.4 M parameters, and knows a little English. Give an example the folder of a real model instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo"
STEPS, BATCH, WINDOW = 200, 12, 96


def documentation() -> str:
    """Some 700 kB of English about Python, from the standard library."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def text_to_measure() -> str:
    """The end of it, which the model was not trained on."""
    return documentation()[-40_000:]


def save_tokenizer(folder: Path) -> None:
    """One token for each byte, and one for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def train(folder: Path) -> None:
    """Make the model. The same every time on one machine."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    save_tokenizer(folder)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(documentation()[:-40_000])["input_ids"])
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, vocab_size=257,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(ids) - WINDOW, (BATCH,))
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def model_folder() -> Path:
    """The folder given on the command line, or that of the tiny model, made if it is not there yet."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    folder = OUT / "tiny-llama"
    if not (folder / "model.safetensors").exists():
        print("making a tiny model to work with (half a minute, once)", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        train(folder)
    return folder


def quantized(source: Path, k: int) -> Path:
    """``source`` quantized by ``kbitq quantize SOURCE --k K``, in demo/."""
    from kbitq.checkpoint import QuantizeOptions, plan_quantize, run

    out = OUT / f"{source.name}-kbitq-k{k}"
    run(plan_quantize(source, out, QuantizeOptions(k=k, force=True)))
    return out
