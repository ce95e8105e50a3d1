"""Outputs in other tools' formats: through the same walk, and read back as sources.

That the formats' own packages load them is tried by tests/formats/oracle in the environment that has those packages.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kbitq.checkpoint import QuantizeOptions, choose, inspect, plan_quantize, run, verify
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import TensorRule
from kbitq.codecs.base import Request, get_codec, output_codec
from kbitq.errors import CheckpointError, CodebookError, CodecError, SelectionError
from kbitq.functional import dequantize_nf4, quantize_nf4

FORMATS = [("compressed-tensors", 4, 18), ("compressed-tensors-g32", 4, 19), ("compressed-tensors-channel", 8, 40),
           ("compressed-tensors-g64", 8, 43), ("int8", 8, 40), ("fp8", 8, 31), ("fp8-block", 8, 31), ("gptq", 4, 18),
           ("gptq-g32", 8, 43), ("gptq-channel", 4, 17), ("bnb-nf4", 4, 20), ("bnb-nf4-double", 4, 20)]  # fmt: skip
ROWS = (48, 56, 200)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(params=["BF16", "F16", "F32"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_source(tmp_path / "model", DTYPES[request.param])


def make_source(folder: Path, dtype: torch.dtype = torch.bfloat16, **more: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{i}.mlp.up_proj.weight": (0.05 * torch.randn(ROWS[i], 256, generator=generator)).to(dtype)
        for i in range(3)
    }
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    tensors["model.norm.weight"] = torch.ones(256, dtype=dtype)
    tensors["lm_head.weight"] = torch.randn(64, 256, generator=generator).to(dtype)
    folder.mkdir()
    save_file({**tensors, **more}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def made(source: Path, out: Path, codec: str, k: int, **options: Any) -> Any:
    return run(plan_quantize(source, out, QuantizeOptions(k=k, codec=codec, **options)))


def values(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of a folder as a source gives them."""
    checkpoint = open_source(folder)
    found = {}
    with TileReader(checkpoint) as reader:
        for tensor in (t for t in checkpoint.tensors.values() if len(t.shape) == 2):
            spans = [reader.read(tensor, span).clone() for span in reader.spans(tensor)]
            found[tensor.name] = torch.cat([s.reshape(-1, tensor.shape[-1]) for s in spans]).view(tensor.shape)
    return found


@pytest.mark.parametrize("codec, k, least_db", FORMATS)
def test_what_is_written_reads_back(source: Path, tmp_path: Path, codec: str, k: int, least_db: float) -> None:
    report = made(source, tmp_path / "out", codec, k)
    assert report.totals["sqnr_db"] > least_db
    before, after = values(source), values(tmp_path / "out")
    assert set(before) == set(after)
    noise = signal = 0.0
    for name, w in before.items():
        if "up_proj" not in name:
            assert torch.equal(after[name], w), name
            continue
        assert after[name].dtype == (torch.float16 if (codec[:4], w.dtype) == ("gptq", torch.float32) else w.dtype)
        noise += float((after[name].double() - w.double()).square().sum())
        signal += float(w.double().square().sum())
    assert 10 * torch.tensor(signal / noise).log10().item() > least_db
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_config_says_what_it_is(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model")
    made(source, tmp_path / "out", "compressed-tensors", 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and "transformers_weights" not in config
    said = config["quantization_config"]
    assert said["format"] == "pack-quantized" and said["ignore"] == ["lm_head"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == 128
    made(source, tmp_path / "nf4", "bnb-nf4", 4)
    said = json.loads((tmp_path / "nf4" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "bitsandbytes" and said["llm_int8_skip_modules"] == ["lm_head"]
    made(source, tmp_path / "gptq", "gptq", 4)
    said = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert (said["bits"], said["group_size"], said["checkpoint_format"], said["desc_act"]) == (4, 128, "gptq", False)
    assert "modules_in_block_to_quantize" not in said
    made(source, tmp_path / "some", "gptq-channel", 8, rules=(TensorRule("*layers.1*", keep=True),))
    said = json.loads((tmp_path / "some" / "config.json").read_text())["quantization_config"]
    assert (said["bits"], said["group_size"]) == (8, -1)
    assert said["modules_in_block_to_quantize"] == [[f"model.layers.{i}.mlp.up_proj" for i in (0, 2)]]
    assert list(said["dynamic"]) == [r"-:^model\.layers\.1\.mlp\.up_proj$"]


def test_gptq_is_what_the_layout_says(tmp_path: Path) -> None:
    source, name = make_source(tmp_path / "model"), "model.layers.2.mlp.up_proj."
    made(source, tmp_path / "out", "gptq-g64", 4)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        words, scales, zeros, index = (file.get_tensor(name + p) for p in ("qweight", "scales", "qzeros", "g_idx"))
    assert words.shape == (32, 200) and scales.shape == (4, 200) and zeros.shape == (4, 25)
    assert torch.equal(index, torch.arange(256, dtype=torch.int32) // 64) and bool((zeros == 0x77777777).all())
    codes = (words[:, None] >> (4 * torch.arange(8)[None, :, None])) & 15
    by_hand = (codes.reshape(256, 200).float() - 8) * scales.float().repeat_interleave(64, 0)
    assert torch.equal(by_hand.t().bfloat16(), values(tmp_path / "out")[name + "weight"])


def test_double_scales_are_those_of_the_operators(tmp_path: Path) -> None:
    source, name = make_source(tmp_path / "model"), "model.layers.2.mlp.up_proj.weight"
    report = made(source, tmp_path / "out", "bnb-nf4-double", 4)
    with (
        safe_open(source / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as after,
    ):
        q = quantize_nf4(before.get_tensor(name), nested=True)
        assert torch.equal(after.get_tensor(name + ".absmax"), q.absmax)
        assert torch.equal(after.get_tensor(name + ".nested_absmax"), q.nested_absmax)
        state = json.loads(bytes(after.get_tensor(name + ".quant_state.bitsandbytes__nf4").tolist()))
        assert state["nested_offset"] == q.nested_offset.item() and state["nested_blocksize"] == 256
    error = values(source)[name].double() - dequantize_nf4(q, torch.float32).double()
    row = next(row for row in report.tensors if row["name"] == name)
    assert row["sqnr_db"] == pytest.approx(
        10 * (values(source)[name].double().square().sum() / error.square().sum()).log10()
    )


def test_nf4_is_that_of_the_operators(tmp_path: Path) -> None:
    """Whose bytes are those of bitsandbytes (tests/functional/test_nf4.py)."""
    source = make_source(tmp_path / "model")
    made(source, tmp_path / "out", "bnb-nf4", 4)
    name = "model.layers.1.mlp.up_proj.weight"
    with (
        safe_open(source / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as after,
    ):
        q = quantize_nf4(before.get_tensor(name))
        assert torch.equal(after.get_tensor(name).view(-1), q.codes)
        assert torch.equal(after.get_tensor(name + ".absmax"), q.absmax)
        state = bytes(after.get_tensor(name + ".quant_state.bitsandbytes__nf4").tolist())
        assert json.loads(state) == {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [56, 256]}
    assert torch.equal(values(tmp_path / "out")[name], dequantize_nf4(q))


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec, k",
    [
        ("compressed-tensors-g32", 4),
        ("int8", 8),
        ("bnb-nf4", 4),
        ("gptq-g32", 4),
        ("gptq-channel", 8),
        ("fp8-block", 8),
        ("bnb-nf4-double", 4),
    ],
)
def test_tiles_of_any_size_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, k: int
) -> None:
    source = make_source(tmp_path / "model")
    made(source, tmp_path / "whole", codec, k)
    monkeypatch.setattr("kbitq.checkpoint.source.tile_reader.MIN_TILE_BYTES", 64)
    for tile in (200, 3000, 40000):  # a row is cut, some rows
        monkeypatch.setattr("kbitq.checkpoint.quantization.tile_bytes", lambda *_, tile=tile: tile)
        made(source, tmp_path / f"{tile}", codec, k)
        for name in ("model.safetensors", "quantization_report.json", "SHA256SUMS"):
            assert (tmp_path / f"{tile}" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("codec", ["compressed-tensors", "gptq", "bnb-nf4-double"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    source = make_source(tmp_path / "model")
    made(source, tmp_path / "whole", codec, 4)
    monkeypatch.setattr("kbitq.checkpoint.passes.journal.SYNC_SECONDS", 0.0)
    monkeypatch.setattr("kbitq.checkpoint.quantization.tile_bytes", lambda *_: 4096)

    def stop(at: Any) -> None:
        if at.bytes_done > 0.8 * at.bytes_total:
            raise KeyboardInterrupt

    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(k=4, codec=codec))
    with pytest.raises(KeyboardInterrupt):
        run(plan, stop)
    assert not (tmp_path / "out").exists()
    report = made(source, tmp_path / "out", codec, 4)
    assert report.reused[0] > 0
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def mixed(folder: Path) -> dict[str, int]:
    """The K of each module that a config names."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    return {module: group["weights"]["num_bits"] for group in said.values() for module in group["targets"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rules_and_budgets_mix_bits_in_compressed_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    source, name = make_source(tmp_path / "model", dtype), "model.layers.{}.mlp.up_proj"
    rules = (TensorRule("*layers.1*", k=8), TensorRule("*layers.2*", keep=True))
    made(source, tmp_path / "rules", "compressed-tensors", 4, rules=rules)
    assert mixed(tmp_path / "rules") == {name.format(0): 4, name.format(1): 8}
    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(codec="compressed-tensors", budget=Budget(bpw=5.5)))
    report = run(choose(plan))
    assert 4 < report.totals["bits_per_weight"] <= 5.5
    assert set(mixed(tmp_path / "out").values()) == {4, 8}
    assert report.totals["sqnr_db"] > 20
    assert verify(tmp_path / "out", source, full=True).ok and verify(tmp_path / "rules", source, full=True).ok
    assert set(values(tmp_path / "out")) == set(values(source))


@pytest.mark.parametrize("codec, k", [("gptq", 8), ("bnb-nf4-double", 4)])
def test_inspect_shows_what_a_folder_holds(tmp_path: Path, codec: str, k: int) -> None:
    source, out = make_source(tmp_path / "model"), tmp_path / "out"
    report = made(source, out, codec, k)
    found = inspect(out)
    assert found.quantized
    assert {r["name"]: (r["verdict"], r["bytes"], r["sqnr_db"]) for r in found.tensors} == {
        r["name"]: (r["verdict"], r["bytes"], r["sqnr_db"]) for r in report.tensors
    }
    for key in ("bits_per_weight", "bytes_in", "bytes_out", "coverage", "worst"):
        assert found.totals[key] == report.totals[key]
    again = inspect(out, against=source)
    assert again.totals["sqnr_db"] == pytest.approx(report.totals["sqnr_db"], abs=0.01)


def test_what_a_format_cannot_hold_is_refused_in_the_plan(tmp_path: Path) -> None:
    odd = make_source(tmp_path / "odd", **{"model.layers.9.mlp.up_proj.weight": torch.ones(64, 200).bfloat16()})
    for codec, k in (("compressed-tensors", 4), ("bnb-nf4", 4)):
        with pytest.raises(SelectionError, match=r"layers\.9.*200 columns"):
            plan_quantize(odd, tmp_path / "out", QuantizeOptions(k=k, codec=codec))
    made(odd, tmp_path / "kept", "bnb-nf4", 4, exclude=("*layers.9*",))
    head = make_source(tmp_path / "head")
    with pytest.raises(SelectionError, match=r"lm_head\.weight is not the weight of one of the model's layers"):
        plan_quantize(head, tmp_path / "out", QuantizeOptions(k=4, codec="gptq", include=("lm_head*",)))
    (head / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SelectionError, match="gpt2 store weights"):
        plan_quantize(head, tmp_path / "out", QuantizeOptions(k=4, codec="bnb-nf4"))
    with pytest.raises(SelectionError, match="49 x 256"):
        narrow = make_source(
            tmp_path / "narrow", **{"model.layers.9.mlp.up_proj.weight": torch.ones(49, 256).bfloat16()}
        )
        plan_quantize(narrow, tmp_path / "out", QuantizeOptions(k=4, codec="gptq"))
    experts = make_source(tmp_path / "moe", **{"model.layers.9.mlp.experts.up_proj": torch.ones(4, 64, 128).bfloat16()})
    with pytest.raises(SelectionError, match="3 dimensions"):
        plan_quantize(experts, tmp_path / "out", QuantizeOptions(k=4, codec="compressed-tensors"))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model")

    def plan(out: str = "out", k: int | None = 4, **options: Any) -> Any:
        return plan_quantize(source, tmp_path / out, QuantizeOptions(k=k, **{"codec": "compressed-tensors", **options}))

    for call, said in (
        (lambda: plan(k=3), "K = 3"),
        (lambda: plan("out.safetensors"), "folder"),
        (lambda: plan(device="cuda"), "CPU"),
        (lambda: plan(codebook="nf"), "levels of its own"),
        (lambda: plan(rules=(TensorRule("*layers.1*", codebook="fit"),)), "levels of its own"),
        (lambda: plan(k=None, budget=Budget(bpw=4.5), codec="gptq"), "one K for all"),
        (lambda: plan(k=8, codec="fp8", calibration=tmp_path), "calibration cannot be used"),
        (lambda: plan(codec="bnb-nf4", importance=tmp_path), "importance cannot be used"),
        (lambda: plan(codec="gptq", rules=(TensorRule("*layers.1*", k=8),)), "rules cannot be used"),
        (lambda: plan(rules=(TensorRule("*layers.1*", codec="trellis"),)), "cannot change the codec"),
        (lambda: plan(k=8, codec="fp8-block", max_memory=100_000), "more than max_memory"),
    ):
        with pytest.raises((SelectionError, CodebookError), match=said):
            call()
    for name in ("compressed-tensors-g48", "compressed-tensors-row", "int8-g32", "bnb-nf4-x", "gptq-g96", "gptq-F32",
                 "bnb-nf4-double:x", "bnb-nf4-double:nan", "bnb-nf4:0.1"):  # fmt: skip
        with pytest.raises(CodecError, match="not known"):
            get_codec(name)
    assert output_codec("planes") is None and output_codec("trellis/128") is None


@pytest.mark.parametrize("change", [{"shape": [48, 100]}, {"dtype": "U8"}, {"codec": "fp8-block"}, {"k": [4]}])
def test_a_row_that_no_run_writes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    made(make_source(tmp_path / "model"), tmp_path / "out", "gptq", 4)
    path = tmp_path / "out" / "quantization_report.json"
    ledger = json.loads(path.read_text())
    ledger["tensors"][1].update(change)
    path.write_text(json.dumps(ledger))
    for job in (inspect, verify):
        with pytest.raises(CheckpointError, match="not one of kbitq's"):
            job(tmp_path / "out")


@pytest.mark.parametrize("name, k", [("gptq-g64", 4), ("int8", 8), ("fp8-block", 8), ("bnb-nf4-double:0.05", 4)])
def test_strips_make_no_difference(monkeypatch: pytest.MonkeyPatch, name: str, k: int) -> None:
    codec, w = get_codec(name), 0.05 * torch.randn(200, 256, generator=torch.Generator().manual_seed(2))
    request = Request(k, torch.ones(1), importance=torch.rand(1, 256) if "bnb" not in name else None)
    found = []
    for strip in (1 << 18, 3000):
        monkeypatch.setattr("kbitq.codecs.outputs.STRIP", strip)
        parts = codec.encode(w, request)
        found.append({**parts, "stats": codec.stats(w, parts)})
    assert all(torch.equal(part, found[1][n]) for n, part in found[0].items())
    error = w.double() - codec.decode(parts, 256, torch.float32).double()
    torch.testing.assert_close(found[1]["stats"][:, 1], error.square().sum(1))


def test_mse_is_better_and_rows_may_be_cut() -> None:
    codec = get_codec("compressed-tensors-g32")
    w = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    errors = {}
    for scale in ("mse", "absmax"):
        parts = codec.encode(w, Request(4, torch.ones(1), scale))
        errors[scale] = codec.stats(w, parts)[:, 1].sum()
        pieces = codec.encode(w.view(18, 32), Request(4, torch.ones(1), scale))
        assert torch.equal(pieces["packed"].view(6, -1), parts["packed"])
        assert torch.equal(codec.block_stats(w, parts)[:, 1].view(6, -1).sum(1), codec.stats(w, parts)[:, 1])
    assert errors["mse"] < 0.97 * errors["absmax"]


@pytest.mark.parametrize(
    "codec, k",
    [("compressed-tensors-g64", 4), ("fp8", 8), ("fp8-block", 8), ("gptq", 4), ("bnb-nf4", 4), ("bnb-nf4-double", 4)],
)
def test_verify(tmp_path: Path, codec: str, k: int) -> None:
    source, out = make_source(tmp_path / "model"), tmp_path / "out"
    made(source, out, codec, k)
    report = verify(out, source, full=True)
    assert report.ok, report.problems
    assert report.totals["made_again"] == 3 and "3 of 3" in " ".join(report.checks)
    other = make_source(tmp_path / "other", torch.float16)
    assert "it is not the source" in verify(out, other).problems[0]
    changed = bytearray((out / "model.safetensors").read_bytes())
    changed[-100] ^= 1
    (out / "model.safetensors").write_bytes(changed)
    problems = " ".join(verify(out, source, full=True).problems)
    assert "SHA256" in problems or "checksum" in problems.lower(), problems
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    assert any("quantization_config is not that" in p for p in verify(out).problems)
