"""What does each bit buy? Perplexity and divergence of a language model against K, drawn in the terminal.

python examples/perplexity_vs_k.py [FOLDER OF A MODEL]
"""

import copy

import torch
from _tiny import model_folder, text_to_measure
from transformers import AutoModelForCausalLM, AutoTokenizer

from kbitq.eval.perplexity import evaluate, windows_of
from kbitq.nn import replace_linears

WIDTH = 50  # of the longest bar, in characters
WINDOWS, LENGTH = 24, 256


def main() -> None:
    source = model_folder()
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text_to_measure())["input_ids"])
    windows = windows_of(ids, LENGTH, min(WINDOWS, len(ids) // LENGTH))
    base = evaluate(model, windows, batch=8).perplexity

    results = {}
    for k in range(2, 9):
        packed = copy.deepcopy(model)
        replace_linears(packed, k)
        results[k] = evaluate(packed, windows, reference=model, batch=8)

    print(f"Perplexity on {windows.numel():,} tokens; the original has {base:.3f}\n")
    worst = max(result.perplexity for result in results.values())
    for k, result in results.items():
        bar = "#" * max(1, round(WIDTH * (result.perplexity - base) / max(worst - base, 1e-9)))
        found = result.divergence
        print(f"K={k}  {k + 0.25:.2f} bits  {result.perplexity:8.3f}  {bar}")
        print(f"       KL {found.mean:.5f} nats, same top token {100 * found.same_top1:.1f} %")
    print("\nA bar is what the quantization costs in perplexity.")
    if results[8].perplexity > 1.01 * base:
        raise SystemExit("error: 8 bits should cost next to nothing")


if __name__ == "__main__":
    main()
