"""tokenizer.json and tokenizer_config.json from the vocabulary of a GGUF file. Imports no torch and no tokenizers.

Two kinds: byte-level BPE with its merges (``tokenizer.ggml.model`` is ``gpt2``), and SentencePiece's BPE with scores
(``llama``), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kbitq.formats.gguf.container import integer

_CONTROL, _USER, _UNKNOWN, _BYTE = 3, 4, 2, 6
_LONGEST_MERGED = 512  # characters; the work grows with their square, and no vocabulary has tokens so long
_SPACE = "\u2581"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + _WORDS % r"\p{N}{1,3}"
_QWEN2 = _ENGLISH + _WORDS % r"\p{N}"
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}
_BYTE_LEVEL = ("gpt-2", "gpt2", "default")
_DIGITS = ("smollm", "starcoder", "refact", "command-r")

Table = dict[str, Any]


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The two files' contents by name, and sentences about what is missing."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _are(tokens, str):
        return {}, ["tokenizer.json cannot be rebuilt: the file has no vocabulary"]
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if _are(kinds, int) and len(kinds) == len(tokens) else [1] * len(tokens)
    model = metadata.get("tokenizer.ggml.model")
    if len(set(tokens)) != len(tokens):
        return {}, ["tokenizer.json cannot be rebuilt: the vocabulary has a token twice"]
    if model == "gpt2":
        body, reason = _byte_level(metadata, tokens)
    elif model == "llama":
        body, reason = _sentence_piece(metadata, tokens, kinds)
    else:
        body, reason = None, f"tokenizers of the kind {str(model)[:40]!r} are not known here"
    if body is None:
        return {}, [f"tokenizer.json cannot be rebuilt: {reason}"]
    special = _special(metadata, tokens)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds, model == "llama"),
        **body,
    }
    if tokenizer["post_processor"] is None:
        tokenizer["post_processor"] = _with_bos(metadata, tokens, model == "llama")
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _config(metadata, special)}, []


def _are(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _added(tokens: Sequence[str], kinds: Sequence[int], unknown: bool) -> list[Table]:
    special = (_CONTROL, _UNKNOWN) if unknown else (_CONTROL,)
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for i, kind in enumerate(kinds)
        if kind in (*special, _USER)
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Table | None, str]:
    merges, kind = metadata.get("tokenizer.ggml.merges"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not _are(merges, str) or any(" " not in m for m in merges):
        return None, "the file has no merges"
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind not in _SPLITS}
    steps: list[Table] = [own]
    if kind in _SPLITS:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": _SPLITS[kind]}, "behavior": "Isolated", "invert": False})
    elif kind in _DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif kind not in _BYTE_LEVEL:
        return None, f"how its kind {str(kind)[:40]!r} splits text is not known here"
    return {
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else own,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, [m.split(" ", 1) for m in merges], ignore_merges=kind in _SPLITS and kind != "qwen2"),
    }, ""


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **fields: Any) -> Table:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [list(m) for m in merges],
        **fields,
    }


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Table | None, str]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not _are(scores, float) or len(scores) != len(tokens):
        return None, "the vocabulary has no scores"
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, space] if prefix else [space]
    decoders: list[Table] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens, _merges(tokens, kinds, scores), unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds
        ),
    }, ""


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, those of the highest score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for i, token in enumerate(tokens):
        if kinds[i] in (_CONTROL, _UNKNOWN, _BYTE) or len(token) > _LONGEST_MERGED:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], left, right))
    found.sort(key=lambda f: (f[0], -len(f[3]), -len(f[4]), f[1], f[2]))
    return [(left, right) for *_, left, right in found]


def _special(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in keys.items():
        token = integer(metadata, f"tokenizer.ggml.{key}_token_id", 0, len(tokens) - 1)
        if token is not None:
            found[name] = tokens[token]
    return found


def _with_bos(metadata: Mapping[str, Any], tokens: Sequence[str], by_default: bool) -> Table | None:
    """A post-processor that puts the first token before a text, where the file wants one."""
    add = metadata.get("tokenizer.ggml.add_bos_token", by_default)
    bos = integer(metadata, "tokenizer.ggml.bos_token_id", 0, len(tokens) - 1)
    if add is not True or bos is None:
        return None
    first: Table = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, text[0]],
        "pair": [first, text[0], {"SpecialToken": {"id": tokens[bos], "type_id": 1}}, text[1]],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _config(metadata: Mapping[str, Any], special: Mapping[str, str]) -> Table:
    config: Table = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config
