"""Usage errors: exit code 2, a sentence and the help page on stderr, nothing on stdout, nothing written."""

from pathlib import Path

import pytest

from helpers.program import Kbitq


@pytest.mark.parametrize(
    ("arguments", "sentence", "page"),
    [
        (["quantise"], "No such command 'quantise'. Did you mean 'quantize'", "kbitq --help"),
        (["quantize"], "Missing argument 'SRC'", "kbitq quantize --help"),
        (["quantize", "x"], "Missing option '--k'", "kbitq quantize --help"),
        (["quantize", "x", "--k", "1"], "'--k' / '-k': K must be from 2 to 8, not 1", "kbitq quantize --help"),
        (["quantize", "x", "--k", "9"], "'--k' / '-k': K must be from 2 to 8, not 9", "kbitq quantize --help"),
        (["quantize", "x", "--k", "3.5"], "--bpw 3.5 spends so many bits on average", "kbitq quantize --help"),
        (["quantize", "x", "--k", "1.5"], "'1.5' is not a whole number", "kbitq quantize --help"),
        (["inspect", "x", "--k", "3.5"], "'3.5' is not a whole number", "kbitq inspect --help"),
        (["quantize", "x", "--bits", "4"], "No such option: --bits. Here it is --k N", "kbitq quantize --help"),
        (["plan", "x", "--wbits", "4"], "No such option: --wbits. Here it is --k N", "kbitq plan --help"),
        (["quantize", "x", "--group-size", "4"], "A scale is always for 32 weights", "kbitq quantize --help"),
        (["quantize", "x", "--k", "4", "--out", "y"], "Here it is -o OUT", "kbitq quantize --help"),
        (["quantize", "x", "--k", "three"], "'three' is not a whole number", "kbitq quantize --help"),
        (["quantize", "x", "--k", "3", "--kodebook", "nf"], "No such option: --kodebook", "kbitq quantize --help"),
        (
            ["quantize", "x", "--k", "3", "--scale", "min"],
            "'min' is not one of 'mse', 'absmax'",
            "kbitq quantize --help",
        ),
        (["quantize", "x", "--k", "3", "--device", "tpu"], "'tpu' is not one of", "kbitq quantize --help"),
        (["quantize", "x", "--k", "3", "--on-nonfinite", "zero"], "'zero' is not one of", "kbitq quantize --help"),
        (["quantize", "x", "--k", "3", "--max-shard-size", "5XB"], "'5XB' is not a size", "kbitq quantize --help"),
        (["quantize", "x", "y", "--k", "3"], "unexpected extra argument", "kbitq quantize --help"),
        (["inspect", "x", "--k", "2,9"], "K must be from 2 to 8, not 9", "kbitq inspect --help"),
        (["inspect", "x", "--sort", "shape"], "'shape' is not one of 'name', 'sqnr', 'size'", "kbitq inspect --help"),
        (["dequantize", "x"], "Missing option '-o' / '--output'", "kbitq dequantize --help"),
        (["dequantize", "x", "-o", "y", "--dtype", "int8"], "'int8' is not one of", "kbitq dequantize --help"),
    ],
)
def test_usage_error(
    arguments: list[str], sentence: str, page: str, kbitq: Kbitq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = kbitq(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence in err
    assert f"hint: {page} " in err
    assert len(err.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_option_is_answered_with_the_right_one(kbitq: Kbitq) -> None:
    assert "--codebook" in kbitq("quantize", "x", "--k", "3", "--kodebook", "nf").err
