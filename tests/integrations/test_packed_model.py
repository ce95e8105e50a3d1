"""The class of a packed model: what it answers, who has it, copies of it."""

import copy
import io

import pytest
import torch

import kbitq
from helpers.small_models import auto_class, outputs
from helpers.small_models import load_complete as load

KINDS = ["llama", "llama-tied", "moe", "gpt2", "bert", "vit"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_counts_its_weights(kind, folders) -> None:
    source, folder = folders(kind, 3, keep_embeddings=False)
    ordinary, packed = auto_class(kind).from_pretrained(source), load(kind, folder)
    assert packed.num_parameters() == ordinary.num_parameters()
    assert packed.num_parameters(exclude_embeddings=True) == ordinary.num_parameters(exclude_embeddings=True)
    assert packed.num_parameters(only_trainable=True) == sum(p.numel() for p in packed.parameters() if p.requires_grad)
    assert packed.num_parameters(only_trainable=True) < ordinary.num_parameters()


def test_only_packed_models_have_the_class(folders) -> None:
    source, folder = folders("llama", 3, keep_embeddings=False)
    ordinary, packed = auto_class("llama").from_pretrained(source), load("llama", folder, dtype=torch.float16)
    assert type(packed) is not type(ordinary)
    assert isinstance(packed, type(ordinary))
    assert isinstance(packed.model, type(ordinary.model))
    assert str(type(packed)) == str(type(ordinary))
    assert (packed.dtype, packed.model.dtype, ordinary.dtype) == (torch.float16, torch.float16, torch.bfloat16)
    packed.dequantize()
    assert (type(packed), type(packed.model)) == (type(ordinary), type(ordinary.model))
    dense = load("llama", folder, quantization_config=kbitq.KbitqConfig(dequantize=True))
    assert type(dense) is type(ordinary)


@pytest.mark.parametrize("kind", ["llama-tied", "moe"])
def test_copies_and_pickles(kind, folders) -> None:
    model = load(kind, folders(kind, 3, keep_embeddings=False)[1], dtype=torch.float32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        assert other.dtype == torch.float32
        assert other.num_parameters() == model.num_parameters()
        assert torch.equal(outputs(other, kind), outputs(model, kind))
