"""Every error a user can run into: the sentence names file and tensor, and nothing is left under a final name."""

import ast
import errno
import json
import re
import string
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file

import kbitq as library
from helpers.program import Kbitq, tiny_tensors
from kbitq.cli import errors
from kbitq.errors import BuildError, CheckpointError, CodebookError, NoSpaceError, SelectionError

UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_folder(folder: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    places.update(index or {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def two_shards(folder: Path, index: dict[str, str] | None = None, twice: str | None = None) -> Path:
    tensors = tiny_tensors()
    first = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    second = {name: tensor for name, tensor in tensors.items() if "layers.1" in name}
    if twice:
        second[twice] = tensors[twice]
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    return write_folder(folder, shards, index)


def a_missing_file(folder: Path) -> Path:
    return folder / "nowhere.safetensors"


def not_safetensors(folder: Path) -> Path:
    (folder / "text.safetensors").write_text("This is a text, and by no means a checkpoint of any kind.\n" * 9)
    return folder / "text.safetensors"


def an_empty_file(folder: Path) -> Path:
    (folder / "empty.safetensors").write_bytes(b"")
    return folder / "empty.safetensors"


def truncated(folder: Path) -> Path:
    path = folder / "cut.safetensors"
    save_file(tiny_tensors(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def offsets_out_of_range(folder: Path) -> Path:
    return write_raw(folder / "range.safetensors", {"w.weight": entry([64, 64], 0, 16384)}, b"\0" * 8192)


def overlapping(folder: Path) -> Path:
    header = {"a.weight": entry([64, 64], 0, 16384), "b.weight": entry([64, 64], 8192, 24576)}
    return write_raw(folder / "overlap.safetensors", header, b"\0" * 24576)


def wrong_size(folder: Path) -> Path:
    return write_raw(folder / "size.safetensors", {"w.weight": entry([64, 65], 0, 16384)}, b"\0" * 16384)


def a_huge_header(folder: Path) -> Path:
    path = folder / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    return path


def bad_json(folder: Path) -> Path:
    return write_raw(folder / "json.safetensors", b'{"w.weight": {"dtype"')


def a_missing_shard(folder: Path) -> Path:
    made = two_shards(folder / "sharded")
    (made / "model-00002-of-00002.safetensors").unlink()
    return made


def an_index_that_leaves(folder: Path) -> Path:
    save_file(tiny_tensors(), folder / "outside.safetensors")
    return two_shards(folder / "sharded", {UP_PROJ: "../outside.safetensors"})


def an_absolute_index(folder: Path) -> Path:
    save_file(tiny_tensors(), folder / "outside.safetensors")
    return two_shards(folder / "sharded", {UP_PROJ: str(folder / "outside.safetensors")})


def a_link_out(folder: Path) -> Path:
    made = two_shards(folder / "sharded")
    shard = made / "model-00002-of-00002.safetensors"
    shard.rename(folder / "outside.safetensors")
    shard.symlink_to(folder / "outside.safetensors")
    return made


def duplicate_names(folder: Path) -> Path:
    return two_shards(folder / "sharded", twice=UP_PROJ)


def nan(folder: Path) -> Path:
    tensors = tiny_tensors()
    tensors[UP_PROJ][3, 7] = np.nan
    tensors[UP_PROJ][4, 7] = np.inf
    save_file(tensors, folder / "nan.safetensors")
    return folder / "nan.safetensors"


def no_safetensors(folder: Path) -> Path:
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text("{}")
    return folder / "plain"


def a_file(path: str, content: bytes) -> Callable[[Path], Path]:
    """Makes a file of such content; the checkpoint is the first part of its path."""

    def make(folder: Path) -> Path:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
        return folder / Path(path).parts[0]

    make.__name__ = path.translate(str.maketrans("./", "__"))
    return make


def nothing_to_quantize(folder: Path) -> Path:
    save_file({"norm.weight": np.ones(64, np.float32)}, folder / "norms.safetensors")
    return folder / "norms.safetensors"


BROKEN: dict[Callable[[Path], Path], tuple[str, ...]] = {
    a_missing_file: ("nowhere.safetensors",),
    not_safetensors: ("text.safetensors", "not a safetensors file"),
    an_empty_file: ("empty.safetensors",),
    truncated: ("cut.safetensors",),
    offsets_out_of_range: ("range.safetensors",),
    overlapping: ("overlap.safetensors", "b.weight"),
    wrong_size: ("size.safetensors", "w.weight"),
    a_huge_header: ("huge.safetensors", "header"),
    bad_json: ("json.safetensors", "JSON"),
    a_missing_shard: ("model-00002-of-00002.safetensors", "missing"),
    an_index_that_leaves: ("model.safetensors.index.json", UP_PROJ, "leaves the folder"),
    an_absolute_index: ("model.safetensors.index.json", UP_PROJ, "leaves the folder"),
    a_link_out: ("model-00002-of-00002.safetensors", "link"),
    duplicate_names: ("sharded", UP_PROJ, "both"),
    nan: ("nan.safetensors", UP_PROJ, "2", "first"),
    no_safetensors: ("plain", "no safetensors file"),
    a_file("pytorch_model.bin", b"PK\x03\x04\x00\x00\x08\x08" + bytes(100)): ("pytorch_model.bin", "pickle", "refused"),
    a_file("model.gguf", b"GGUF\3\0\0\0" + bytes(100)): ("model.gguf", "holds no tensors"),
    a_file("model.onnx", b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(100)): ("model.onnx", "is an ONNX model"),
    a_file("model.h5", b"\x89HDF\r\n\x1a\n" + bytes(100)): ("model.h5", "HDF5"),
    a_file("model.tflite", b"\x1c\0\0\0TFL3" + bytes(100)): ("model.tflite", "TensorFlow Lite"),
    a_file("ggufs/model-q4.gguf", b"GGUF"): ("ggufs", "model-q4.gguf is not a GGUF file", "download"),
    a_file("onnx/model.onnx", b"\x08"): ("onnx", "no safetensors file", "model.onnx is an ONNX model"),
    a_file("pickled/pytorch_model.bin", b"\x80\x02}q\x00."): ("pickled", "pytorch_model.bin", "refused"),
    nothing_to_quantize: ("norms.safetensors", "no tensor would be quantized"),
}


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def check_told(code: int, out: str, err: str, *words: str) -> None:
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2, err
    assert "Traceback" not in err
    assert "internal error" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_broken_source(make: Callable[[Path], Path], kbitq: Kbitq, tmp_path: Path) -> None:
    source = make(tmp_path)
    before = tree(tmp_path)
    check_told(*kbitq("quantize", source, "--k", 3), *BROKEN[make])
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "make", [a_missing_file, truncated, wrong_size, a_missing_shard], ids=lambda make: make.__name__
)
def test_the_other_commands_tell_it_too(make: Callable[[Path], Path], kbitq: Kbitq, tmp_path: Path) -> None:
    source = make(tmp_path)
    before = tree(tmp_path)
    check_told(*kbitq("inspect", source), *BROKEN[make])
    check_told(*kbitq("dequantize", source, "-o", tmp_path / "out"), *BROKEN[make])
    assert tree(tmp_path) == before


def test_an_already_quantized_source(kbitq: Kbitq, tiny_k3: Path) -> None:
    before = tree(tiny_k3.parent)
    check_told(*kbitq("quantize", tiny_k3, "--k", 3), tiny_k3.name, "already quantized", "kbitq dequantize")
    assert tree(tiny_k3.parent) == before


def test_a_source_that_is_not_quantized_cannot_be_dequantized(kbitq: Kbitq, tiny: Path) -> None:
    check_told(*kbitq("dequantize", tiny, "-o", tiny.parent / "out"), tiny.name, "not quantized")
    assert tree(tiny.parent) == [tiny]


def test_an_existing_output_is_kept(kbitq: Kbitq, tiny: Path, tiny_k3: Path) -> None:
    before = tiny_k3.read_bytes()
    check_told(*kbitq("quantize", tiny, "--k", 3), tiny_k3.name, "exists", "--force")
    assert tiny_k3.read_bytes() == before
    restored = tiny.with_name("restored.safetensors")
    restored.write_bytes(b"mine")
    check_told(*kbitq("dequantize", tiny_k3, "-o", restored), "restored.safetensors", "--force")
    assert restored.read_bytes() == b"mine"


@pytest.mark.parametrize("option", ["--include", "--exclude", "--only"])
def test_a_pattern_that_matches_nothing(option: str, kbitq: Kbitq, tiny: Path) -> None:
    check_told(*kbitq("quantize", tiny, "--k", 3, option, "*no_such*"), option, "*no_such*")
    assert tree(tiny.parent) == [tiny]


def test_a_pattern_that_is_no_regular_expression(kbitq: Kbitq, tiny: Path) -> None:
    check_told(*kbitq("quantize", tiny, "--k", 3, "--only", "re:("), "re:(")


def test_a_codebook_that_cannot_be_used(kbitq: Kbitq, tiny: Path) -> None:
    book = tiny.with_name("book.json")
    check_told(*kbitq("quantize", tiny, "--k", 3, "--codebook", book), "book.json")
    book.write_text("[0, 1, 2]")
    check_told(*kbitq("quantize", tiny, "--k", 3, "--codebook", book), "book.json")
    check_told(*kbitq("quantize", tiny, "--k", 3, "--codebook", "nf4"), "nf4")
    assert tree(tiny.parent) == [book, tiny]


def test_a_folder_that_cannot_be_written(kbitq: Kbitq, tiny: Path) -> None:
    check_told(*kbitq("quantize", tiny, "--k", 3, "-o", tiny / "out.safetensors"), tiny.name)
    check_told(*kbitq("quantize", tiny, "--k", 3, "-o", "/proc/out.safetensors"), "/proc")
    assert tree(tiny.parent) == [tiny]


def test_a_name_cannot_drive_the_terminal(kbitq: Kbitq, tmp_path: Path) -> None:
    source = write_raw(tmp_path / "x.safetensors", {"\x1b[31mw.weight": entry([64, 65], 0, 16384)}, b"\0" * 16384)
    _, _, err = kbitq("quantize", source, "--k", 3)
    assert "\x1b" not in err
    assert "w.weight" in err


def test_debug_adds_the_traceback(kbitq: Kbitq, tmp_path: Path) -> None:
    code, out, err = kbitq("quantize", tmp_path / "nowhere.safetensors", "--k", 3, "--debug")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):")
    assert "\nerror: " in err


@pytest.mark.parametrize(
    ("error", "sentence", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "/x: no space left on the device", "-o"),
        (OSError(errno.EDQUOT, "Quota"), "the disk quota is used up", "-o"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: permission denied", "-o"),
        (OSError(errno.EROFS, "Read-only", "/x"), "/x: the file system is read-only", "-o"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), "/x: no such file or folder", "spelling"),
        (OSError(errno.ENXIO, "No such device", "/x"), "/x: No such device", None),
        (OSError("odd"), "odd", None),
        (MemoryError(), "out of memory", "memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "package 'torch' is missing", "torch"),
        (CheckpointError("x is cut", hint="get it again"), "x is cut", "get it again"),
        (NoSpaceError("x is full"), "x is full", None),
        (CodebookError("x has 3 levels"), "x has 3 levels", None),
        (BuildError("no core", hint="pip install -e ."), "no core", "pip install -e ."),
        (ZeroDivisionError("division by zero"), "internal error: ZeroDivisionError: division by zero", "--debug"),
    ],
)  # fmt: skip
def test_explain(error: Exception, sentence: str, hint: str | None) -> None:
    explained = errors.explain(error)
    assert sentence in explained.sentence
    assert (explained.hint is None) == (hint is None)
    assert hint is None or hint in explained.hint
    assert explained.exit_code == 1


def calls_of_errors() -> list[tuple[str, ast.Call]]:
    """Every call in kbitq/ that makes an error, with its place."""
    return [
        (f"{path.name}:{node.lineno}", node)
        for path in sorted(Path(library.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")
    ]


def texts(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_the_library_names_no_option_of_the_command_line() -> None:
    named = re.compile(r"(?<![\w-])(--[a-z]|-o\b)")
    told = [(place, text) for place, call in calls_of_errors() for text in texts(call) if named.search(text)]
    told = [(place, text) for place, text in told if not text.startswith("pip install")]
    assert told == []


def test_every_remedy_is_said_and_every_sentence_is_used() -> None:
    used: set[str] = set()
    for place, call in calls_of_errors():
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if "remedy" not in given:
            continue
        (name,) = texts(given["remedy"])
        data = given.get("data")
        keys = {key.value for key in data.keys} if isinstance(data, ast.Dict) else set()
        fields = {field for _, field, _, _ in string.Formatter().parse(errors._REMEDIES[name]) if field}
        assert keys == fields, place
        used.add(name)
    assert used == set(errors._REMEDIES)


def test_an_argument_is_told_as_its_option() -> None:
    error = SelectionError("max_shard_size must be positive, not 0", argument="max_shard_size")
    assert errors.explain(error).sentence == "--max-shard-size must be positive, not 0"


def test_explain_what_is_not_an_error_of_ours() -> None:
    assert errors.explain(KeyboardInterrupt()).exit_code == 130
    usage = errors.explain(typer.BadParameter("no"))
    assert (usage.sentence, usage.exit_code) == ("Invalid value: no", 2)
