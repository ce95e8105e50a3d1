"""A program: ``serve.py FOLDER OPTIONS TOKENS`` generates greedily with vLLM in float32 and writes the tokens as JSON.

vLLM starts processes that import the main module again, so this is a file of its own.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from vllm import LLM, SamplingParams

    from helpers.served_models import NEW_TOKENS, PROMPTS

    model = LLM(sys.argv[1], dtype="float32", max_model_len=128, seed=0, **json.loads(sys.argv[2]))
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling)
    Path(sys.argv[3]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
