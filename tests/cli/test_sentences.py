"""What an attack found to end in an internal error: arguments and files of no sense are answered with a sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.program import Kbitq, Result
from kbitq.checkpoint.source.header import LENGTH_BYTES


def check_sentence(done: Result, *words: str) -> None:
    assert done.code in (1, 2), done
    assert done.err.startswith("error: ")
    assert "internal error" not in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 2
    for word in words:
        assert word in done.err


def with_codebooks(path: Path, levels: np.ndarray) -> Path:
    """A quantized file with other codebooks."""
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    header = json.loads(raw[LENGTH_BYTES : LENGTH_BYTES + length])
    for name, entry in header.items():
        if name.endswith("codebook"):
            begin, end = (LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
            raw[begin:end] = levels.astype("<f4").tobytes()
    changed = path.with_name("changed.safetensors")
    changed.write_bytes(raw)
    return changed


@pytest.mark.parametrize("largest", [3e38, 1e20, 1e-44])
def test_levels_beyond_a_logarithm(largest: float, tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    changed = with_codebooks(tiny_k3, np.linspace(-largest, largest, 8))
    for arguments in (["inspect", changed, "--against", tiny], ["inspect", changed, "--against", tiny, "--json"],
                      ["inspect", changed, "--diff", tiny_k3, "--against", tiny]):  # fmt: skip
        done = kbitq(*arguments)
        assert (done.code, done.err) == (0, "")
    done = kbitq("verify", changed, "--source", tiny)
    assert done.code == 1
    assert "is not what its source gives" in done.out
    assert "internal error" not in done.err


def test_circles_of_links(tiny: Path, tiny_k3: Path, kbitq: Kbitq) -> None:
    circle, other = tiny.with_name("circle"), tiny.with_name("circle.safetensors")
    circle.symlink_to("circle")
    other.symlink_to("circle")
    for out in (circle, other, circle / "below", circle / "x.safetensors"):
        check_sentence(kbitq("quantize", tiny, "--k", 3, "-o", out))
        check_sentence(kbitq("dequantize", tiny_k3, "-o", out))
        check_sentence(kbitq("plan", tiny, "--k", 3, "--write-recipe", out))
    check_sentence(kbitq("quantize", circle, "--k", 3))
    assert sorted(p.name for p in tiny.parent.iterdir()) == sorted(
        ("circle", "circle.safetensors", tiny.name, tiny_k3.name)
    )


@pytest.mark.parametrize(
    "number", ["1e308", "9" * 400, "1" * 5000, "-1", "nan", "inf", "0", "1e400", "0x10", "", "\u0663"]
)
def test_numbers(number: str, tiny: Path, kbitq: Kbitq) -> None:
    options = (["--bpw", number], ["--size", number], ["--size", f"{number}GB"], ["--k", number],
               ["--k", "3", "--max-memory", number], ["--k", "3", "--max-shard-size", number],
               ["--k", "3", "--min-coverage", f"{number}%"], ["--bpw", "4", "--weight", f"*={number}"])  # fmt: skip
    for option in options:
        done = kbitq("plan", tiny, *option, "--quiet")
        if done.code:
            check_sentence(done)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"3":' * 100_000 + "1" + "}" * 100_000,
        f"[{'1' * 5000}]",
        "[[[1]]]",
        '["a"]',
        "null",
    ],
)
def test_codebooks_of_no_sense(text: str, tiny: Path, kbitq: Kbitq) -> None:
    levels = tiny.with_name("levels.json")
    levels.write_text(text)
    check_sentence(kbitq("quantize", tiny, "--k", 3, "--codebook", levels), "levels.json")


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 100_000 + "]" * 100_000, "k = 99999999999999999999999", "k = -1", "k = 3\nscale = 'x'"]
)
def test_recipes_of_no_sense(text: str, tiny: Path, kbitq: Kbitq) -> None:
    recipe = tiny.with_name("recipe.toml")
    recipe.write_text(text)
    check_sentence(kbitq("quantize", tiny, "--recipe", recipe))


def test_importance_of_no_sense(tiny: Path, kbitq: Kbitq) -> None:
    path = tiny.with_name("importance.safetensors")
    for value in (np.float32("nan"), np.float32(-1), np.float32("inf")):
        save_file({"model.layers.0.mlp.up_proj.weight": np.full(64, value)}, path)
        check_sentence(kbitq("quantize", tiny, "--k", 3, "--importance", path), "importance.safetensors")
