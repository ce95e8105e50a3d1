"""The model card of a published quantization: its source, what it cost, how to load it, how to make it again."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData, RepoCard

from kbitq.text_safety import all_printable, printable

_KINDS = (
    # The part of a name that says what kind of layer a tensor is, in the order of the table.
    ("embeddings", ("embed", "wte", "wpe")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")),
    ("experts", ("experts",)),
    (
        "feed-forward",
        ("mlp", "ffn", "feed_forward", "intermediate", "output.dense", "fc1", "fc2", "up_proj", "down_proj"),
    ),
    ("head", ("lm_head", "score", "classifier")),
)
# Tags and fields of a source's card that hold for a quantization of it.
_CARRIED = ("license", "license_name", "license_link", "language", "datasets", "library_name", "pipeline_tag", "tags")


def layer_kind(name: str) -> str:
    """Attention, feed-forward, ...: the kind of layer that a tensor's name tells of."""
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def model_card(
    report: Mapping[str, Any],
    *,
    title: str,
    repo_id: str,
    base_model: str | None,
    base_revision: str | None,
    command: str,
    versions: Mapping[str, str],
    source_card: str | None = None,
) -> str:
    """The text of README.md for a quantized checkpoint.

    Args:
        report: ``totals`` and ``tensors`` as ``kbitq inspect --json`` gives them.
        title: heading, usually the output's name.
        repo_id: where it will be loaded from.
        base_model: the source's repository, None if it came from a disk.
        base_revision: the source's commit.
        command: what reproduces the files.
        versions: names and versions of what made it.
        source_card: the source's README.md; its license, language and tags are carried over.
    """
    report, command = all_printable(report), printable(command)
    data = _metadata(base_model, source_card)
    quantized = [t for t in report["tensors"] if t["verdict"] == "quantized"]
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {_plain(title)}\n",
        _summary(report["totals"], quantized, base_model, base_revision),
        "## Use\n\n" + _usage(repo_id),
        "## Quality\n\n" + _quality(quantized),
        f"## Reproduce\n\n{_fenced(command)}",
        "Made with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n",
    ]
    return "\n".join(parts)


def _metadata(base_model: str | None, source_card: str | None) -> ModelCardData:
    carried: dict[str, Any] = {}
    if source_card:
        original = RepoCard(source_card, ignore_metadata_errors=True).data.to_dict()
        carried = {key: original[key] for key in _CARRIED if original.get(key)}
    tags = carried.pop("tags", None) or []
    tags = [t for t in tags if isinstance(t, str)] + [t for t in ("kbitq", "quantized") if t not in tags]
    if base_model:
        carried["base_model_relation"] = "quantized"
    return ModelCardData(base_model=base_model, tags=tags, ignore_metadata_errors=True, **carried)


def _summary(
    totals: Mapping[str, Any], quantized: Sequence[Mapping[str, Any]], base: str | None, revision: str | None
) -> str:
    bits = sorted({t["k"] for t in quantized})
    source = f"[{base}](https://huggingface.co/{base})" if base else "a checkpoint"
    at = f" at revision `{revision}`" if base and revision else ""
    sqnr, bpw = totals.get("sqnr_db"), totals.get("bits_per_weight")
    rows = [
        ("K", ", ".join(map(str, bits))),
        ("bits per weight (quantized tensors)", f"{bpw:.3f}" if bpw else "-"),
        ("tensors", f"{len(quantized)} quantized"),
        ("SQNR, overall", f"{sqnr:.2f} dB" if sqnr is not None else "-"),
        ("scale rule", ", ".join(sorted({str(t["scale"]) for t in quantized}))),
        ("codebook", ", ".join(sorted({str(t["codebook"]) for t in quantized}))),
    ]
    kbitq = "[kbitq](https://pypi.org/project/kbitq/)"
    opening = f"{source}{at}, quantized with {kbitq}: blocks of 32 weights, one scale byte a block, bit planes.\n\n"
    return opening + _table(("", ""), rows)


def _usage(repo_id: str) -> str:
    return (
        "```python\nimport kbitq  # registers the format with transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")\n```\n\n'
        f"Or back to an ordinary checkpoint: `kbitq dequantize {repo_id} -o out/`\n"
    )


def _quality(quantized: Sequence[Mapping[str, Any]]) -> str:
    by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for tensor in quantized:
        by_kind[layer_kind(str(tensor["name"]))].append(tensor)
    rows = []
    for kind in [*(kind for kind, _ in _KINDS), "other"]:
        tensors = by_kind.get(kind, [])
        known = [t["sqnr_db"] for t in tensors if t["sqnr_db"] is not None]
        if known:
            bits = ", ".join(map(str, sorted({t["k"] for t in tensors})))
            rows.append((kind, str(len(tensors)), bits, f"{sum(known) / len(known):.2f}", f"{min(known):.2f}"))
    note = "SQNR: 10 log10 of the weights' energy over that of the error, in dB; the mean is over tensors.\n"
    return _table(("layer", "tensors", "K", "mean SQNR", "worst SQNR"), rows) + "\n" + note


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(_plain, row)) + " |" for row in rows]) + "\n"


def _plain(text: str) -> str:
    """Text of a checkpoint as Markdown that shows just that text: neither HTML nor a link, a cell or a span of code."""
    return re.sub(r"([|`\[\]\\*])", r"\\\1", html.escape(printable(text), quote=False))


def _fenced(command: str) -> str:
    """A block of code that the command cannot end."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{ticks}bash\n{command}\n{ticks}\n"
