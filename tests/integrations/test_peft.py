"""LoRA on packed layers: it trains, saves and loads, merges by quantizing again, and comes apart exactly."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch

import kbitq
from helpers.small_models import auto_class, outputs, sample_inputs
from helpers.tolerances import LOGITS, relative_error
from kbitq.nn import KbitLinear, replace_linears

peft = pytest.importorskip("peft", reason="peft is not installed")


def packed_model(folders, k: int = 4, dtype: torch.dtype = torch.float32):
    return auto_class("llama").from_pretrained(folders("llama", k)[1], dtype=dtype)


def lora(model, **options):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "up_proj", "down_proj"], **options}
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def with_random_adapters(model):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def test_it_trains(folders, device) -> None:
    model = lora(packed_model(folders)).to(device)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 3 * 2
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = sample_inputs("llama", rows=4, length=16)["input_ids"].to(device)
    losses = []
    model.train()
    for _ in range(15):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_gradients_are_those_of_the_decoded_model(folders) -> None:
    packed = with_random_adapters(lora(packed_model(folders)))
    dense = packed_model(folders)
    dense.dequantize()
    dense = with_random_adapters(lora(dense))
    ids = sample_inputs("llama")["input_ids"]
    for model in (packed, dense):
        model(input_ids=ids, labels=ids).loss.backward()
    expected = {n: p.grad for n, p in dense.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in packed.named_parameters() if p.requires_grad}
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        assert relative_error(gradient, expected[name]) < 1e-3, name


def test_gradient_checkpointing_and_input_gradients(folders) -> None:
    model = lora(peft.prepare_model_for_kbit_training(packed_model(folders, dtype=torch.bfloat16)))
    model.train()
    ids = sample_inputs("llama")["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_merging_quantizes_again(folders) -> None:
    model = with_random_adapters(lora(packed_model(folders)))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    dense = layer.get_base_layer().dequantize() + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    up = merged.model.layers[0].mlp.up_proj
    assert type(up) is KbitLinear
    q = kbitq.quantize(dense.detach(), 4)
    assert torch.equal(up.weight_packed, q.packed)
    assert torch.equal(up.weight_codebook, q.codebook)
    assert up.info.sqnr_db == q.sqnr_db
    assert up.k == 4


def test_a_merged_model_is_saved(folders, tmp_path) -> None:
    merged = with_random_adapters(lora(packed_model(folders))).merge_and_unload()
    merged.save_pretrained(tmp_path / "a")
    kbitq.save_pretrained(merged, tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        again = auto_class("llama").from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(outputs(again, "llama"), outputs(merged, "llama"))
        stored = kbitq.load_file(folder)["model.layers.0.mlp.up_proj.weight"]
        assert stored.sqnr_db == pytest.approx(merged.model.layers[0].mlp.up_proj.info.sqnr_db, abs=1e-4)


def test_unmerging_restores_the_bytes(folders) -> None:
    model = with_random_adapters(lora(packed_model(folders)))
    before = {n: p.clone() for n, p in model.named_parameters()}
    y = outputs(model, "llama")
    model.merge_adapter()
    assert not torch.equal(outputs(model, "llama"), y)
    with model.disable_adapter():
        bare = outputs(model, "llama")
    assert torch.equal(bare, outputs(packed_model(folders), "llama"))
    model.unmerge_adapter()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(outputs(model, "llama"), y)


def test_two_adapters(folders) -> None:
    model = with_random_adapters(lora(packed_model(folders)))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up_proj"], lora_bias=False))
    with_random_adapters(model)
    ids = sample_inputs("llama")["input_ids"]
    with torch.no_grad():
        one = model(input_ids=ids).logits
        model.set_adapter("other")
        two = model(input_ids=ids).logits
        with model.disable_adapter():
            none = model(input_ids=ids).logits
        model.eval()
        mixed = model(input_ids=ids, adapter_names=["default", "other"]).logits
        bare = model(input_ids=ids, adapter_names=["__base__", "__base__"]).logits
    assert relative_error(mixed[0], one[0]) < LOGITS[torch.float32]
    assert relative_error(mixed[1], two[1]) < LOGITS[torch.float32]
    assert torch.equal(bare, none)
    assert not torch.equal(one, two)
    model.set_adapter("default")
    model.merge_adapter(["default", "other"])
    assert model.base_model.model.model.layers[0].mlp.up_proj.merged_adapters == ["default", "other"]
    model.unmerge_adapter()


def test_an_adapter_is_saved_and_loaded(folders, tmp_path) -> None:
    model = with_random_adapters(lora(packed_model(folders)))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(packed_model(folders), tmp_path)
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))
    native = packed_model(folders)
    native.load_adapter(str(tmp_path))
    assert torch.equal(outputs(native, "llama"), outputs(model, "llama"))


def test_a_bias_of_an_adapter_is_merged() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True))
    layer = model.base_model.model[0]
    torch.nn.init.normal_(layer.lora_B["default"].bias)
    expected = layer.get_base_layer().bias + layer.lora_B["default"].bias
    merged = copy.deepcopy(model).merge_and_unload()
    assert torch.allclose(merged[0].bias, expected)


def test_variants_that_are_not_supported_say_so() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    with pytest.raises(ValueError, match="variant"):
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))


def test_a_merge_that_overflows_is_refused() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    model.base_model.model[0].lora_B["default"].weight.data.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kbitq.KbitqError, match="NaN or infinite"):
            model.merge_and_unload()


@pytest.mark.parametrize("order", ["import kbitq, peft", "import peft, kbitq"])
def test_either_order_of_imports(order: str) -> None:
    code = (
        f"{order}\nfrom kbitq.nn import KbitLinear\n"
        "config = peft.LoraConfig(target_modules=['x'])\n"
        "assert KbitLinear in config._custom_modules, config._custom_modules\n"
        "assert 'custom' not in str(config.to_dict())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
