"""What a model card says: where the model is from, what it costs and gives, how to load it, how to make it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbitq.card import front_matter
from kbitq.card.command import command_of, is_repository
from kbitq.card.markdown import code, fenced, inline, number, size, table
from kbitq.card.usage import HERE, usage, usage_elsewhere

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
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Attributes:
        ledger: ``totals`` and ``tensors``, and what else of ``quantization_report.json`` is known.
        source: ``org/name@commit``, or the name of the file or folder that was quantized; None where it is not known.
        config: config.json; None where there is none.
        files: names of the files beside the weights.
        evaluations: results of ``kbitq eval --save`` on texts.
        tasks: scores of ``kbitq eval --tasks``.
        readme: the README.md of the source, or an earlier card with the source's text in it.
    """

    ledger: Mapping[str, Any]
    source: str | None = None
    config: Mapping[str, Any] | None = None
    files: Collection[str] = ()
    evaluations: Sequence[Row] = field(default_factory=tuple)
    readme: str | None = None
    tasks: Sequence[Row] = field(default_factory=tuple)


def layer_kind(name: str) -> str:
    """Attention, feed-forward, ...: the kind of layer that a tensor's name tells of."""
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def model_card(
    subject: Subject, *, title: str | None = None, place: str = HERE, base: str | None = None, out: str | None = None
) -> str:
    """The text of README.md for a quantized checkpoint; a function of its arguments alone.

    Args:
        subject: what it is about.
        title: heading; the default is made of the source's name.
        place: where it will be loaded from: this folder, a file or ``org/name``.
        base: the source as ``org/name[@revision]``, if that is known better.
        out: the output that the command must name.
    """
    source = base or subject.source
    repository = source.partition("@")[0] if source and is_repository(source) else None
    fields, text = front_matter.split(subject.readme)
    quantized = [t for t in subject.ledger["tensors"] if t["verdict"] == "quantized"]
    parts = [
        front_matter.merged(fields, repository),
        f"# {inline(title or _title(source, quantized))}\n",
        _summary(subject, quantized, source),
        "## Use\n\n" + _usage(subject, place),
        "## Quality\n\n" + _quality(quantized) + _evaluations(subject.evaluations) + _tasks(subject.tasks),
        "## Reproduce\n\n" + _reproduce(subject.ledger, source, out),
    ]
    return front_matter.with_source("\n".join(parts), text)


def _usage(subject: Subject, place: str) -> str:
    found = format_of(subject.ledger)
    if found is None:
        return usage(place, subject.config, subject.files)
    return usage_elsewhere(found, place, subject.config, subject.files)


def format_of(ledger: Mapping[str, Any]) -> str | None:
    """The other tool's format that a checkpoint is in; None for kbitq's own."""
    options = ledger.get("options")
    found = options.get("format") if isinstance(options, Mapping) else None
    return found if isinstance(found, str) else None


def _title(source: str | None, quantized: Sequence[Row]) -> str:
    name = (source or "A checkpoint").partition("@")[0].rpartition("/")[2].removesuffix(".safetensors")
    return f"{name}, quantized to {_ks(quantized)}"


def _ks(rows: Sequence[Row]) -> str:
    ks = sorted({t["k"] for t in rows})
    return f"K = {ks[0]}" if len(ks) == 1 else f"K = {ks[0]} to {ks[-1]}" if ks else "no K"


def _codecs(rows: Sequence[Row]) -> list[str]:
    """The codecs that rows name; those of the default one name none."""
    return sorted({str(t["codec"]) for t in rows if "codec" in t})


def _summary(subject: Subject, quantized: Sequence[Row], source: str | None) -> str:
    totals, kbitq = subject.ledger["totals"], "[kbitq](https://pypi.org/project/kbitq/)"
    before, after = totals.get("bytes_in"), totals.get("bytes")
    both = _is_number(before) and _is_number(after) and after
    smaller = f", from {size(before)} ({before / after:.2f} times smaller)" if both else ""
    measured = totals.get("sqnr_db") is not None
    decibels = totals.get("sqnr_db") if measured else totals.get("mean_sqnr_db")
    coverage = totals.get("coverage")
    rows = [
        ("Size", f"{size(after)}{smaller}"),
        ("Bits per weight", f"{number(totals.get('bits_per_weight'), 3)} (quantized tensors)"),
        ("Coverage", f"{number(100 * coverage if _is_number(coverage) else None, 1)} % of the parameters"),
        ("SQNR", f"{number(decibels, 2)} dB {'overall' if measured else 'on average'}"),
        *_headline(subject.evaluations),
        *_coding(subject, quantized),
        *_guided_by(subject.ledger),
    ]
    return f"{_link(source)}, quantized with {kbitq} to {_ks(quantized)}.\n\n" + table(("", ""), rows)


def _coding(subject: Subject, quantized: Sequence[Row]) -> list[tuple[str, str]]:
    """How weights are coded, as rows of the table."""
    scale = "Scale rule", inline(", ".join(sorted({str(t["scale"]) for t in quantized})))
    if (found := format_of(subject.ledger)) is not None:
        return [("Format", inline(found)), scale]
    levels = "Codebook", inline(", ".join(sorted({str(t["codebook"]) for t in quantized})))
    return [*([("Codec", inline(", ".join(codecs)))] if (codecs := _codecs(quantized)) else []), scale, levels]


def _link(source: str | None) -> str:
    if source is None:
        return "A checkpoint"
    name, _, revision = source.partition("@")
    if not is_repository(source):
        return code(source)
    at = f" at revision {code(revision)}" if revision else ""
    return f"[{inline(name)}](https://huggingface.co/{name}){at}"


def _headline(evaluations: Sequence[Row]) -> list[tuple[str, str]]:
    """The last evaluation in short."""
    if not evaluations:
        return []
    last = evaluations[-1]
    compared = last.get("against") or {}
    reference = f" (source: {number(compared['reference_perplexity'], 3)})" if compared else ""
    rows = [("Perplexity", number(last["perplexity"], 3) + reference)]
    return [*rows, ("KL divergence", number(compared["kl_mean"], 4, " nats"))] if compared else rows


def _quality(quantized: Sequence[Row]) -> str:
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for tensor in quantized:
        by_kind[layer_kind(str(tensor["name"]))].append(tensor)
    rows = []
    for kind in [*(kind for kind, _ in _KINDS), "other"]:
        tensors = by_kind.get(kind, [])
        known = [t["sqnr_db"] for t in tensors if _is_number(t["sqnr_db"])]
        if known:
            bits = ", ".join(map(str, sorted({t["k"] for t in tensors})))
            rows.append((kind, str(len(tensors)), bits, f"{sum(known) / len(known):.2f}", f"{min(known):.2f}"))
    note = "SQNR is 10 log10 of the weights' energy over the error's, in dB; the mean is over tensors.\n"
    return table(("Layers", "Tensors", "K", "Mean SQNR (dB)", "Worst SQNR (dB)"), rows) + "\n" + note


def _evaluations(evaluations: Sequence[Row]) -> str:
    if not evaluations:
        return ""
    head = ("Text", "Windows", "Perplexity", "Source's", "KL (nats), mean", "99 % below", "Same top token")
    rows = []
    for found in evaluations:
        compared = found.get("against") or {}
        rows.append((
            code(found["text"]["name"]), f"{found['windows']} x {found['window']} tokens",
            number(found["perplexity"], 3), number(compared.get("reference_perplexity"), 3),
            number(compared.get("kl_mean"), 4), number(compared.get("kl_p99"), 4),
            number(100 * compared["same_top1"] if compared else None, 1, " %"),
        ))  # fmt: skip
    return "\n" + table(head, rows) + "\nMeasured with `kbitq eval`.\n"


def _tasks(tasks: Sequence[Row]) -> str:
    if not tasks:
        return ""
    head = ("Task", "Shots", "Samples", "Metric", "Value", "Standard error", "Source's")
    rows = [
        (
            code(found["task"]), str(found["shots"]), str(found["samples"]), code(found["metric"]),
            number(found["value"], 4), number(found.get("stderr"), 4), number(found.get("against"), 4),
        )
        for found in tasks
    ]  # fmt: skip
    harnesses = ", ".join(sorted({inline(str(found["harness"])) for found in tasks}))
    return "\n" + table(head, rows) + f"\nMeasured with `kbitq eval --tasks` ({harnesses}).\n"


def _reproduce(ledger: Mapping[str, Any], source: str | None, out: str | None) -> str:
    named = [(ledger.get("recipe"), "lies beside the weights")]
    files = ledger.get("files")
    entries = files if isinstance(files, list) else []
    named += [(entry.get("name"), _identity(entry)) for entry in entries]
    lines = [f"* {code(name)} {said}.\n" for name, said in named if name]
    text = [fenced(command_of(ledger, source, out), "bash"), *(["".join(lines)] if lines else [])]
    if made_with := ledger.get("kbitq"):
        same = "Every machine gives the same bytes."
        if ledger.get("calibration"):  # feedback runs through a product of matrices
            same = "The bytes depend on the kind of device and its number of threads, in what rounding decides."
        text.append(f"Made with kbitq {inline(made_with)}. {same}\n")
    return "\n".join(text)


def _identity(file: Mapping[str, Any]) -> str:
    """How a file that the command names is known to be the right one."""
    if file.get("option") == "calibration":
        return f"is a folder of `kbitq calibrate` with the fingerprint {code(file.get('sha256'))}"
    return f"has the SHA-256 {code(file.get('sha256'))}"


def _guided_by(ledger: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The calibration or the importance that a run was given, by name."""
    files = ledger.get("files")
    given = {file.get("option"): code(file.get("name")) for file in (files if isinstance(files, list) else [])}
    rows = [("Calibration", "calibration", ", by error feedback"), ("Importance of columns", "importance", "")]
    return [(title, given[option] + more) for title, option, more in rows if option in given]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
