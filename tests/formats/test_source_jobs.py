"""A source in another tool's format through the jobs: killed and resumed, over the network, within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from formats.reading import decoded, write_folder
from helpers.checkpoints import bytes_of
from helpers.gguf_file import f32, finite_blocks, gguf_bytes
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.checkpoint.passes import journal
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.storage import ByteFile, LocalFolderStorage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose.knapsack import Budget
from kbitq.format.ggml_types import BY_NAME
from kbitq.ops.code_stream import pack_codes

ROWS, COLS, GROUP = 384, 512, 64


def gptq_folder(place: Path) -> Path:
    """Two weights, one of them in act order."""
    random, tensors = torch.Generator().manual_seed(0), {}
    for name in ("model.a", "model.b"):
        codes = torch.randint(0, 16, (ROWS, COLS), dtype=torch.uint8, generator=random)
        index = torch.arange(COLS, dtype=torch.int32) // GROUP
        tensors |= {
            f"{name}.qweight": pack_codes(codes, 4).t().contiguous(),
            f"{name}.qzeros": pack_codes(torch.full((COLS // GROUP, ROWS), 7, dtype=torch.uint8), 4),
            f"{name}.scales": (torch.rand(COLS // GROUP, ROWS, generator=random) * 0.01).half(),
            f"{name}.g_idx": index[torch.randperm(COLS, generator=random)] if name == "model.b" else index,
        }  # fmt: skip
    return write_folder(place, tensors, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {})


def gguf_file(place: Path) -> Path:
    """Two weights, the rows of one in llama.cpp's order, and a norm."""
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4}
    tensors = {"output_norm.weight": f32(np.ones(COLS))}
    for name, kind in (("blk.0.attn_q.weight", "Q4_K"), ("blk.1.ffn_up.weight", "Q6_K")):
        raw = finite_blocks(kind, ROWS * COLS // BY_NAME[kind].values)
        tensors[name] = (kind, (ROWS, COLS), raw.tobytes())
    place.mkdir()
    (place / "m.gguf").write_bytes(gguf_bytes(metadata, tensors))
    return place / "m.gguf"


@pytest.mark.parametrize("make", [gptq_folder, gguf_file], ids=["GPTQ", "GGUF"])
@pytest.mark.parametrize("calls", [3, 9, 20])
def test_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, make: Callable[[Path], Path]
) -> None:
    source, seen = make(tmp_path / "m"), 0
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)
    # One that is quantized, one that is copied.
    options = QuantizeOptions(k=3, max_memory=1, exclude=("model.b*" if source.is_dir() else "*.1.*",))

    def stop(progress: object) -> None:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_quantize(source, tmp_path / "out", options), stop)
    run(plan_quantize(source, tmp_path / "out", options))
    run(plan_quantize(source, tmp_path / "whole" / "out", options))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole" / "out")


def test_a_distant_matrix_is_not_fetched_row_by_row(tmp_path: Path) -> None:
    reads = 0

    class Distant(LocalFolderStorage):
        distant = True

        def open(self, name: str) -> ByteFile:
            file = super().open(name)
            fetch = file.read_into

            def counted(buffer: memoryview, offset: int) -> None:
                nonlocal reads
                reads += 1
                fetch(buffer, offset)

            file.read_into = counted  # type: ignore[method-assign]
            return file

    folder = gptq_folder(tmp_path / "m")
    checkpoint = open_source(Distant(folder))
    expected = decoded(folder, 1)
    reads = 0
    with TileReader(checkpoint, 1) as reader:
        for name, values in expected.items():
            tensor = checkpoint.tensors[name]
            found = torch.cat([reader.read(tensor, span).clone() for span in reader.spans(tensor)])
            assert found.equal(values)
    assert reads == 2 * 4  # each stored tensor once


def test_a_budget(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "m")
    plan = choose(plan_quantize(source, tmp_path / "out", QuantizeOptions(budget=Budget(bpw=3.75))))
    assert {t.k for t in plan.tensors if t.quantized} == {3, 4}
    run(plan)


def test_descriptions_of_the_source_are_not_carried_over(tmp_path: Path) -> None:
    """They would not be true of the output, and some loaders believe them."""
    source = gptq_folder(tmp_path / "m")
    (source / "quantize_config.json").write_text('{"bits": 4}')
    (source / "tokenizer.json").write_text("{}")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization": {"bits": 4, "group_size": 64}}))
    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3))
    assert any("quantize_config.json is not carried over" in note for note in plan.notes)
    run(plan)
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "quantize_config.json").exists()
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())
