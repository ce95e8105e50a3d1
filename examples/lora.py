"""Fine-tune a quantized language model: LoRA adapters over packed weights, then merged into more bits.

python examples/lora.py [FOLDER OF A MODEL]
"""

import warnings

import torch
from _tiny import OUT, model_folder, quantized
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kbitq
from kbitq.integrations.peft import for_packed, merge, merge_losses

K, MERGED_K, STEPS = 3, 8, 30
TEXT = (
    "Packed weights are read as they lie: K words of bits and one byte of scale for thirty-two values. "
    "A block is decoded in registers, multiplied, and forgotten. Nothing is ever written back to memory. "
)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def main() -> None:
    warnings.simplefilter("ignore")
    source = model_folder()
    ids = AutoTokenizer.from_pretrained(source)(TEXT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(quantized(source, K), dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = get_peft_model(model, for_packed(config))
    trained = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in trained):,} parameters are trained, over weights of {K} bits")
    before = loss_of(model, ids)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    model.train()
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    after = loss_of(model, ids)

    print(f"loss {before:.3f} -> {after:.3f} with adapters")

    for k in (K, MERGED_K):  # measured before anything is changed
        kept = sorted(loss.kept for loss in merge_losses(model, k).values())
        print(f"merging into {k} bits would keep {kept[0]:.0%} to {kept[-1]:.0%} of the updates")
    merged = merge(model, k=MERGED_K)
    print(f"merged into {MERGED_K} bits: loss {loss_of(merged, ids):.3f}")
    out = OUT / f"{source.name}-tuned"
    kbitq.save_pretrained(merged, out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    print(f"saved to {out.name}/ and loaded again: loss {loss_of(again, ids):.3f}")
    if not after < 0.8 * before:
        raise SystemExit("error: training did not lower the loss")


if __name__ == "__main__":
    main()
