"""Load a quantized language model with one line of transformers, and let it speak. Its weights stay packed in memory.

python examples/load_and_generate.py [FOLDER OF A MODEL]
"""

import kbitq  # isort: skip  (importing it is all that transformers needs)
from _tiny import model_folder, quantized
from transformers import AutoModelForCausalLM, AutoTokenizer

from kbitq.eval.generation import generate, memory_of


def main() -> None:
    source = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    original = AutoModelForCausalLM.from_pretrained(source)
    print(f"original: {memory_of(original).weights / 1e6:.2f} MB of weights")
    for k in (2, 3, 4):
        model = AutoModelForCausalLM.from_pretrained(quantized(source, k))
        made = generate(model, tokenizer, "The statement ", max_tokens=80, temperature=0.7)
        print(f"\nK={k}: {memory_of(model).weights / 1e6:.2f} MB of weights, {made.tokens_per_second:.0f} tokens/s")
        print(f"The statement {made.text}")

    # The same without a quantized folder: quantized while it loads.
    on_the_fly = AutoModelForCausalLM.from_pretrained(source, quantization_config=kbitq.KbitqConfig(k=3))
    print(f"\nquantized while loading: {on_the_fly.model.layers[0].mlp.up_proj}")


if __name__ == "__main__":
    main()
