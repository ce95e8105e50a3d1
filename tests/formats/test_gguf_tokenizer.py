"""Tokenizers rebuilt from a GGUF file's vocabulary split text as the ones that were converted."""

import json

import pytest

from kbitq.formats.gguf.tokenizer import tokenizer_files

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello world, it's 2026!",
    "  two  spaces\n\nand \u00e9\u00e8 \u4f60\u597d",
    "a",
    "",
    "<s>aa</s> aaa bbb abab 123456",
]
CORPUS = ["Hello world it's a test of the merges", "abab aaa bbb", "123 456 \u00e9\u00e8", "the world of merges"] * 20


def trained(kind):
    """A tokenizer of the package tokenizers, and the metadata that llama.cpp's converter writes of it."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<s>", "</s>"]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if kind == "qwen2":
        pattern = QWEN2
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    )
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in vocabulary],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def rebuilt(metadata):
    tokenizers = pytest.importorskip("tokenizers")
    contents, missing = tokenizer_files(metadata)
    assert not missing
    return tokenizers.Tokenizer.from_str(json.dumps(contents["tokenizer.json"])), contents["tokenizer_config.json"]


@pytest.mark.parametrize("kind", ["gpt-2", "qwen2"])
def test_byte_level(kind):
    original, metadata = trained(kind)
    again, config = rebuilt(metadata)
    for text in TEXTS:
        assert again.encode(text).ids == original.encode(text).ids
        assert again.decode(again.encode(text).ids) == original.decode(original.encode(text).ids)
    assert (
        config["bos_token"] == "<s>" and config["eos_token"] == "</s>" and config["chat_template"] == "{{ messages }}"
    )


def test_the_first_token_is_put_before_a_text():
    _, metadata = trained("gpt-2")
    again, _ = rebuilt(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert again.encode("a").ids[0] == 0 and 0 not in again.encode("a", add_special_tokens=False).ids


def test_sentence_piece():
    """Merges follow from scores: the token of the highest score is made first; bytes stand for what no token has."""
    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{b:02X}>": 0.0 for b in range(256)}}
    pieces |= {"\u2581": -10.0, "a": -11.0, "b": -12.0, "ab": -1.0, "aa": -2.0, "\u2581a": -3.0, "\u2581ab": -0.5}
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": list(pieces.values()),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
    }
    again, _ = rebuilt(metadata)
    assert again.encode("ab aab").tokens == ["<s>", "\u2581ab", "\u2581a", "ab"]
    assert again.encode("\u00e9", add_special_tokens=False).tokens == ["\u2581", "<0xC3>", "<0xA9>"]
    assert again.decode(again.encode("ab \u00e9 aa").ids) == "ab \u00e9 aa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "a token twice"),
        ({"tokenizer.ggml.model": "bert"}, "of the kind 'bert'"),
        ({"tokenizer.ggml.pre": "chameleon"}, "'chameleon' splits text"),
        ({"tokenizer.ggml.merges": []}, "no merges"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_said(change, message):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    contents, (missing,) = tokenizer_files(metadata | change)
    assert not contents and message in missing
