"""Fuzzing: whatever a header, an index, a config or a journal says, the answer is a result or a sentence.

``KBITQ_FUZZ_EXAMPLES=20000 KBITQ_RANDOM=1 pytest tests/checkpoint/test_fuzz.py``: for longer, each time elsewhere.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kbitq
from helpers.checkpoints import bytes_of, gaussian, raw_file, read_header, write_folder
from helpers.fuzzing import answered, many, mutated, shaken, values
from helpers.gguf_file import f32, finite_blocks, gguf_bytes
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run, verify
from kbitq.checkpoint.passes import journal, journal_lines
from kbitq.checkpoint.source.header import parse_header
from kbitq.checkpoint.written.stored import open_quantized
from kbitq.format import parse_quantization_config, parse_shard_meta


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small quantized folder of two shards."""
    place = tmp_path_factory.mktemp("fuzz")
    tensors = {"a.weight": gaussian(64, 72), "b.experts.w": gaussian(2, 48, 64), "norm.weight": torch.ones(8)}
    source = write_folder(place / "m", tensors)
    run(plan_quantize(source, place / "q", QuantizeOptions(k=3, max_shard_size=2_500)))
    return bytes_of(place / "q")


def laid_out(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@many
@given(text=st.binary(max_size=200) | values.map(lambda v: json.dumps(v).encode()), size=st.integers(0, 10**6))
def test_headers_of_anything(text: bytes, size: int) -> None:
    answered(lambda: parse_header(text, size, "file"))


@many
@given(text=st.text(max_size=100) | values.map(json.dumps))
def test_metadata_of_anything(text: str) -> None:
    answered(lambda: parse_shard_meta(text, "file"))


@many
@given(value=values)
def test_quantization_config_of_anything(value: Any) -> None:
    answered(lambda: parse_quantization_config(value, "file"))
    if isinstance(value, dict):
        answered(lambda: parse_quantization_config({"quant_method": "kbitq", "format_version": 1, **value}, "file"))


def everything(folder: Path) -> None:
    """All that reads a checkpoint."""
    for call in (
        lambda: kbitq.load_file(folder),
        lambda: verify(folder),
        lambda: open_quantized(folder),
        lambda: plan_quantize(folder, folder.parent / "out", QuantizeOptions(k=2)),
    ):
        answered(call)


@contextmanager
def for_a_while(files: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield laid_out(Path(place) / "q", files)


@many
@given(data=st.data())
def test_headers_nearly_right(quantized: dict[str, bytes], data: st.DataObject) -> None:
    with for_a_while(quantized) as folder:
        path = folder / data.draw(st.sampled_from(sorted(n for n in quantized if n.endswith(".safetensors"))))
        text, header, body = read_header(path)
        if data.draw(st.booleans()):
            meta = header["__metadata__"]
            meta["kbitq"] = json.dumps(mutated(data, json.loads(meta["kbitq"])))
        else:
            header = mutated(data, header)
        raw_file(path, json.dumps(header).encode() if data.draw(st.integers(0, 3)) else shaken(data, text), body)
        everything(folder)


@many
@given(data=st.data())
def test_json_files_nearly_right(quantized: dict[str, bytes], data: st.DataObject) -> None:
    with for_a_while(quantized) as folder:
        path = folder / data.draw(st.sampled_from(["config.json", "model.safetensors.index.json", "SHA256SUMS"]))
        raw = path.read_bytes()
        if path.suffix == ".json" and data.draw(st.integers(0, 3)):
            path.write_text(json.dumps(mutated(data, json.loads(raw))))
        else:
            path.write_bytes(shaken(data, raw))
        everything(folder)


GGUF = gguf_bytes(
    {
        "general.architecture": "llama",
        "llama.attention.head_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
    },
    {
        "blk.0.attn_q.weight": ("Q4_0", (8, 64), finite_blocks("Q4_0", 16).tobytes()),
        "blk.0.ffn_gate_exps.weight": ("Q8_0", (2, 4, 64), finite_blocks("Q8_0", 16).tobytes()),
        "rope_freqs.weight": f32([1.0, 2.0]),
    },
)


@many
@given(data=st.data())
def test_gguf_files_nearly_right(data: st.DataObject) -> None:
    file = bytearray(GGUF)
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(file[: data.draw(st.integers(0, len(file)))] if data.draw(st.booleans()) else file)
        answered(lambda: run(plan_quantize(path, Path(folder) / "out", QuantizeOptions(k=2))))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """A source, what an interrupted run left beside the output's name, and the output of a run in one go."""
    place = tmp_path_factory.mktemp("journal")
    source = write_folder(place / "m", {"a.weight": gaussian(700, 200), "b.weight": gaussian(700, 100, seed=1)})
    patch = pytest.MonkeyPatch()
    patch.setattr(journal, "SYNC_SECONDS", 0.0)
    calls = 0

    def stop(progress: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 14:
            raise KeyboardInterrupt

    options = QuantizeOptions(k=3, max_memory=1)
    with pytest.raises(KeyboardInterrupt):
        run(plan_quantize(source, place / "out", options), stop)
    patch.undo()
    left = place / "left"
    (place / ".out.kbitq-partial").rename(left)
    run(plan_quantize(source, place / "whole", options))
    return source, left, bytes_of(place / "whole")


@contextmanager
def left_behind(left: Path) -> Iterator[tuple[Path, Path]]:
    """What a run left, beside the name of its output again: the journal, and that name."""
    with tempfile.TemporaryDirectory() as place:
        yield laid_out(Path(place) / ".out.kbitq-partial", bytes_of(left)) / "journal", Path(place) / "out"


@pytest.mark.slow
@many
@given(data=st.data())
def test_journals_nearly_right(begun: tuple[Path, Path, dict[str, bytes]], data: st.DataObject) -> None:
    """Damage is noticed by the checksums: the run ends with the right bytes, however little it can go on from."""
    source, left, whole = begun
    with left_behind(left) as (journal_file, out):
        raw = journal_file.read_bytes()
        assert len(raw.splitlines()) > 5
        journal_file.write_bytes(shaken(data, raw) if data.draw(st.booleans()) else data.draw(st.binary()))
        run(plan_quantize(source, out, QuantizeOptions(k=3, max_memory=1)))
        assert bytes_of(out) == whole


@pytest.mark.slow
@many
@given(data=st.data())
def test_journals_forged(begun: tuple[Path, Path, dict[str, bytes]], data: st.DataObject) -> None:
    """A record with a right checksum and a wrong content gives an output or a sentence, never anything else."""
    source, left, _ = begun
    with left_behind(left) as (journal_file, out):
        lines = journal_file.read_bytes().splitlines()
        which = data.draw(st.integers(0, len(lines) - 1))
        record = mutated(data, json.loads(lines[which][9:]))
        lines[which] = journal_lines.format_line(record).rstrip(b"\n")
        journal_file.write_bytes(b"".join(line + b"\n" for line in lines))
        answered(lambda: run(plan_quantize(source, out, QuantizeOptions(k=3, max_memory=1))))


@pytest.mark.parametrize("kind", ["scanning", "part"])
@pytest.mark.parametrize("place", [-64, 0, 1, 70, 2**31, 2**63, 2**63 + 200, 2**70])
def test_journals_that_lead_out_of_a_tensor(
    begun: tuple[Path, Path, dict[str, bytes]], tmp_path: Path, kind: str, place: int
) -> None:
    """A place that a run cannot have been at: the run starts over."""
    source, left, whole = begun
    partial = laid_out(tmp_path / ".out.kbitq-partial", bytes_of(left))
    lines = (partial / "journal").read_bytes().splitlines(keepends=True)
    records = [json.loads(line[9:]) for line in lines]
    at = max(i for i, record in enumerate(records) if record["is"] == kind)
    forged = journal_lines.format_line({**records[at], "next": place})
    (partial / "journal").write_bytes(b"".join([*lines[:at], forged]))
    run(plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3, max_memory=1)))
    assert bytes_of(tmp_path / "out") == whole
