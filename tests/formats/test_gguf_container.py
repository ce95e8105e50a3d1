"""GGUF's container: what a right file says, and that no hostile one is believed."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.gguf_file import f32, finite_blocks, gguf_bytes, tensor_entry, text, value
from kbitq.checkpoint.source.gguf_storage import MemoryFile
from kbitq.errors import CheckpointError
from kbitq.formats.gguf.container import integer, read_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "some.flag": True,
    "some.words": ["a", "b", "\u00e9"],
    "some.numbers": [1, 2, 3],
    "some.floats": [0.5, -1.0],
}
TENSORS = {
    "token_embd.weight": f32(np.arange(12).reshape(3, 4)),
    "blk.0.ffn_up.weight": ("Q4_K", (2, 512), finite_blocks("Q4_K", 4).tobytes()),
}


def read(data):
    return read_gguf(MemoryFile(data, "m.gguf"))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_reads_metadata_and_places(version, alignment):
    extra = {"general.alignment": alignment}
    data = gguf_bytes(METADATA | extra, TENSORS, version=version, alignment=alignment)
    found = read(data)
    assert found.metadata == METADATA | extra
    assert [(t.name, t.type.name, t.shape) for t in found.tensors] == [(n, t[0], t[1]) for n, t in TENSORS.items()]
    for tensor in found.tensors:
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == TENSORS[tensor.name][2]


def test_agrees_with_the_package(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["x", "yy"])
    writer.add_tensor("a.weight", np.ones((2, 64), np.float16))
    writer.add_tensor("b.weight", finite_blocks("Q8_0", 4).reshape(2, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    mine, theirs = read(path.read_bytes()), gguf.GGUFReader(path)
    assert [(t.name, t.offset, t.nbytes) for t in mine.tensors] == [
        (t.name, int(t.data_offset), int(t.n_bytes)) for t in theirs.tensors
    ]
    assert mine.metadata["llama.block_count"] == 3
    assert mine.metadata["tokenizer.ggml.tokens"] == ["x", "yy"]


ONE = {"t": f32([1.0])}
TWO = {"t": f32([1.0] * 64), "u": f32([1.0])}


def told(*entries, data=ONE):
    """A file whose tensors are said to be other ones than its data."""
    return gguf_bytes({}, data, entries=[tensor_entry(*entry) for entry in entries])


HOSTILE = {
    "no GGUF": (gguf_bytes({}, {}, magic=b"GGUX"), "is not a GGUF file"),
    "short": (b"GGUF", "is not a GGUF file"),
    "version 1": (gguf_bytes({}, {}, version=1), "of version 1"),
    "big-endian": (gguf_bytes({}, {}, version=3 << 24), "other byte order"),
    "too many tensors": (gguf_bytes({}, {}, counts=(1 << 60, 0)), "more than it can hold"),
    "too many entries": (gguf_bytes({}, {}, counts=(0, 1 << 60)), "more than it can hold"),
    "a key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("a") + value(1)) * 2 + bytes(32),
        "'a' occurs twice",
    ),
    "dimensions": (told(("t", "F32", (1,) * 9, 0)), "9 dimensions"),
    "an empty shape": (told(("t", "F32", (0, 4), 0)), "a shape"),
    "a huge shape": (told(("t", "F32", (2**40, 2**40), 0)), "a shape"),
    "another type": (told(("t", 77, (4,), 0)), "ggml's type 77"),
    "no whole blocks": (told(("t", "Q4_K", (2, 100), 0)), "no whole blocks"),
    "out of line": (told(("t", "F32", (1,), 7)), "no multiple of 32"),
    "past the end": (told(("t", "F32", (1 << 20,), 0)), "is truncated"),
    "a name twice": (told(("t", "F32", (4,), 0), ("t", "F32", (4,), 0), data=TWO), "occurs twice"),
    "over another": (told(("t", "F32", (64,), 0), ("u", "F32", (1,), 32), data=TWO), "overlaps"),
    "alignment": (gguf_bytes({"general.alignment": 24}, TENSORS), "not a power of two"),
    "a name of control characters": (gguf_bytes({"a\x1b[31m": 1}, {}), "not printable"),
    "not a number": (gguf_bytes({"a": float("nan")}, {}), "not a finite number"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name):
    data, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message):
        read(data)


def test_strings_and_arrays_longer_than_the_file():
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"a"
    rest = bytes(64)
    for body, message in (
        (struct.pack("<IQ", 8, 1 << 50), "a string of its header"),
        (struct.pack("<IIQ", 9, 4, 1 << 50), "an array of"),
        (struct.pack("<IIQ", 9, 9, 1), "an array of a type that is not read"),
        (struct.pack("<I", 99), "a type that is not known"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(start + key + body + rest)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_headers_raise_nothing_else(data):
    good = bytearray(gguf_bytes(METADATA, TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, 500))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for version in (bytes(good), bytes(good[:cut])):
        with contextlib.suppress(CheckpointError):
            read(version)


def test_numbers_of_the_metadata():
    metadata = {"a": 5, "b": True, "c": [7, 7], "d": [7, 8], "e": 0, "f": "x"}
    assert [integer(metadata, k) for k in "abcdefg"] == [5, None, 7, None, None, None, None]
