"""Generation on a GPU with a static cache: transformers compiles the decoding step and replays it as a CUDA graph."""

import pytest
import torch

from helpers.small_models import auto_class, sample_inputs
from helpers.tolerances import LOGITS, relative_error


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 6])
def test_generate_with_a_static_cache(k, folders, cuda_device) -> None:
    model = auto_class("llama").from_pretrained(folders("llama", k)[1], dtype=torch.bfloat16).to(cuda_device)
    ids = sample_inputs("llama")["input_ids"][:1].to(cuda_device)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    eager = model.generate(ids, **options)
    graphs = model.generate(ids, **options, cache_implementation="static")
    assert getattr(model, "_compiled_call", None) is not None, "the decoding step was not compiled"
    for step, (expected, got) in enumerate(zip(eager.logits, graphs.logits, strict=True)):
        assert relative_error(got, expected) < LOGITS[torch.bfloat16], f"step {step}"
        if expected.argmax() != got.argmax():  # a near tie: from here on the two go different ways
            assert step > 0
            break
    again = model.generate(ids, **options, cache_implementation="static")
    assert torch.equal(again.sequences, graphs.sequences)
