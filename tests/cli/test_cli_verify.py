"""``kbitq verify``: what it says of a checkpoint that is whole, and of one that is not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.program import Kbitq


@pytest.fixture
def folder(kbitq: Kbitq, tiny: Path) -> Path:
    """``tiny`` quantized into a folder of several shards."""
    out = tiny.parent / "made"
    assert kbitq("quantize", tiny, "--k", 3, "-o", out, "--max-shard-size", "50kB", "-q").code == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_all_is_well(kbitq: Kbitq, folder: Path, tiny: Path) -> None:
    code, out, err = kbitq("verify", folder)
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()[:-1]] == ["structure", "values", "checksums"]
    assert out.splitlines()[-1] == f"{folder} is as it should be"
    assert "2 of 2 quantized tensors" in kbitq("verify", folder, "--source", tiny, "--full").out
    assert "1 of 2 quantized tensors" in kbitq("verify", folder, "--source", tiny, "--sample", 1).out
    assert kbitq("verify", folder, "--quiet") == (0, "", "")


def test_a_changed_byte(kbitq: Kbitq, folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    damage(shard)
    code, out, err = kbitq("verify", folder)
    assert code == 1
    assert f"problem: {shard.name}: its SHA-256" in out
    assert err.startswith(f"error: {folder} has 1 problem\nhint: ")
    code, out, _ = kbitq("verify", folder, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert len(json.loads(out)["problems"]) == 1


def test_another_source(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    other = tiny.with_name("other.safetensors")
    shutil.copy(tiny, other)
    data = bytearray(other.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    other.write_bytes(data)
    code, out, _ = kbitq("verify", tiny_k3, "--source", other, "--full")
    assert code == 1
    assert "problem: " in out


def test_the_index_is_repaired(kbitq: Kbitq, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    before = index.read_bytes()
    index.write_text(before.decode().replace("-00001-of", "-00009-of"))
    assert kbitq("verify", folder).code == 1
    code, _, err = kbitq("verify", folder, "--repair-index")
    assert (code, err) == (0, f"note: wrote {index}\n")
    assert index.read_bytes() == before


def test_what_is_not_quantized(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("verify", tiny)
    assert code == 1
    assert "not quantized" in out + err


def test_importance_is_given_to_make_tensors_again(kbitq: Kbitq, tiny: Path, tmp_path: Path) -> None:
    importance, out = tmp_path / "importance.safetensors", tmp_path / "weighted"
    save_file(
        {f"model.layers.{i}.mlp.up_proj.weight": np.linspace(1, 2, 64, dtype=np.float32) for i in (0, 1)}, importance
    )
    assert kbitq("quantize", tiny, "--k", 3, "--importance", importance, "-o", out, "-q").code == 0
    without = kbitq("verify", out, "--source", tiny, "--full").out
    assert "source: 0 of 2 quantized tensors made again and compared" in without
    assert "not made again: 2 measured tensors, made with an importance file" in without
    given = kbitq("verify", out, "--source", tiny, "--full", "--importance", importance)
    assert given.code == 0
    assert "source: 2 of 2 quantized tensors made again" in given.out
    assert "not made again" not in given.out
    code, _, err = kbitq("verify", out, "--importance", importance)
    assert (code, "--importance is for making tensors again with --source" in err) == (2, True)


@pytest.mark.parametrize("options", [["--full"], ["--sample", "3"], ["--full", "--sample", "3", "--source", "x"]])
def test_options_that_do_not_go_together(options: list[str], kbitq: Kbitq, tiny_k3: Path) -> None:
    code, out, err = kbitq("verify", tiny_k3, *options)
    assert (code, out) == (2, "")
    assert "--full and --sample" in err


def test_an_ordinary_checkpoint_is_not_called_damaged(kbitq: Kbitq, tiny: Path) -> None:
    code, out, err = kbitq("verify", tiny)
    assert (code, out) == (1, "")
    assert "is not quantized by kbitq, so there is nothing to verify" in err
    assert f"kbitq quantize {tiny} --k 3" in err
    assert "do not use it" not in err
