"""Fuzzing: whatever checkpoints of other tools' formats say, the answer is a result or a sentence."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from formats.reading import decoded, write_folder
from helpers.checkpoints import raw_file, read_header
from helpers.fuzzing import answered, few, mutated, shaken
from helpers.gguf_file import f32, finite_blocks, gguf_bytes
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run

DATA = Path(__file__).parent / "data"
FORMATS = sorted(path.stem for path in DATA.glob("*.safetensors"))


@contextmanager
def honest(name: str, draw: st.DataObject) -> Iterator[Path]:
    """The one file of weights in a folder of one of a format's fixtures."""
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        cases = list(json.loads(file.metadata()["cases"]).values())
        number = draw.draw(st.integers(0, len(cases) - 1))
        mine = [key for key in file.keys() if key.startswith(f"{number}|")]  # noqa: SIM118 - not a mapping
        tensors = {key.partition("|")[2]: file.get_tensor(key) for key in mine}
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place) / "m", tensors, cases[number]["config"], cases[number]["metadata"])
        yield folder / "model.safetensors"


def everything(source: Path) -> None:
    """All that reads such a source."""
    out = source.parent.parent / "out"
    answered(lambda: decoded(source, 1))
    answered(lambda: run(plan_quantize(source, out, QuantizeOptions(k=2, on_nonfinite="keep"))))


VECTOR = f32([1.0] * 256)
GGUF_METADATA = {
    "general.architecture": "llama", "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 1e4, "llama.expert_count": 2, "llama.embedding_length": 256, "general.alignment": 32,
    "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"], "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.bos_token_id": 0,
}  # fmt: skip
GGUF_TENSORS = {
    "token_embd.weight": ("Q8_0", (4, 256), finite_blocks("Q8_0", 32).tobytes()),
    "output_norm.weight": VECTOR, "rope_freqs.weight": f32([1.0, 2.0]), "rope_factors_long.weight": f32([1.0]),
    "rope_factors_short.weight": f32([1.0]), "blk.0.attn_q.bias": f32([1.0] * 8),
    "blk.0.attn_q.weight": ("Q4_K", (8, 256), finite_blocks("Q4_K", 8).tobytes()),
    "blk.0.ffn_up_exps.weight": ("IQ2_S", (2, 4, 256), finite_blocks("IQ2_S", 8).tobytes()),
}  # fmt: skip
ARCHITECTURES = st.sampled_from(["llama", "gemma2", "gemma3", "gpt2", "phi3", "qwen3moe", "other"])
VALUES = (
    st.integers(0, 2**32 - 1) | st.floats(width=32) | st.booleans() | st.text(max_size=6)
    | st.lists(st.text(max_size=3), min_size=1, max_size=5)
    | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)
    | st.lists(st.floats(width=32), min_size=1, max_size=5)
)  # fmt: skip


@few
@given(data=st.data())
def test_gguf_files_nearly_right(data: st.DataObject) -> None:
    metadata, tensors = dict(GGUF_METADATA), dict(GGUF_TENSORS)
    metadata["general.architecture"] = data.draw(ARCHITECTURES)
    for _ in range(data.draw(st.integers(0, 3))):
        metadata[data.draw(st.sampled_from(sorted(metadata)))] = data.draw(VALUES)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(tensors)))
        _, shape, raw = tensors[name]
        shape = data.draw(st.sampled_from([shape, shape[::-1], (1, *shape), (shape[0] // 2, 2, *shape[1:])]))
        tensors[name] = (data.draw(st.sampled_from(["F32", "I8", "Q4_0", "Q4_K", "IQ1_S", "BF16"])), shape, raw)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "m" / "m.gguf"
        path.parent.mkdir()
        raw = gguf_bytes(metadata, tensors)
        path.write_bytes(shaken(data, raw) if data.draw(st.booleans()) else raw)
        everything(path)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(data=st.data())
def test_headers_nearly_right(name: str, data: st.DataObject) -> None:
    with honest(name, data) as path:
        _, header, body = read_header(path)
        raw_file(path, json.dumps(mutated(data, header)).encode(), body)
        everything(path.parent)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(data=st.data())
def test_values_and_configs_nearly_right(name: str, data: st.DataObject) -> None:
    """Some tensors steer decoding: states, shapes, group indices."""
    with honest(name, data) as path:
        if data.draw(st.booleans()):
            text, _, body = read_header(path)
            changed = shaken(data, body)
            raw_file(path, text, changed + bytes(len(body) - len(changed)))
        else:
            config = path.with_name("config.json")
            config.write_text(json.dumps(mutated(data, json.loads(config.read_text()))))
        everything(path.parent)
