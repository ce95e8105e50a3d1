"""Sources that cannot be trusted, or are not what they seem: every refusal says which file and tensor, and why."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import bytes_of, entry, gaussian, model_tensors, raw_file, write_folder
from kbitq.checkpoint import QuantizeOptions, RunReport, plan_quantize
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.checkpoint.source.storage import ByteFile, LocalFolderStorage
from kbitq.errors import CheckpointError, FormatError

Quantize = Callable[..., RunReport]

HEADERS = {
    "empty file": (None, "has only 0 bytes"),
    "length beyond the file": ((b"{}", b"", 50), "truncated"),
    "100 MB header": ((b"{}", b"", 100_000_001), "100,000,001 bytes of header"),
    "text file": ((b"", b"", int.from_bytes(b"# hello\n", "little")), "not a safetensors file"),
    "bad JSON": ((b'{"a": ', b""), "not valid JSON"),
    "not UTF-8": ((b'{"\xff": 1}', b""), "not valid JSON"),
    "not an object": ((b"[1]", b""), "not a JSON object"),
    "deep nesting": ((b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "nested too deeply"),
    "lone surrogate": ((b'{"\\ud800": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b""), "not valid JSON"),
    "huge number": ((b'{"a": ' + b"9" * 5000 + b"}", b""), "not valid JSON"),
    "twice the same name": (
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        "the key 'a' occurs twice",
    ),
    "entry is no object": (({"a": 3}, b""), "tensor a: its header entry is not an object"),
    "no dtype": (({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"), "tensor a: it has no dtype"),
    "negative size": (({"a": entry("U8", [-1], 0, 1)}, b"x"), "tensor a: its shape"),
    "boolean size": (({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"), "tensor a: its shape"),
    "product overflows": (({"a": entry("U8", [2**40, 2**40], 0, 1)}, b"x"), "more elements than a file can hold"),
    "overflow hidden by a zero": (({"a": entry("U8", [2**70, 0], 0, 0)}, b""), "more elements than a file can hold"),
    "descending offsets": (({"a": entry("U8", [1], 1, 0)}, b"x"), "tensor a: its data_offsets"),
    "wrong size for the shape": (
        ({"a": entry("F32", [2], 0, 4)}, b"abcd"),
        "4 bytes do not fit F32 elements of shape [2]",
    ),
    "half a byte": (({"a": entry("F4", [3], 0, 2)}, b"ab"), "do not fit F4"),
    "overlap": (({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"abcdef"), "tensor b overlaps"),
    "gap": (({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"), "tensor b leaves a gap"),
    "gap at the start": (({"a": entry("U8", [1], 1, 2)}, b"ab"), "tensor a leaves a gap"),
    "truncated data": (({"a": entry("U8", [9], 0, 9)}, b"abc"), "truncated: tensor a ends at byte"),
    "trailing bytes": (({"a": entry("U8", [1], 0, 1)}, b"abc"), "2 bytes that belong to no tensor"),
    "metadata of numbers": (({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "no tensors": (({}, b""), "holds no tensors"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies(tmp_path: Path, case: str) -> None:
    made, sentence = HEADERS[case]
    path = tmp_path / "m.safetensors"
    if made is None:
        path.write_bytes(b"")
    else:
        raw_file(path, *made)
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(path)
    assert sentence in str(e.value) and "m.safetensors" in str(e.value)


def test_names_are_shown_escaped(tmp_path: Path) -> None:
    raw_file(tmp_path / "m.safetensors", {"a\u001b[31m\n" + "b" * 500: entry("U8", [2], 0, 1)}, b"x")
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(tmp_path / "m.safetensors")
    assert "\\u001b[31m\\n" in str(e.value) and "\x1b" not in str(e.value) and len(str(e.value)) < 500


def test_missing_and_strange_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "no.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        open_checkpoint(tmp_path / "empty")
    os.mkfifo(tmp_path / "fifo.safetensors")
    with pytest.raises(CheckpointError, match="neither a regular file nor a folder"):
        open_checkpoint(tmp_path / "fifo.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint("bad\0name")


def test_a_linked_file_may_be_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(folder / "model-00001-of-00002.safetensors")
    assert open_checkpoint(tmp_path / "link.safetensors").tensors


def test_folder_with_nested_weights_only(tmp_path: Path) -> None:
    write_folder(tmp_path / "m" / "unet", model_tensors())
    with pytest.raises(CheckpointError, match=r"only in sub-folders \(unet\)") as e:
        open_checkpoint(tmp_path / "m")
    assert "m/unet" in (e.value.hint or "")


def test_pickles_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="only pickles"):
        open_checkpoint(tmp_path)


def test_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(folder)


def test_missing_shard_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(folder).headers) == 2
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        open_checkpoint(folder)


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "..", "a\\b", "a\0b", 7]
)
def test_an_index_name_that_leaves_the_folder(folder: Path, name: object) -> None:
    edit_index(folder, lambda m: m.__setitem__("lm_head.weight", name))
    with pytest.raises(CheckpointError, match="leaves the folder"):
        open_checkpoint(folder)


def test_an_index_that_names_a_link_out(folder: Path, tmp_path: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="is a link to"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["link out", "link in", "dangling", "fifo", "folder link"])
def test_strange_files_in_a_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    path = folder / "extra.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "folder").mkdir()
        target = {"link out": "secret", "dangling": "none", "folder link": "folder"}.get(kind)
        path.symlink_to(tmp_path / target if target else folder / "config.json")
    with pytest.raises(CheckpointError, match=r"extra\.json"):
        open_checkpoint(folder)


def test_stale_index(folder: Path) -> None:
    edit_index(folder, lambda m: m.update({"gone.weight": "model-00001-of-00002.safetensors"}))
    with pytest.raises(CheckpointError, match=r"gone\.weight is said to be in .*, but no shard has it"):
        open_checkpoint(folder)


def test_stray_shard(folder: Path) -> None:
    save_file({"x.weight": gaussian(4, 4)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="is not named by"):
        open_checkpoint(folder)


def test_tensors_that_the_index_forgets_are_taken_along(folder: Path) -> None:
    edit_index(folder, lambda m: m.pop("lm_head.weight"))
    checkpoint = open_checkpoint(folder)
    assert "lm_head.weight" in checkpoint.tensors and "1 tensors are not in" in " ".join(checkpoint.notes)


def test_duplicate_tensor_over_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(second)
    tensors[next(iter(load_file(first)))] = gaussian(4, 4)
    save_file(tensors, second)
    with pytest.raises(CheckpointError, match="is in both model-00001-of-00002"):
        open_checkpoint(folder)


def test_two_indexes_and_several_files(folder: Path) -> None:
    (folder / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="more than one index"):
        open_checkpoint(folder)
    for path in folder.glob("*.index.json"):
        path.unlink()
    save_file({"x.weight": gaussian(4, 4)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match="3 safetensors files and no index"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a":1,"a":2}', b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_bad_json_beside_the_weights(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def hub_cache(tmp_path: Path, source: Path) -> Path:
    """The files of ``source`` as a Hub cache holds them: blobs, and a snapshot of links."""
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / "abc123"
    (repo / "blobs").mkdir(parents=True)
    for i, (name, data) in enumerate(bytes_of(source).items()):
        (repo / "blobs" / f"blob{i}").write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repo / "blobs" / f"blob{i}", link.parent))
    return snapshot


def test_links_of_a_hub_cache_are_followed(
    folder: Path, tmp_path: Path, quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(tmp_path, folder)
    monkeypatch.chdir(tmp_path)
    report = quantize(snapshot)
    assert report.out == Path("tiny-kbitq-k3")  # never into the cache
    quantize(folder, tmp_path / "direct")
    named = {"quantization_report.json", "README.md", "SHA256SUMS"}  # they name a source on the Hub, and its commit
    direct, cached = bytes_of(tmp_path / "direct"), bytes_of(tmp_path / "tiny-kbitq-k3")
    assert direct.keys() == cached.keys()
    assert {name for name in direct if direct[name] != cached[name]} == named


def test_links_of_a_hub_cache_that_leave_its_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, folder)
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to"):
        open_checkpoint(snapshot)


def test_unknown_dtypes_are_carried_byte_for_byte(tmp_path: Path, quantize: Quantize) -> None:
    header = {
        "a.weight": entry("F32", [64, 64], 0, 64 * 64 * 4),
        "b.weight": entry("F4", [64, 64], 64 * 64 * 4, 64 * 64 * 4 + 2048),
        "c.weight": entry("Q7_NEW", [100, 100], 64 * 64 * 4 + 2048, 64 * 64 * 4 + 2048 + 777),
    }
    data = gaussian(64, 64, dtype=torch.float32).numpy().tobytes() + os.urandom(2048 + 777)
    raw_file(tmp_path / "m.safetensors", header, data)
    report = quantize(tmp_path / "m.safetensors", tmp_path / "out.safetensors")
    reasons = {t["name"]: t["reason"] for t in report.tensors}
    assert reasons["b.weight"] == "F4 is carried byte for byte" and "Q7_NEW" in reasons["c.weight"]
    raw = (tmp_path / "out.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    out = json.loads(raw[8 : 8 + length])
    for name in ("b.weight", "c.weight"):
        start, end = (8 + length + o for o in out[name]["data_offsets"])
        assert (out[name]["dtype"], out[name]["shape"]) == (header[name]["dtype"], header[name]["shape"])
        first, last = header[name]["data_offsets"]
        assert raw[start:end] == data[first:last]


FOREIGN = {
    "GPTQ": {
        "a.qweight": torch.zeros(4, 4, dtype=torch.int32),
        "a.scales": torch.ones(1, 4),
        "a.g_idx": torch.zeros(4),
    },
    "AWQ": {"a.qweight": torch.zeros(4, 4, dtype=torch.int32), "a.scales": torch.ones(1, 4)},
    "bitsandbytes": {"a.weight": torch.zeros(8, 1, dtype=torch.uint8), "a.weight.absmax": torch.ones(2)},
    "bitsandbytes (int8)": {"a.weight": torch.zeros(2, 8, 8, dtype=torch.int8), "a.SCB": torch.ones(8)},
    "compressed-tensors": {"a.weight_packed": torch.zeros(4, 4, dtype=torch.int32), "a.weight_scale": torch.ones(4, 1)},
    "ModelOpt": {"a.weight": torch.zeros(8, 8, dtype=torch.uint8), "a.weight_scale": torch.ones(8, 1)},
    "MXFP4": {"a_blocks": torch.zeros(2, 2, dtype=torch.uint8), "a_scales": torch.zeros(2, dtype=torch.uint8)},
}


@pytest.mark.parametrize("tool", FOREIGN)
def test_other_tools_are_recognised_by_their_tensors(tmp_path: Path, tool: str) -> None:
    save_file({**FOREIGN[tool], "big.weight": gaussian(128, 128)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="already quantized with") as e:
        plan_quantize(tmp_path / "m.safetensors", None, QuantizeOptions(k=3))
    assert tool.split()[0] in str(e.value) and "original" in (e.value.hint or "")


@pytest.mark.parametrize(
    ("config", "tool"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "novel"}}, "novel"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8"),
    ],
)
def test_other_tools_are_recognised_by_the_config(tmp_path: Path, config: dict, tool: str) -> None:
    tensors = {"a.weight": gaussian(128, 128)}
    if tool == "FP8":
        tensors["b.weight"] = gaussian(128, 128).to(torch.float8_e4m3fn)  # without a scale
    source = write_folder(tmp_path / "m", tensors)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=tool):
        plan_quantize(source, None, QuantizeOptions(k=3))


def test_a_quantized_file_without_metadata_is_recognised(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out")
    save_file(load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "stripped.safetensors")
    with pytest.raises(CheckpointError, match="already quantized by kbitq"):
        plan_quantize(tmp_path / "stripped.safetensors", None, QuantizeOptions(k=3))
    with pytest.raises(FormatError, match="says what it was"):
        from kbitq import load_file as load

        load(tmp_path / "stripped.safetensors")


def test_an_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is some megabytes for a large model, and each read of a distant one is a request."""
    source = write_folder(tmp_path / "model", model_tensors(), shards=2)
    opened: list[str] = []
    real = LocalFolderStorage.open

    def noted(storage: LocalFolderStorage, name: str) -> ByteFile:
        opened.append(name)
        return real(storage, name)

    monkeypatch.setattr(LocalFolderStorage, "open", noted)
    index = "model.safetensors.index.json"
    checkpoint = open_checkpoint(source)
    assert opened.count(index) == 1
    assert checkpoint.weight_map == json.loads((source / index).read_text())["weight_map"]
