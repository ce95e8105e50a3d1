"""Weights in other tools' formats decode to what the formats' own packages compute: fixtures made by those packages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kbitq
from formats.makers.cases import digest
from formats.reading import PLAIN, decoded, write_folder
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, inspect, plan_quantize, run, verify
from kbitq.checkpoint.source.recognise import open_source

DATA = Path(__file__).parent / "data"


def fixtures() -> Iterator[Any]:
    for path in sorted(DATA.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            cases = json.loads(file.metadata()["cases"])
        for number, (name, case) in enumerate(cases.items()):
            yield pytest.param(path, number, case, id=f"{path.stem}: {name}")


def laid_out(place: Path, path: Path, number: int, case: dict[str, Any]) -> Path:
    """The folder of a fixture."""
    with safe_open(path, framework="pt") as file:
        mine = [name for name in file.keys() if name.startswith(f"{number}|")]  # noqa: SIM118 - not a mapping
        tensors = {name.partition("|")[2]: file.get_tensor(name) for name in mine}
    return write_folder(place, tensors, case["config"], case["metadata"])


@pytest.mark.parametrize(("path", "number", "case"), list(fixtures()))
def test_as_the_package_decodes_them(tmp_path: Path, path: Path, number: int, case: dict[str, Any]) -> None:
    folder = laid_out(tmp_path / "m", path, number, case)
    for tile_bytes in (1, 1 << 20):
        found = decoded(folder, tile_bytes)
        assert {n: [str(t.dtype), list(t.shape), digest(t)] for n, t in found.items()} == case["decoded"]
    assert open_source(folder).tensors.keys() == {*case["decoded"], PLAIN}


def gptq_folder(place: Path) -> Path:
    path, number, case = next(p.values for p in fixtures() if p.id == "gptq: 4 bits, 64x128, group 64, act order, v1")
    return laid_out(place, path, number, case)


def test_every_job_takes_such_a_source(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "m")
    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3))
    assert plan.to_json()["source_formats"] == {"GPTQ, 4 bits, groups of 64": 1}
    (note,) = [n for n in plan.notes if "quantized already" in n]
    assert "GPTQ, 4 bits" in note
    report = run(plan)
    assert report.totals["bytes_in"] == 64 * 128 // 2 + 2 * 64 * (4 // 8 + 2) + 2 * 64 // 2 + 128 * 4 + 64 * 4
    weight = decoded(source, 1)["model.a.weight"]
    again = kbitq.quantize(weight, 3, name="model.a.weight")
    assert kbitq.load_file(tmp_path / "out")["model.a.weight"].packed.equal(again.packed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "kbitq" and config["model_type"] == "tiny"
    ledger = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert ledger["source_formats"] == {"GPTQ, 4 bits, groups of 64": 1}
    assert ledger["dropped"]["model.a.qweight"] == "folded into model.a.weight"
    assert not verify(tmp_path / "out", source=source, full=True).problems
    assert inspect(source, ks=(3,)).totals["would"][3]["sqnr_db"] > 10
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    assert open_source(tmp_path / "back").tensors["model.a.weight"].dtype == "F16"


def test_a_weight_that_is_kept_is_written_decoded(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "m")
    more = {"b.weight": torch.randn(64, 64)}
    with safe_open(source / "model.safetensors", framework="pt") as file:
        more.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
    save_file(more, source / "model.safetensors")
    run(plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3, exclude=("*a.weight",), max_memory=1_000_001)))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("model.a.weight").equal(decoded(source, 1)["model.a.weight"])
    assert not verify(tmp_path / "out", source=source, full=True).problems
