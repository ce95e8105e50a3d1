"""A program: ``serve.py FOLDER OPTIONS TOKENS`` generates greedily with vLLM in float32 and writes the tokens as JSON;
those with a LoRA adapter follow, where ``adapter`` of the options is the folder of one.

vLLM starts processes that import the main module again, so this is a file of its own.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from vllm import LLM, SamplingParams

    from helpers.served_models import NEW_TOKENS, PROMPTS

    options = json.loads(sys.argv[2])
    adapter = options.pop("adapter", None)
    model = LLM(sys.argv[1], dtype="float32", max_model_len=128, seed=0, **options)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = model.generate(prompts, sampling)
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        outputs += model.generate(prompts, sampling, lora_request=LoRARequest("adapter", 1, adapter))
    Path(sys.argv[3]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
