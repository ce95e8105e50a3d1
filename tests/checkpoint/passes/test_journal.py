"""The journal's text is a format: what version 0.1.0 wrote is read, and what is written today is the same text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import bytes_of, write_folder
from kbitq import ops
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.passes import journal_lines
from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.journal_lines import JournalLines, replay_line
from kbitq.checkpoint.passes.run_state import BegunScan, BegunTensor, ErrorSums, RunState, Scan

# Written by version 0.1.0.
RUN = (
    b'6af1daa0 {"is":"run","key":{"format_version":1,"options":{"k":3,"scale":"mse","include":[],"exclude":[],"only":'
    b'[],"keep_embeddings":true,"max_shard_size":5000000000,"on_nonfinite":"error","importance":null,"codebook of K=3":'
    b'"489627e2c5f3ef78","choice of K, scale and codebook":"fda59f8a403db078"},"source":{"model.safetensors":[37152,'
    b'"1795318410704391344:2516998"]},"name":"out"}}\n'
)
SCANNED = b'984e6785 {"is":"scan","tensor":"a.weight","found":["0x1.0000000000000p-1",0,-1]}\n'
LINES = (
    RUN,
    b'e72b2cb3 {"is":"scanning","tensor":"b.weight","next":16384,"found":["0x1.08d18e0000000p+2",0,-1]}\n',
    b'0ea78541 {"is":"scan","tensor":"b.weight","found":["0x1.2a20920000000p+2",0,-1]}\n',
    b'9cc52dcd {"is":"part","tensor":"b.weight","next":16384,"sums":["0x0.0p+0","0x0.0p+0","0x1.d44f400000000p-1",'
    b'"0x1.0115c77373b41p+14","0x1.ab139cb27b7ffp+8"]}\n',
    b'10b3d07d {"is":"tensor","tensor":"b.weight","sums":["0x1.9a70c8bb22b0ap+17","0x1.4ed1108a3fa2ep+12",'
    b'"0x1.ec39400000000p-1","0x0.0p+0","0x0.0p+0"]}\n',
    b'1c22f0dc {"is":"part","tensor":"kept.weight","next":65536,"sums":null}\n',
    b'c62ad163 {"is":"tensor","tensor":"n.weight","sums":null}\n',
    b'f27414af {"is":"file","file":"model.safetensors","sha256":"' + b"ab" * 32 + b'"}\n',
)


def test_lines_of_the_first_version_tell_the_state() -> None:
    state = RunState()
    assert replay_line(LINES[0], state) and state.key is not None and state.key["options"]["k"] == 3
    assert replay_line(LINES[1], state)
    assert state.begun_scan == BegunScan("b.weight", 16384, Scan(float.fromhex("0x1.08d18e0000000p+2"), 0, -1))
    assert replay_line(LINES[2], state) and state.begun_scan is None
    assert state.scans == {"b.weight": Scan(float.fromhex("0x1.2a20920000000p+2"), 0, -1)}
    assert replay_line(LINES[3], state)
    hexes = ("0x0.0p+0", "0x0.0p+0", "0x1.d44f400000000p-1", "0x1.0115c77373b41p+14", "0x1.ab139cb27b7ffp+8")
    error_sums = ErrorSums.from_values([float.fromhex(text) for text in hexes])
    assert state.begun_tensor == BegunTensor("b.weight", 16384, error_sums)
    assert replay_line(LINES[4], state) and state.begun_tensor is None
    assert replay_line(LINES[5], state) and state.begun_tensor == BegunTensor("kept.weight", 65536, None)
    assert replay_line(LINES[6], state) and state.tensors.keys() == {"b.weight", "n.weight"}
    assert state.tensors["n.weight"] is None
    assert replay_line(LINES[7], state) and state.digests == {"model.safetensors": "ab" * 32}


def test_the_recorder_writes_the_same_lines() -> None:
    """Replayed into a state that is recorded: the state hears of every event and hands all of it on."""
    recorder = JournalLines()
    state = RunState(recorder=recorder)
    for line in LINES:
        assert replay_line(line, state)
        assert recorder.take() == line


def test_what_makes_no_sense_changes_nothing() -> None:
    state = RunState()
    for record in (
        {"is": "what"},
        {"is": "scan", "tensor": "a", "found": ["x", 0, -1]},
        {"is": "part", "tensor": "a", "next": 3, "sums": ["0x0.0p+0"]},
        {"is": "tensor", "tensor": "a"},
        {"is": "scanning", "tensor": "a", "next": None, "found": ["0x0.0p+0", 0, -1]},
    ):
        assert not replay_line(journal_lines.format_line(record), state)
    assert not replay_line(SCANNED[:-1], state) and not replay_line(b"0" + SCANNED[1:], state)
    assert state == RunState()


def test_a_journal_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(RUN + SCANNED + b"12345678 {")
    state = RunState()
    journal = Journal(path, state)
    assert journal.holds_work and state.scans.keys() == {"a.weight"}
    state.scan_finished("b.weight", Scan(1.0))
    assert path.read_bytes() == RUN + SCANNED  # nothing is written before it is committed
    journal.commit()
    journal.close()
    assert path.read_bytes().startswith(RUN + SCANNED) and len(path.read_bytes().splitlines()) == 3
    again = RunState()
    Journal(path, again).close()
    assert again.scans == {"a.weight": Scan(0.5), "b.weight": Scan(1.0)}


def test_a_run_of_the_first_version_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Callable[..., object]
) -> None:
    """Its key names the source's file by size and time, which are put into the line here; the rest is as it was."""
    values = (torch.arange(96 * 64) % 97 / 97 - 0.5).reshape(96, 64)
    tensors = {"a.weight": values, "b.weight": values.T.bfloat16().contiguous(), "n.weight": torch.ones(8)}
    source = write_folder(tmp_path / "model", tensors)
    quantize(source, tmp_path / "whole")
    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3))
    key = json.loads(RUN[9:])["key"]
    key["source"] = {n: [f.size, f.token] for n, f in plan.checkpoint.fingerprints.items()}
    left = tmp_path / ".out.kbitq-partial"
    left.mkdir()
    (left / "journal").write_bytes(journal_lines.format_line({"is": "run", "key": key}) + SCANNED)
    scanned, real = [], ops.scan

    def scan(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scanned.append(tuple(w.shape))
        return real(w)

    monkeypatch.setattr(ops, "scan", scan)
    run(plan)
    assert scanned == [(64, 96)]  # b.weight: a.weight's scan was in the journal
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
