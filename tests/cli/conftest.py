"""The program in this process, and small checkpoints to run it on."""

from pathlib import Path

import pytest

from helpers.program import Kbitq, in_this_process, save_tiny


@pytest.fixture
def kbitq(capsys: pytest.CaptureFixture[str]) -> Kbitq:
    """``kbitq("quantize", path, "--k", 3)`` in this process."""
    return in_this_process(capsys)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of one layer, with a tokenizer of single characters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from helpers.small_models import save_with_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, vocab_size=97,
        max_position_embeddings=128, initializer_range=0.2, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    return save_with_tokenizer(LlamaForCausalLM(config).to(torch.bfloat16), tmp_path_factory.mktemp("m") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """900 characters, each of which is a token."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A one-file checkpoint of ``tiny_tensors``."""
    return save_tiny(tmp_path)


@pytest.fixture
def tiny_k3(tiny: Path, kbitq: Kbitq) -> Path:
    """``tiny`` quantized to K=3."""
    out = tiny.with_name("tiny-kbitq-k3.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "--quiet") == (0, f"{out}\n", "")
    return out
