"""``verify`` finds what is wrong, ``repair_index`` mends an index."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import bytes_of, gaussian, model_tensors, raw_file, read_header, write_folder
from kbitq.checkpoint import RunReport, repair_index, verify
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.errors import CheckpointError, ImportanceError

Quantize = Callable[..., RunReport]


@pytest.fixture
def out(folder: Path, tmp_path: Path, quantize: Quantize) -> Path:
    quantize(folder, tmp_path / "out", max_shard_size=20_000)
    return tmp_path / "out"


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    _, header, data = read_header(path)
    change(header)
    raw_file(path, header, data)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def holder(out: Path, tensor: str) -> Path:
    return out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def poke(out: Path, tensor: str, position: int, data: bytes) -> None:
    """Overwrite bytes of a tensor in place."""
    path = holder(out, tensor)
    text, header, _ = read_header(path)
    raw = bytearray(path.read_bytes())
    at = 8 + len(text) + header[tensor]["data_offsets"][0] + position
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize("options", [{}, {"k": 5}, {"scale": "absmax"}, {"codebook": "nf"}, {"codebook": "fit"}])
def test_an_honest_output(folder: Path, tmp_path: Path, quantize: Quantize, options: dict) -> None:
    report = quantize(folder, tmp_path / "out", **options)
    checked = verify(tmp_path / "out", folder, full=True)
    assert checked.problems == []
    assert [c.split(":")[0] for c in checked.checks] == ["structure", "values", "checksums", "source", "kept"]
    assert (checked.totals["compared"], checked.totals["made_again"]) == (6, 6)
    assert checked.not_made_again == {}
    assert checked.checks[-1] == "kept: 11 of 11 kept tensors compared with the source"
    assert checked.totals["sqnr_db"] == pytest.approx(report.totals["sqnr_db"], abs=1e-9)


def test_a_single_file(tmp_path: Path, quantize: Quantize) -> None:
    save_file(model_tensors(), tmp_path / "m.safetensors")
    quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    assert verify(tmp_path / "q.safetensors", tmp_path / "m.safetensors", full=True).ok


def test_blocks_are_counted(tmp_path: Path, quantize: Quantize) -> None:
    w = gaussian(64, 64)
    w[:16] = 0
    save_file({"a.weight": w}, tmp_path / "m.safetensors")
    quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors", scale="absmax")
    totals = verify(tmp_path / "q.safetensors").totals
    assert (totals["blocks"], totals["zero_blocks"], totals["saturated_blocks"]) == (128, 32, 0)


Q = "model.layers.0.self_attn.q_proj.weight"


def drop(header: dict, name: str) -> None:
    """Take a tensor out by renaming it: the bytes stay where they are."""
    renamed = {("gone" if n == name else n): v for n, v in header.items()}
    header.clear()
    header.update(renamed)


def edit_meta(out: Path, old: str, new: str) -> None:
    """Change the kbitq metadata of a shard, a JSON text in the header."""
    edit_header(
        holder(out, Q + "_packed"),
        lambda h: h["__metadata__"].update(kbitq=h["__metadata__"]["kbitq"].replace(old, new)),
    )


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a triple": (
        lambda out: edit_header(holder(out, Q + "_absmax"), lambda h: drop(h, Q + "_absmax")),
        "said to be in",
    ),
    "other version": (
        lambda out: edit_meta(out, '"format_version":1', '"format_version":3'),
        "format_version 3 is not known",
    ),
    "wrong K in the metadata": (
        lambda out: edit_meta(out, '"k":3', '"k":4'),
        "metadata says K = 4",
    ),
    "K out of range": (
        lambda out: edit_meta(out, '"k":3', '"k":9'),
        "K = 9 is outside",
    ),
    "codebook not finite": (lambda out: poke(out, Q + "_codebook", 0, b"\0\0\xc0\x7f"), "not finite"),
    "codebook not ascending": (lambda out: poke(out, Q + "_codebook", 0, b"\0\0\x80\x41"), "do not ascend"),
    "flipped bit": (lambda out: poke(out, Q + "_packed", 77, b"\x55"), "SHA-256"),
    "missing file": (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json is in SHA256SUMS, but not here"),
    "strange file": (lambda out: (out / "new.txt").write_text("x"), "new.txt is here, but not in SHA256SUMS"),
    "bad sums": (lambda out: (out / "SHA256SUMS").write_text("what\n"), "'what' is not a checksum"),
    "config without quantization": (
        lambda out: edit_json(out / "config.json", lambda c: c.pop("quantization_config")),
        "has no quantization_config",
    ),
    "config with another K": (
        lambda out: edit_json(out / "config.json", lambda c: c["quantization_config"].update(k=4)),
        "k of quantization_config does not fit",
    ),
    "config of another version": (
        lambda out: edit_json(out / "config.json", lambda c: c["quantization_config"].update(format_version=7)),
        "format_version 7 is not known",
    ),
    "index forgets a tensor": (
        lambda out: edit_json(out / "model.safetensors.index.json", lambda i: i["weight_map"].pop(Q + "_packed")),
        f"{Q}_packed is not in it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found(out: Path, case: str) -> None:
    damage, sentence = BROKEN[case]
    damage(out)
    try:
        problems = verify(out).problems
    except CheckpointError as error:  # so broken that it cannot be opened
        problems = [str(error)]
    assert any(sentence in p for p in problems), problems


def test_another_source_is_noticed(out: Path, folder: Path, tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors[Q][5, 5] += 1
    tensors["model.embed_tokens.weight"][0, 0] += 1
    tensors["new.weight"] = gaussian(4, 4)
    other = write_folder(tmp_path / "other", tensors)
    problems = verify(out, other, full=True).problems
    assert any(p.startswith(f"tensor {Q} is not what its source gives") for p in problems)
    assert any(p.startswith(f"tensor {Q}: its sqnr_db is") for p in problems)
    assert "tensor model.embed_tokens.weight was kept, but differs from the source" in problems
    assert any("tensor new.weight" in p and "is missing" in p for p in problems)
    assert all("down_proj" not in p for p in problems)


def test_a_lie_in_the_statistics_is_noticed(out: Path, folder: Path) -> None:
    path = holder(out, Q + "_packed")
    _, header, _ = read_header(path)
    meta = json.loads(header["__metadata__"]["kbitq"])
    told = meta["tensors"][Q]["sqnr_db"]
    edit_header(
        path,
        lambda h: h["__metadata__"].update(kbitq=h["__metadata__"]["kbitq"].replace(f"{told:.4f}", f"{told + 1:.4f}")),
    )
    assert any(f"its sqnr_db is {told:.4f}, not {told + 1:.4f}" in p for p in verify(out, folder, full=True).problems)


def test_a_sample_compares_some(out: Path, folder: Path) -> None:
    checked = verify(out, folder, sample=2)
    assert checked.totals["compared"] == 2
    assert "source: 2 of 6 quantized tensors made again and compared, the errors of 2 measured again" in checked.checks
    assert "kept: 0 of 11 kept tensors compared with the source" in checked.checks


@pytest.mark.parametrize("damage", ["stale", "missing", "forgetful", "broken"])
def test_repair_index(out: Path, damage: str) -> None:
    whole = bytes_of(out)
    path = out / "model.safetensors.index.json"
    if damage == "missing":
        path.unlink()
    elif damage == "broken":
        path.write_text("{")
    elif damage == "stale":
        edit_json(path, lambda i: i["weight_map"].update({"gone": "model-00001-of-00009.safetensors"}))
    else:
        edit_json(path, lambda i: i["weight_map"].popitem())
    assert repair_index(out) == path
    assert bytes_of(out) == whole and verify(out).ok


def test_repair_of_a_single_file_removes_a_stale_index(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out")
    assert repair_index(tmp_path / "out") is None
    assert verify(tmp_path / "out").ok


def test_repair_with_a_shard_missing(out: Path) -> None:
    (out / sorted(n for n in bytes_of(out) if n.startswith("model-00002"))[0]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* is missing"):
        repair_index(out)


def test_nothing_to_verify(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="not quantized by kbitq, so there is nothing to verify"):
        verify(folder)
    with pytest.raises(CheckpointError):
        verify(folder / "no")


def test_fp8_kept_and_quantized(tmp_path: Path, quantize: Quantize) -> None:
    w = gaussian(256, 256, seed=1, dtype=torch.float32)
    tensors = {
        "a.weight": w.to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.rand(2, 2) + 0.5,
        "lm_head.weight": w.to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": torch.rand(2, 2) + 0.5,
    }  # fmt: skip
    source = write_folder(tmp_path / "fp8", tensors)
    quantize(source, tmp_path / "out")
    assert verify(tmp_path / "out", source, full=True).problems == []


# --- tensors that were made with importance -------------------------------------------------------


@pytest.fixture
def importance(tmp_path: Path) -> Path:
    """For two of the six tensors, one of them with a row for each expert."""
    path = tmp_path / "importance.safetensors"
    save_file({Q: torch.rand(64) + 0.01, "model.layers.0.mlp.experts.gate_up_proj": torch.rand(4, 64) + 0.01}, path)
    return path


def test_what_was_not_made_again_is_said(folder: Path, tmp_path: Path, quantize: Quantize, importance: Path) -> None:
    quantize(folder, tmp_path / "out", importance=importance)
    checked = verify(tmp_path / "out", folder, full=True)
    assert checked.problems == []
    assert set(checked.not_made_again) == {Q, "model.layers.0.mlp.experts.gate_up_proj"}
    assert "source: 4 of 6 quantized tensors made again and compared, the errors of 6 measured again" in checked.checks
    assert checked.checks[-1].startswith("not made again: 2 measured tensors, made with an importance file, which was")
    assert checked.to_json()["not_made_again"] == checked.not_made_again


def test_with_the_importance_file_all_are_made_again(
    folder: Path, tmp_path: Path, quantize: Quantize, importance: Path
) -> None:
    quantize(folder, tmp_path / "out", importance=importance, max_shard_size=20_000)
    checked = verify(tmp_path / "out", folder, full=True, importance=importance)
    assert (checked.problems, checked.not_made_again) == ([], {})
    assert checked.totals["made_again"] == 6
    poke(tmp_path / "out", Q + "_packed", 0, b"\x12\x34\x56\x78")
    again = verify(tmp_path / "out", folder, full=True, importance=importance).problems
    assert f"tensor {Q} is not what its source gives when it is quantized again" in again


def test_another_importance_file_is_refused(folder: Path, tmp_path: Path, quantize: Quantize, importance: Path) -> None:
    quantize(folder, tmp_path / "out", importance=importance)
    other = tmp_path / "other.safetensors"
    save_file({Q: torch.ones(64)}, other)
    with pytest.raises(ImportanceError, match=r"is not the importance file that .* was quantized with"):
        verify(tmp_path / "out", folder, importance=other)
    quantize(folder, tmp_path / "plain")
    with pytest.raises(ImportanceError, match="was quantized without an importance file"):
        verify(tmp_path / "plain", folder, importance=importance)


def test_an_unknown_scale_rule_is_said(out: Path, folder: Path) -> None:
    edit_meta(out, '"scale":"mse"', '"scale":"new"')
    checked = verify(out, folder, full=True)
    assert checked.not_made_again[Q] == "made with the scale rule new, which needs more than the source"


def test_a_number_where_there_is_none_is_noticed(tmp_path: Path, quantize: Quantize) -> None:
    """Zeros have no SQNR: a recorded one is a lie."""
    source, made = tmp_path / "m.safetensors", tmp_path / "q.safetensors"
    save_file({"a.weight": gaussian(64, 64), "b.weight": torch.zeros(64, 64)}, source)
    quantize(source, made)
    assert verify(made, source, full=True).problems == []
    edit_header(made, lambda h: h["__metadata__"].update(kbitq=h["__metadata__"]["kbitq"].replace("null", "12.5")))
    assert verify(made, source, full=True).problems == [
        "tensor b.weight: its sqnr_db is said to be 12.5000, but is not finite: "
        "the tensor is all zeros, or has no error, or no signal"
    ]
