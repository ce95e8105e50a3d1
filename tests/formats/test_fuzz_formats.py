"""Fuzzing: whatever checkpoints of other tools' formats say, the answer is a result or a sentence."""

import json
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from formats.reading import decoded, write_folder
from helpers.checkpoints import read_header
from helpers.fuzzing import answered, few, mutated, shaken
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run

DATA = Path(__file__).parent / "data"
FORMATS = sorted(path.stem for path in DATA.glob("*.safetensors"))


def honest(place: Path, name: str, draw: st.DataObject) -> Path:
    """The folder of one of a format's fixtures."""
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        cases = list(json.loads(file.metadata()["cases"]).values())
        number = draw.draw(st.integers(0, len(cases) - 1))
        mine = [key for key in file.keys() if key.startswith(f"{number}|")]  # noqa: SIM118 - not a mapping
        tensors = {key.partition("|")[2]: file.get_tensor(key) for key in mine}
    return write_folder(place / "m", tensors, cases[number]["config"], cases[number]["metadata"])


def everything(folder: Path) -> None:
    """All that reads such a source."""
    answered(lambda: decoded(folder, 1))
    answered(lambda: run(plan_quantize(folder, folder.parent / "out", QuantizeOptions(k=2, on_nonfinite="keep"))))


@pytest.mark.parametrize("name", FORMATS)
@few
@given(data=st.data())
def test_headers_nearly_right(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = honest(Path(place), name, data)
        path = folder / "model.safetensors"
        _, header, body = read_header(path)
        text = json.dumps(mutated(data, header)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        everything(folder)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(data=st.data())
def test_values_and_configs_nearly_right(name: str, data: st.DataObject) -> None:
    """Some tensors steer decoding: states, shapes, group indices."""
    with tempfile.TemporaryDirectory() as place:
        folder = honest(Path(place), name, data)
        path = folder / "model.safetensors"
        text, _, body = read_header(path)
        if data.draw(st.booleans()):
            changed = shaken(data, body)
            body = changed + bytes(len(body) - len(changed))
            path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        else:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(mutated(data, config)))
        everything(folder)
