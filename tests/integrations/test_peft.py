"""LoRA on packed layers: it trains, saves and loads, merges by quantizing again, and comes apart exactly."""

import copy
import warnings
from functools import partial

import pytest
import torch

import kbitq
from helpers.small_models import auto_class, outputs, sample_inputs
from helpers.tolerances import LOGITS, relative_error
from kbitq.nn import KbitLinear, replace_linears

peft = pytest.importorskip("peft", reason="peft is not installed")

from kbitq.integrations.peft import LostUpdateWarning, for_packed, merge, merge_losses  # noqa: E402


def packed_model(folders, k: int = 4, dtype: torch.dtype = torch.float32):
    return auto_class("llama").from_pretrained(folders("llama", k)[1], dtype=dtype)


def lora(model, **options):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "up_proj", "down_proj"], **options}
    torch.manual_seed(0)
    return peft.get_peft_model(model, for_packed(peft.LoraConfig(task_type="CAUSAL_LM", **settings)))


def with_random_adapters(model, std: float = 0.3):
    """Adapters whose updates are well above the quantization step."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
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


def test_the_error_about_a_packed_layer_says_what_to_do() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 3)
    with pytest.raises(ValueError, match=r"for LoRA: kbitq\.integrations\.peft\.for_packed\(config\)"):
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))


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
    model.add_adapter("other", for_packed(peft.LoraConfig(r=2, target_modules=["up_proj"], lora_bias=False)))
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
    config = for_packed(peft.PeftConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(packed_model(folders), tmp_path, config=config)
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))
    native = packed_model(folders)
    native.load_adapter(str(tmp_path))
    assert torch.equal(outputs(native, "llama"), outputs(model, "llama"))


def test_a_bias_of_an_adapter_is_merged() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    model = peft.get_peft_model(base, for_packed(peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True)))
    layer = model.base_model.model[0]
    torch.nn.init.normal_(layer.lora_B["default"].bias)
    expected = layer.get_base_layer().bias + layer.lora_B["default"].bias
    merged = copy.deepcopy(model).merge_and_unload()
    assert torch.allclose(merged[0].bias, expected)


def test_variants_that_are_not_supported_say_so() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    with pytest.raises(ValueError, match="variant"):
        peft.get_peft_model(base, for_packed(peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)))


def test_a_merge_that_overflows_is_refused() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(96, 64))
    replace_linears(base, 5)
    model = peft.get_peft_model(base, for_packed(peft.LoraConfig(r=2, target_modules=["0"])))
    model.base_model.model[0].lora_B["default"].weight.data.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kbitq.KbitqError, match="NaN or infinite"):
            model.merge_and_unload()


def test_a_config_that_knows_packed_layers_is_saved_as_any_other() -> None:
    plain, ours = (peft.LoraConfig(target_modules=["x"]) for _ in range(2))
    assert for_packed(ours) is ours
    assert ours.to_dict() == plain.to_dict()
    with pytest.raises(kbitq.KbitqError, match=r"not IA3Config: give a peft\.LoraConfig"):
        for_packed(peft.IA3Config())


def test_transformers_own_adapters(folders, tmp_path) -> None:
    """``add_adapter`` and ``load_adapter`` of a packed model, and ``from_pretrained`` of a folder with an adapter."""
    model = packed_model(folders)
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["o_proj", "up_proj"]))
    with_random_adapters(model)
    model.save_pretrained(tmp_path)
    whole = auto_class("llama").from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(outputs(whole, "llama"), outputs(model, "llama"))
    assert not torch.equal(outputs(model, "llama"), outputs(packed_model(folders), "llama"))


# -- merging, and what it loses ---------------------------------------------------------------------------------------


def with_small_adapters(folders, k: int = 3):
    """Adapters whose update is a hundredth of the weight: far below the step of 3 bits."""
    model = with_random_adapters(lora(packed_model(folders, k)))
    for loss, (_, layer) in zip(merge_losses(model).values(), lora_layers(model), strict=True):
        layer.lora_B["default"].weight.data *= 0.01 / loss.size
    return model


def lora_layers(model):
    return [(n, m) for n, m in model.named_modules() if hasattr(m, "merge_loss")]


def test_small_updates_are_lost_at_3_bits_and_kept_at_8(folders) -> None:
    model = with_small_adapters(folders)
    before = {n: p.clone() for n, p in model.named_parameters()}
    lost, kept = merge_losses(model), merge_losses(model, 8)
    assert lost.keys() == kept.keys() == {name for name, _ in lora_layers(model)}
    assert all(loss.size == pytest.approx(0.01, rel=1e-3) and loss.k == 3 for loss in lost.values())
    assert all(loss.is_lost and loss.kept < 0.1 for loss in lost.values())
    assert all(not loss.is_lost and loss.kept > 0.8 and loss.error < 1 and loss.k == 8 for loss in kept.values())
    after = dict(model.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in before.items())


def test_a_loss_is_what_its_terms_say(folders) -> None:
    model = with_random_adapters(lora(packed_model(folders)))
    name, layer = lora_layers(model)[0]
    weight, update = layer.get_base_layer().dequantize(), layer.get_delta_weight("default").detach()
    merged = kbitq.quantize(weight + update, 5).dequantize(torch.float32)
    loss = merge_losses(model, 5)[name]
    assert loss.error == pytest.approx(float((merged - weight - update).norm() / update.norm()), rel=1e-4)
    assert loss.kept == pytest.approx(float(((merged - weight) * update).sum() / update.square().sum()), rel=1e-4)
    assert loss.size == pytest.approx(float(update.norm() / weight.norm()), rel=1e-4)
    fresh = merge_losses(lora(packed_model(folders)))
    assert all((loss.kept, loss.error, loss.size) == (1, 0, 0) for loss in fresh.values())


def test_merging_into_more_bits(folders, tmp_path) -> None:
    model = with_small_adapters(folders)
    wanted, bare = outputs(model, "llama"), outputs(packed_model(folders, 3), "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merge(model, 8)
    up = merged.model.layers[0].mlp.up_proj
    assert type(up) is KbitLinear
    assert (up.k, merged.model.layers[0].self_attn.q_proj.k) == (8, 3)
    assert relative_error(outputs(merged, "llama"), wanted) < 0.5 * relative_error(bare, wanted)
    for save, folder in (
        (merged.save_pretrained, tmp_path / "a"),
        (partial(kbitq.save_pretrained, merged), tmp_path / "b"),
    ):
        save(folder)
        again = auto_class("llama").from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(outputs(again, "llama"), outputs(merged, "llama"))
        assert again.model.layers[0].mlp.up_proj.k == 8


def test_a_merge_that_loses_the_update_warns(folders) -> None:
    model = with_small_adapters(folders)
    sentence = r"^in 6 of 6 layers, merging into 3 bits lost more than half .*peft\.merge\(model, k=\.\.\.\)$"
    with pytest.warns(LostUpdateWarning, match=sentence) as seen:
        merged = merge(copy.deepcopy(model))
    assert len(seen) == 1
    assert merged.model.layers[0].mlp.up_proj.k == 3
    with pytest.warns(LostUpdateWarning, match=r"^merging into 3 bits lost"):
        model.merge_and_unload()


def test_unmerging_more_bits_restores_the_bytes(folders) -> None:
    model = with_small_adapters(folders)
    before = {n: p.clone() for n, p in model.named_parameters()}
    infos = [layer.get_base_layer().info for _, layer in lora_layers(model)]
    for _, layer in lora_layers(model):
        layer.merge_k = 6
    model.merge_adapter()
    assert all(layer.get_base_layer().k == 6 for _, layer in lora_layers(model))
    model.unmerge_adapter()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert [layer.get_base_layer().info for _, layer in lora_layers(model)] == infos


def test_merging_what_cannot_be_merged(folders) -> None:
    model = lora(packed_model(folders))
    with pytest.raises(kbitq.KbitqError, match="k must be a whole number from 2 to 8, not 9"):
        merge(model, 9)
    with pytest.raises(kbitq.KbitqError, match="no LoRA adapter on a packed layer"):
        merge(peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), peft.LoraConfig(target_modules=["0"])))
    with pytest.raises(kbitq.KbitqError, match=r"LlamaForCausalLM cannot be merged: give the model that peft"):
        merge(packed_model(folders))
