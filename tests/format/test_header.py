"""The header of a file: built once, filled with the statistics, the same text as json.dumps of the whole."""

import json

import pytest

from kbitq.codecs.base import coded_entries
from kbitq.errors import FormatError
from kbitq.format import DEFAULT_CODEC, HEADER_ALIGN, Entry, HeaderText, Placed, ShardMeta, TensorMeta, place

NAMES = ['a"b.weight', "back\\slash\n\t\x01.weight", "größe 重み 🙂.weight", '"sqnr_db":null', "plain.weight"]


def metas(statistic: float | None) -> ShardMeta:
    described = {name: TensorMeta(3, (4, 64), "BF16", "mse", "optimal", statistic, statistic) for name in NAMES}
    described[NAMES[0]].importance = "ab" * 32
    return ShardMeta(described, {"kept.weight": "too small", 'kept"': "\\"})


def entries(meta: ShardMeta | None) -> list[Placed]:
    quantized = [
        entry for name in (meta.tensors if meta else ()) for entry in coded_entries(DEFAULT_CODEC, name, (4, 64), 3)
    ]
    return place([*quantized, Entry("kept.weight", "F32", (2, 3)), Entry("none", "U8", (0,))])


def parsed(data: bytes) -> dict[str, object]:
    assert len(data) == 8 + int.from_bytes(data[:8], "little") and len(data) % HEADER_ALIGN == 0
    return json.loads(data[8:])


@pytest.mark.parametrize("extra", [{}, {"format": "tf", "who": 'a "name"\\'}], ids=["plain", "extra"])
@pytest.mark.parametrize("with_meta", [True, False], ids=["kbitq", "ordinary"])
def test_the_text_is_that_of_json(with_meta: bool, extra: dict[str, str]) -> None:
    meta = metas(None) if with_meta else None
    placed = entries(meta)
    header = HeaderText(placed, meta, extra)
    for described in meta.tensors.values() if meta else ():  # known only after the header was laid out
        described.sqnr_db, described.max_abs_err = 16.25, 0.125
    data = header.filled()
    assert len(data) == header.nbytes
    metadata = {"format": "pt", **({"kbitq": meta.to_json()} if meta else {}), **extra}
    table = {
        p.entry.name: {"dtype": p.entry.dtype, "shape": list(p.entry.shape), "data_offsets": [p.start, p.end]}
        for p in placed
    }
    want = json.dumps({"__metadata__": metadata, **table}, ensure_ascii=False, separators=(",", ":"))
    assert data[8:].decode().rstrip(" ") == want


def test_the_metadata_is_json() -> None:
    meta = metas(12.5)
    read = json.loads(meta.to_json())
    assert list(read["tensors"]) == sorted(NAMES) and read["kept"] == dict(sorted(meta.kept.items()))
    assert read["tensors"]["plain.weight"] == {
        "k": 3, "shape": [4, 64], "dtype": "BF16", "scale": "mse", "codebook": "optimal",
        "sqnr_db": 12.5, "max_abs_err": 12.5,
    }  # fmt: skip
    assert read["tensors"][NAMES[0]]["importance"] == "ab" * 32


@pytest.mark.parametrize("statistic", [None, float("inf"), 0.0, -123.4567, 1e-30, 9e99])
def test_the_length_does_not_depend_on_the_statistics(statistic: float | None) -> None:
    meta = metas(None)
    header = HeaderText(entries(meta), meta, {})
    before = header.nbytes
    for described in meta.tensors.values():
        described.sqnr_db, described.max_abs_err = min(statistic or 0.0, 1e6), statistic
    data = header.filled()
    assert len(data) == before
    read = json.loads(parsed(data)["__metadata__"]["kbitq"])["tensors"]["plain.weight"]
    expected = None if statistic in (None, float("inf")) else pytest.approx(statistic, rel=1e-6)
    assert read["max_abs_err"] == expected


def test_a_statistic_without_room_is_refused() -> None:
    meta = metas(None)
    header = HeaderText(entries(meta), meta, {})
    for described in meta.tensors.values():
        described.sqnr_db = 1e300
    with pytest.raises(FormatError, match="longer than the 16 characters"):
        header.filled()
