"""Files of format version 2 that say what is not so: each ends in a sentence that names the tensor, in every reader."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, inspect, plan_quantize, run, verify
from kbitq.errors import CodecError, FormatError

NAME = "layers.0.up_proj.weight"


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    save_file({NAME: torch.randn(64, 200)}, tmp_path / "m.safetensors")
    out = tmp_path / "q.safetensors"
    run(plan_quantize(tmp_path / "m.safetensors", out, QuantizeOptions(k=2, codec="trellis/128")))
    return out


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """The file with another header; ``change`` is given it, and the metadata of the tensor."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    said = json.loads(header["__metadata__"]["kbitq"])
    change(header, said["tensors"][NAME])
    header["__metadata__"]["kbitq"] = json.dumps(said)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    return path


WRONG = {
    "a scale block that is a text": lambda h, t: t.update(scale_block="128"),
    "a scale block that is true": lambda h, t: t.update(scale_block=True),
    "a scale block that is none": lambda h, t: t.update(scale_block=None),
    "a scale block of 0": lambda h, t: t.update(scale_block=0),
    "a scale block below 0": lambda h, t: t.update(scale_block=-128),
    "a scale block that no codec has": lambda h, t: t.update(scale_block=64),
    "a scale block without end": lambda h, t: t.update(scale_block=10**40),
    "the other scale block": lambda h, t: t.pop("scale_block"),
    "a codec that there is not": lambda h, t: t.update(codec="trellis2"),
    "a codec with a path": lambda h, t: t.update(codec="../planes"),
    "the other codec": lambda h, t: (t.update(codec="planes"), t.pop("scale_block")),
    "a codec of planes with wide scales": lambda h, t: t.update(codec="planes"),
    "K = 0": lambda h, t: t.update(k=0),
    "K = 5": lambda h, t: t.update(k=5),
    "K of another size": lambda h, t: t.update(k=3),
    "K that is true": lambda h, t: t.update(k=True),
    "another shape": lambda h, t: t.update(shape=[64, 2000]),
    "a codebook of another size": lambda h, t: h[f"{NAME}_codebook"].update(shape=[4, 4]),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(quantized: Path, what: str) -> None:
    path = changed(quantized, WRONG[what])
    for reader in (
        inspect,
        lambda p: dequantize_checkpoint(p, p.with_name("out.safetensors")),
        lambda p: inspect(p, against=p.with_name("m.safetensors")),
    ):
        with pytest.raises((FormatError, CodecError)) as found:
            reader(path)
        assert len(str(found.value)) < 400
    try:
        report = verify(path)
    except (FormatError, CodecError):
        return
    assert report.problems


def test_the_file_as_it_is_has_no_problem(quantized: Path) -> None:
    path = changed(quantized, lambda header, tensor: None)
    assert verify(path).problems == []
    seven_blocks, two_scales = 7 * 2 * 32, 2 * 8  # bits of a row of 200 weights
    assert inspect(path).totals["bits_per_weight"] == pytest.approx((seven_blocks + two_scales) / 200)
