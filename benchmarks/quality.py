"""What a bit is worth: perplexity and divergence of a language model against size, beside other formats.

    python benchmarks/quality.py                                        # draws the pictures, writes the table
    python benchmarks/quality.py --model pycode-llama-26m --tokens networkx.tokens     # measures what is missing first
    python benchmarks/quality.py --model ... --tokens ... --again "one K"              # measures that series again
    python benchmarks/quality.py --model ... --tokens ... --stats stats                # those with a calibration too

Everything measured stands in benchmarks/quality.json, with its command and its date. A curve more is a line more in
``SERIES``, and one in ``LOOKS`` of quality_plot.py, which draws. The other formats' quantizers are in quality_peers.py
and, where what is measured is a checkpoint in the format, in quality_files.py; tests/formats/packages.txt names the
packages that they need. The tables are in docs/quality.md and docs/formats.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_files
import quality_peers
import quality_plot
from quality_files import stored_by

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "quality.json"
PAGE = ROOT / "docs" / "quality.md"
PLOTS = {"quality.svg": quality_plot.perplexity, "divergence.svg": quality_plot.divergence}
WAYS = {"no data": "", "`--importance stats`": "--importance stats ", "`--calibration stats`": "--calibration stats "}
STEPS = "<!-- what each step buys, by benchmarks/quality.py -->", "<!-- end of the steps -->"
FORMATS_PAGE = ROOT / "docs" / "formats.md"
FORMATS = "<!-- what formats cost, by benchmarks/quality.py -->", "<!-- end of what formats cost -->"
BESIDE = (
    "kbitq --bpw",
    "kbitq, one K",
    "kbitq, trellis",
    "kbitq, trellis, scale block 128",
    "kbitq --bpw, both codecs",
)
BESIDE_CALIBRATED = ("kbitq, one K, calibrated", "kbitq, trellis, calibrated", "kbitq, trellis 128, calibrated")
START, END = "<!-- measured by benchmarks/quality.py -->", "<!-- end of the perplexities -->"
WINDOWS, WINDOW = 48, 512
STATS = "stats"  # in options: the folder of a calibration

Point = dict[str, Any]  # label, bits (a weight), perplexity, divergence (mean, nats; None: not known), command, date


@dataclass(frozen=True)
class Series:
    """A curve, or the marks of another format.

    Attributes:
        name: in the legend and in the table.
        wishes: options of ``kbitq quantize``, or names that ``peer`` knows; empty where the figures were only recorded.
        peer: makes the quantizer of another format from its name, and says its bits per weight.
        make: makes a checkpoint of the model in another format, which kbitq decodes.
    """

    name: str
    wishes: tuple[str, ...] = ()
    peer: Callable[[str], tuple[quality_peers.Kept, float]] | None = None
    make: quality_files.Make | None = None


SERIES = (
    Series("kbitq --bpw", tuple(f"--bpw {x}" for x in (2.375, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.25, 4.5, 5))),
    Series("kbitq, one K", tuple(f"--k {k}" for k in (2, 3, 4, 5, 6, 7, 8))),
    Series("kbitq, trellis", tuple(f"--codec trellis --k {k}" for k in (2, 3, 4))),
    Series("kbitq, trellis, scale block 128", tuple(f"--codec trellis --scale-block 128 --k {k}" for k in (2, 3, 4))),
    Series("kbitq --bpw, both codecs", tuple(f"--codec auto --bpw {x}" for x in (2.25, 2.5, 3, 3.25, 4))),
    Series("kbitq, one K, calibrated", tuple(f"--calibration stats --k {k}" for k in (2, 3, 4))),
    Series("kbitq, trellis, calibrated", tuple(f"--calibration stats --codec trellis --k {k}" for k in (2, 3, 4))),
    Series(
        "kbitq, trellis 128, calibrated",
        tuple(f"--calibration stats --codec trellis --scale-block 128 --k {k}" for k in (2, 3, 4)),
    ),
    Series(
        "llama.cpp",
        ("IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "MXFP4", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"),
        quality_peers.llama_cpp,
    ),
    Series("bitsandbytes", ("NF4", "NF4 double"), quality_peers.nf4),
    Series("EXL3, without calibration"),
    Series("EXL3, with calibration"),
    # From here on in the tables only.
    Series("llama.cpp, others", ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), quality_peers.llama_cpp),
    Series("bitsandbytes, others", ("FP4", "FP4 double", "int8"), make=stored_by(quality_files.bitsandbytes)),
    Series("HQQ", tuple(f"{k} bits, groups of 64" for k in (2, 3, 4, 8)), make=stored_by(quality_files.hqq)),
    Series(
        "MLX",
        (*(f"{k} bits, groups of 64" for k in (2, 3, 4, 6, 8)), "MXFP4", "NVFP4", "MXFP8"),
        make=stored_by(quality_files.mlx),
    ),
    Series("torchao", ("4 bits in bytes, groups of 128", "int8", "float8"), make=stored_by(quality_files.torchao)),
    Series("ModelOpt", ("NVFP4",), make=stored_by(quality_files.modelopt)),
    Series("AWQ of GPTQModel, with calibration", ("4 bits, groups of 128",), make=quality_files.awq),
    Series(
        "kbitq, other choices",
        (
            *("--bpw 2.75 --error none", "--bpw 3.25 --error none", "--bpw 4.25 --error none"),
            *("--bpw 2.75 --codebook fit", "--bpw 3.25 --codebook fit", "--k 3 --codebook fit"),
            *(f"--importance stats --k {k}" for k in (2, 3, 4)),
            *(f"--importance stats --codec trellis --k {k}" for k in (2, 3, 4)),
            *(f"--format compressed-tensors --k {k}" for k in (4, 8)),
            *(f"--format compressed-tensors --group channel --k {k}" for k in (4, 8)),
            "--format compressed-tensors --group 32 --k 4",
            "--format compressed-tensors --bpw 5",
            *(f"--format {name}" for name in ("int8", "fp8", "fp8-block", "bnb-nf4", "bnb-nf4-double")),
            *(f"--format gptq --k {k}" for k in (4, 8)),
            *(f"--calibration stats --format gptq --k {k}" for k in (4, 8)),
        ),
    ),
)


class Remembered:
    """A model that reads each window once, and answers from memory when it is asked again."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.device = model, model.config, model.device
        self._known: dict[bytes, Any] = {}

    def __call__(self, input_ids: Any) -> Any:
        """As of the model."""
        key = input_ids.numpy().tobytes()
        if key not in self._known:
            self._known[key] = self.model(input_ids=input_ids)
        return self._known[key]


class Measure:
    """Evaluates models on the same windows of tokens, beside the model before quantizing.

    Args:
        source: the model's folder.
        tokens: a file of token ids.
        stats: a folder of ``kbitq calibrate``, on another text than ``tokens``; the word ``stats`` in options.
    """

    def __init__(self, source: Path, tokens: Path, stats: Path | None) -> None:
        from kbitq.eval.perplexity import read_tokens, windows_of
        from kbitq.integrations.transformers.loading import load_model

        self.source, self.stats = source, stats
        self.reference = Remembered(load_model(source, device="cpu"))
        self.windows = windows_of(read_tokens(tokens, self.reference.config.vocab_size), WINDOW, WINDOWS)

    def point(self, series: Series, wish: str) -> Point:
        """A wish of a series, measured."""
        if series.make is not None:
            model, bits, command = self._file(series, wish, series.make)
        else:
            model, bits, command = self._peer(series, wish) if series.peer else self._ours(wish)
        return {"label": wish, "bits": round(bits, 4), **self.evaluated(model), "command": command, "date": today()}

    def evaluated(self, model: Any) -> Point:
        """Perplexity and mean divergence of a model."""
        from kbitq.eval.perplexity import evaluate

        found = evaluate(model, self.windows, reference=self.reference)
        assert found.divergence is not None
        return {"perplexity": round(found.perplexity, 4), "divergence": round(found.divergence.mean, 6)}

    def _ours(self, options: str) -> tuple[Any, float, str]:
        from kbitq.checkpoint import inspect
        from kbitq.cli.main import run
        from kbitq.integrations.transformers.loading import load_model

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            given = [str(self.stats) if word == STATS else word for word in shlex.split(options)]
            if run(["quantize", str(self.source), *given, "-o", str(out), "--quiet"]):
                raise SystemExit(1)
            bits = inspect(out).totals["bits_per_weight"]
            if "--format" in given:  # decoded as its own package does it; activations stay as they are
                out, coded = Path(folder) / "plain", out
                if run(["dequantize", str(coded), "-o", str(out), "--quiet"]):
                    raise SystemExit(1)
            return load_model(out, device="cpu"), bits, f"kbitq quantize {self.source.name} {options}"

    def _file(self, series: Series, label: str, make: quality_files.Make) -> tuple[Any, float, str]:
        from kbitq.cli.main import run
        from kbitq.integrations.transformers.loading import load_model

        with tempfile.TemporaryDirectory() as place:
            stored, plain = Path(place) / "stored", Path(place) / "plain"
            make(self.source, stored, label)
            if run(["dequantize", str(stored), "-o", str(plain), "--quiet"]):
                raise SystemExit(1)
            bits = quality_files.bits_a_weight(stored)
            return (
                load_model(plain, device="cpu"),
                bits,
                f"{tool_of(series.name)} {label}, a checkpoint that kbitq dequantizes",
            )

    def _peer(self, series: Series, name: str) -> tuple[Any, float, str]:
        from kbitq.integrations.transformers.loading import load_model

        assert series.peer is not None
        kept, bits = series.peer(name)
        model = load_model(self.source, device="cpu")
        quality_peers.replace_weights(model, kept)
        return model, bits, f"{tool_of(series.name)} {name}, every Linear weight but the head's"


def tool_of(series: str) -> str:
    """The tool that a series is of; ``others`` are those of its formats that are not drawn."""
    return series.removesuffix(", others")


def today() -> str:
    """The date, as the documents write it."""
    return f"{datetime.date.today():%-d %B %Y}"


def load() -> dict[str, Any]:
    """What was measured so far."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def measure(data: dict[str, Any], tool: Measure, again: Iterable[str]) -> None:
    """Measures the points that ``data`` lacks, and those of the series named in ``again``; saves after each."""
    for series in SERIES:
        known: dict[str, Point] = {p["label"]: p for p in data["series"].get(series.name, [])}
        for wish in series.wishes:
            if wish not in known or series.name in again:
                if STATS in wish.split() and tool.stats is None:
                    raise SystemExit(f"error: '{wish}' is not measured yet: give --stats FOLDER")
                known[wish] = tool.point(series, wish)
                told = known[wish]
                print(
                    f"{series.name:14} {wish:12} {told['bits']:.3f} {told['perplexity']:.3f} {told['divergence']:.5f}",
                    flush=True,
                )
                save(data, series, known)
        save(data, series, known)


def save(data: dict[str, Any], series: Series, known: dict[str, Point]) -> None:
    """Writes what is known of a series into ``data``, and ``data`` into its file."""
    wanted = [known[wish] for wish in series.wishes if wish in known] or list(known.values())
    data["series"][series.name] = sorted(wanted, key=lambda p: (p["bits"], p["label"]))
    data["series"] = {s.name: data["series"][s.name] for s in SERIES if s.name in data["series"]}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def table(data: dict[str, Any]) -> str:
    """Every point in Markdown, by size."""
    rows = [(p["bits"], name, p) for name, points in data["series"].items() for p in points]
    lines = ["| | bits per weight | perplexity | divergence from the original |", "|---|---|---|---|"]
    lines += [
        f"| {_title(name, p)} | {bits:.2f} | {p['perplexity']:.2f} | {_nats(p)} |"
        for bits, name, p in sorted(rows, key=lambda row: row[:2])
    ]
    return "\n".join(lines) + "\n"


def steps(data: dict[str, Any]) -> str:
    """What codec and calibration buy at each K, in Markdown: perplexity, and divergence in brackets."""
    points = {p["label"]: p for points in data["series"].values() for p in points}
    known = [(title, how) for title, how in WAYS.items() if f"{how}--k 2" in points]
    lines = [f"| K | codec | {' | '.join(title for title, _ in known)} |", "|---|---|" + "---|" * len(known)]
    for k in (2, 3, 4):
        for codec in ("planes", "trellis"):
            options = f"--k {k}" if codec == "planes" else f"--codec {codec} --k {k}"
            found = [points[how + options] for _, how in known]
            cells = (f"{p['perplexity']:.2f} ({p['divergence']:.4f})" for p in found)
            lines.append(f"| {k} | {codec} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def formats(data: dict[str, Any]) -> str:
    """What other tools' formats cost, in Markdown, by size: each beside the best of kbitq's that is no larger."""
    names = [s.name for s in SERIES if s.peer or s.make]
    rows = [(p["bits"], name, p) for name in names for p in data["series"].get(name, [])]
    others = data["series"]["kbitq, other choices"]
    rows += [(p["bits"], "", p) for p in others if "--format" in p["label"]]
    lines = [
        "| format | bits a weight | perplexity | divergence | kbitq's own, no larger | perplexity | divergence |",
        "|---|---|---|---|---|---|---|",
    ]
    for bits, name, p in sorted(rows, key=lambda row: (row[0], row[1], row[2]["label"])):
        calibrated = "calibration" in name + p["label"]
        ours = [q for of in BESIDE + (BESIDE_CALIBRATED if calibrated else ()) for q in data["series"][of]]
        best = min((q for q in ours if round(q["bits"], 2) <= round(bits, 2)), key=lambda q: q["divergence"])
        beside = f"`{best['label']}`, {best['bits']:.2f} | {best['perplexity']:.2f} | {_nats(best)}"
        title = f"`{p['label']}`" if not name else _title(name, p)
        lines.append(f"| {title} | {bits:.2f} | {p['perplexity']:.2f} | {_nats(p)} | {beside} |")
    return "\n".join(lines) + "\n"


def _title(series: str, point: Point) -> str:
    return f"**`{point['label']}`**" if point["label"].startswith("--") else f"{tool_of(series)}: {point['label']}"


def _nats(point: Point) -> str:
    return "" if point["divergence"] is None else f"{point['divergence']:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="pycode-llama-26m: measure what is missing")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="networkx.tokens")
    parser.add_argument("--stats", type=Path, metavar="FOLDER", help="of kbitq calibrate, on other code")
    parser.add_argument("--again", action="append", default=[], metavar="SERIES", help="measure this series once more")
    options = parser.parse_args()
    data = load()
    if options.model is not None:
        measure(data, Measure(options.model, options.tokens, options.stats), options.again)
    for path, (start, end), made in (
        (PAGE, (START, END), table(data)),
        (PAGE, STEPS, steps(data)),
        (FORMATS_PAGE, FORMATS, formats(data)),
    ):
        head, rest = path.read_text(encoding="utf-8").split(start)
        path.write_text(f"{head}{start}\n\n{made}\n{end}{rest.split(end)[1]}", encoding="utf-8")
    if importlib.util.find_spec("vl_convert") is None:
        print("The pictures are as they were: vl-convert-python, which draws them, is not installed.")
        return 0
    for name, draw in PLOTS.items():
        (ROOT / "docs" / name).write_text(draw(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
