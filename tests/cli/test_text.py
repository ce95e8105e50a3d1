"""Sizes, times and shortened names."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbitq.cli.views import text
from kbitq.text_safety import all_printable, printable, prose


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("64k", 64_000),
        ("7g", 7_000_000_000),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_parse_size(written: str, size: int) -> None:
    assert text.parse_size(written) == size


@pytest.mark.parametrize("written", ["", "GB", "5XB", "-5GB", "5 G B", "1e9", "0", "0.1", "5GBB", "five"])
def test_parse_size_refuses(written: str) -> None:
    with pytest.raises(ValueError, match="size"):
        text.parse_size(written)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (812, "812 B"), (999.4, "999 B"), (1000, "1.00 kB"), (90_868_376, "90.9 MB"), (999_600, "1.00 MB")],
)
def test_size_text(count: float, shown: str) -> None:
    assert text.size_text(count) == shown


@given(st.integers(1, 999 * 10**12))
def test_size_text_is_short_and_near(count: int) -> None:
    shown = text.size_text(count)
    assert len(shown) <= 7
    assert abs(text.parse_size(shown) - count) <= 0.005 * count


def test_other_numbers() -> None:
    assert [text.count_text(n) for n in (0, 812, 22_713_216)] == ["0", "812", "22.7 M"]
    assert [text.seconds_text(s) for s in (0.3, 12.34, 59.97, 245, 7620)] == [
        "0.30 s", "12.3 s", "1 min 00 s", "4 min 05 s", "2 h 07 min",
    ]  # fmt: skip
    assert [text.left_text(s) for s in (0.2, 59.1, 245, 7620)] == ["1 s", "1:00", "4:05", "2:07:00"]
    assert [text.decibel_text(d) for d in (15.534, math.inf, None, math.nan)] == ["15.53", "exact", "-", "-"]
    assert [text.share_text(*p) for p in ((1, 4), (0, 9), (1, 10**6), (10**6 - 1, 10**6), (0, 0))] == [
        "25.0 %", "0.0 %", "<0.1 %", ">99.9 %", "-",
    ]  # fmt: skip
    assert [text.shape_text(s) for s in ([1536, 384], (), [7])] == ["1536x384", "scalar", "7"]


def test_shorten_keeps_the_layer_and_the_end() -> None:
    name = "model.language_model.layers.7.self_attn.k_proj.weight"
    assert [text.shorten(name, width) for width in (60, 40, 26, 24, 16, 10)] == [
        name, "…_model.layers.7.self_attn.k_proj.weight", "…7.self_attn.k_proj.weight", "…7.self_at…k_proj.weight",
        "…7…k_proj.weight", "…oj.weight",
    ]  # fmt: skip


@given(
    st.lists(st.sampled_from(["", "0", "17", "layers", "weight", "a_rather_long_component"]), max_size=9).map(".".join)
)
def test_shorten_fits(name: str) -> None:
    for width in range(61):
        shown = text.shorten(name, width)
        assert len(shown) <= width
        if len(name) <= width:
            assert shown == name
        elif width > 1:
            assert "…" in shown
            assert name.endswith(shown.rpartition("…")[2])


def test_control_characters_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b[31mb\x07\x9b\u202e café\n"
    assert printable(hostile) == "a\\x1b[31mb\\x07\\x9b\\u202e café\\n"
    assert printable(hostile, keep="\n").endswith("café\n")
    assert all_printable({"a\n": ["b\r", 3, None]}) == {"a\\n": ["b\\r", 3, None]}


def test_prose_in_any_script_stays_as_it_is() -> None:
    for words in (
        "été\u202f!",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "👩\u200d🔬",
        "漢字\u3000",
        "a\tb\nc",
    ):
        assert prose(words) == words
    assert prose("a\x1b[2Jb\r\x9b\u202e\u2028") == "a\\x1b[2Jb\\r\\x9b\\u202e\\u2028"


def test_natural_order() -> None:
    names = ["l.10.w", "l.9.w", "a", "l.b", "9"]
    assert sorted(names, key=text.natural_key) == ["9", "a", "l.9.w", "l.10.w", "l.b"]
