"""Who may import whom, in Python and in C++: the shape of the house, checked on the source without running it.

The unit is the room: a folder, sub-packages included, or a file that stands alone. So ``kbitq/checkpoint/plan/plan.py``
is in the room ``checkpoint.plan``, ``kbitq/checkpoint/inspection.py`` in ``checkpoint``.
"""

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Room -> the rooms it may import besides itself, errors and text_safety. A new room must be added here on purpose.
MAY_IMPORT: dict[str, set[str]] = {
    "text_safety": set(),
    "errors": set(),
    "format": set(),
    "_core": {"_C"},
    "_moved": set(),
    "ops": {"_core", "format"},
    "codecs": {"ops", "format"},
    "formats": {"ops", "format"},  # other tools' formats: they know no checkpoint, only names, shapes and values
    "calibration.statistics": {"calibration.triangle", "checkpoint.source", "format"},  # reading: whoever quantizes may
    "calibration.triangle": set(),
    # Making statistics: it runs a model, so it stands beside the jobs and nothing imports it.
    "calibration": {
        "calibration.statistics", "calibration.triangle", "checkpoint.source", "checkpoint.output", "choose", "eval",
        "format", "integrations.transformers", "ops",
    },
    "choose": {"calibration.statistics", "codecs", "format"},
    "quantized": {"codecs", "ops", "format"},
    "functional": {"codecs", "ops", "format"},
    "nn": {"choose", "codecs", "ops", "format", "on_the_fly", "quantized"},
    "card": set(),
    "eval": {"checkpoint.source", "checkpoint.output"},  # for the file that it writes beside a model
    # The way of a checkpoint, in this order: each room knows only the rooms above it.
    "checkpoint.source": {"format", "formats", "ops"},
    "checkpoint.output": {"checkpoint.source", "format"},
    "checkpoint.plan": {
        "calibration.statistics", "checkpoint.source", "checkpoint.output", "choose", "codecs", "format",
    },
    "checkpoint.passes": {
        "calibration.statistics", "card", "checkpoint.source", "checkpoint.output", "checkpoint.plan", "choose",
        "codecs", "format", "ops", "quantized",
    },
    "checkpoint.written": {"checkpoint.source", "checkpoint.passes", "choose", "codecs", "format", "ops"},
    # The jobs, a file each: they import the rooms, and no room imports them.
    "checkpoint": {
        "checkpoint.source", "checkpoint.output", "checkpoint.plan", "checkpoint.passes", "checkpoint.written",
        "card", "choose", "codecs", "format", "ops", "quantized",
    },
    # Many machines: it carries the plan of checkpoint out in parts, and only launches what others place and retry.
    "cluster": {
        "checkpoint", "checkpoint.source", "checkpoint.output", "checkpoint.plan", "checkpoint.passes", "choose",
        "codecs", "format", "hub",
    },
    # Weights that are no checkpoint are planned, measured and chosen for as a checkpoint is.
    "on_the_fly": {
        "checkpoint", "checkpoint.source", "checkpoint.plan", "choose", "codecs", "format", "ops", "quantized",
    },
    "report": {
        "card", "checkpoint", "checkpoint.source", "checkpoint.output", "checkpoint.plan", "checkpoint.written",
        "choose", "codecs", "eval", "format", "ops", "quantized",
    },
    "hub": {"checkpoint.source", "format"},  # it gives checkpoint a Storage
    "integrations": {"format", "nn"},
    "integrations.transformers": {
        "integrations", "checkpoint.source", "checkpoint.output", "checkpoint.plan", "choose", "codecs", "format", "nn",
        "on_the_fly", "ops", "quantized",
    },
    # Servers: each knows what they share, and the sentence by which a plan says what cannot be split over devices.
    "integrations.serving": {"_core", "checkpoint.plan", "codecs", "format", "ops"},
    "integrations.sglang": {"format", "integrations.serving"},
    "integrations.vllm": {"format", "integrations.serving"},
}  # fmt: skip
# Packages that only one room (and the rooms in it) may import.
ONLY_IN = {"huggingface_hub": "hub", "ray": "cluster", "typer": "cli", "rich": "cli"}
# Rooms that may import no third-party package but these.
THIRD_PARTY: dict[str, set[str]] = {"text_safety": set(), "errors": set(), "format": set()}
# The doors of the house: lazy tables of public names. To go through one is not to import all that it names.
DOORS = {"kbitq", "kbitq.checkpoint"}


def python_sources() -> list[Path]:
    return sorted([*ROOT.glob("kbitq/**/*.py"), *ROOT.glob("cli/**/*.py")])


def module_of(path: Path) -> str:
    """kbitq.checkpoint.plan.plan for kbitq/checkpoint/plan/plan.py, kbitq.cli.main for cli/main.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(("kbitq", *parts) if parts[0] == "cli" else parts)
    return name.removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module, or of a name in it: the longest that MAY_IMPORT has."""
    parts = module.split(".")[1:]
    if parts[:1] == ["cli"]:
        return "cli"
    known = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((room for room in known if room in MAY_IMPORT), parts[0] if parts else "")


def imported_names(path: Path, source: str) -> set[str]:
    """Absolute dotted names of everything that a file imports, wherever in the file, type-only imports included."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{stem}.{alias.name}" for alias in node.names)
    return names


def violations(room: str, names: Iterable[str]) -> list[str]:
    """What a room imports although it may not."""
    found = []
    for name in sorted(names):
        top, *rest = name.split(".")
        if top != "kbitq":
            allowed = THIRD_PARTY.get(room)
            if top in ONLY_IN and room.split(".")[0] != ONLY_IN[top]:
                found.append(f"{name}: only {ONLY_IN[top]} imports {top}")
            elif allowed is not None and top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{name}: {room} does without")
        elif room == "cli" or not rest:
            continue
        elif rest[0] == "cli":
            found.append(f"{name}: the library does not know the command line")
        elif room and room_of(name) not in MAY_IMPORT[room] | {room, "errors", "text_safety"}:
            found.append(f"{name}: {room} may import {sorted(MAY_IMPORT[room])}")
    return found


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_follow_the_rooms(path: Path) -> None:
    room = room_of(module_of(path))
    assert room in MAY_IMPORT or room in ("cli", ""), f"{room}: say in MAY_IMPORT what it may import"
    assert violations(room, imported_names(path, path.read_text())) == []


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules it imports, of the library and the command line."""
    sources = {module_of(path): path for path in python_sources()}
    graph: dict[str, set[str]] = {}
    for module, path in sources.items():
        names = imported_names(path, path.read_text())
        modules = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = {m for m in modules if m in sources and m != module} - DOORS
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    done: set[str] = set()
    way: list[str] = []

    def visit(module: str) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        way.append(module)
        for other in sorted(graph.get(module, ())):
            if found := visit(other):
                return found
        done.add(way.pop())
        return []

    return next((found for module in sorted(graph) if (found := visit(module))), [])


def test_no_file_is_in_a_circle() -> None:
    assert circle(import_graph()) == []


def test_circles_are_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_relative_imports_are_resolved() -> None:
    source = (
        "def f():\n    from ..source import open\n    from . import choice\n    import torch.nn\nfrom ... import ops"
    )
    assert imported_names(ROOT / "kbitq/checkpoint/plan/plan.py", source) == {
        "kbitq.checkpoint.source.open",
        "kbitq.checkpoint.plan.choice",
        "torch.nn",
        "kbitq.ops",
    }
    assert imported_names(ROOT / "cli/main.py", "from . import console\nfrom .. import ops") == {
        "kbitq.cli.console",
        "kbitq.ops",
    }


def test_import_checker_sees_violations() -> None:
    assert violations("format", {"kbitq.ops.scan", "json", "torch"}) == [
        "kbitq.ops.scan: format may import []",
        "torch: format does without",
    ]
    assert violations("_core", {"kbitq.nn.linear", "rich.table", "kbitq._C", "kbitq.errors", "torch"}) == [
        "kbitq.nn.linear: _core may import ['_C']",
        "rich.table: only cli imports rich",
    ]
    assert violations("checkpoint.output", {"kbitq.checkpoint.plan.plan.Plan", "kbitq.checkpoint.source.open"}) == [
        "kbitq.checkpoint.plan.plan.Plan: checkpoint.output may import ['checkpoint.source', 'format']",
    ]


# Room of csrc -> the rooms whose headers it may include besides its own.
MAY_INCLUDE: dict[str, set[str]] = {
    "format": set(),
    "cpu": {"format"},
    "cuda": {"format"},
    "codecs": {"cpu", "cuda", "format"},
    "ops/codec": {"codecs", "cpu", "cuda", "format"},
    "ops/linear": {"codecs", "cpu", "cuda", "format"},
    "formats": {"format"},
    "ops/formats": {"formats", "cpu", "cuda", "format"},
    "ops/nf4": {"cpu", "cuda", "format"},
    "bindings": {"ops/codec", "ops/formats", "ops/linear", "ops/nf4", "codecs", "cpu", "cuda", "format"},
}
CPP_SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def include_violations(path: str, text: str) -> list[str]:
    """What a C++ file (path relative to csrc) includes although it may not."""
    room = path.rpartition("/")[0]
    on_device = path.endswith((".cu", ".cuh"))
    found = []
    for quote, name in INCLUDE.findall(text):
        target = name.rpartition("/")[0]
        if quote == "<":
            if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", name) and room != "bindings":
                found.append(f"{name}: Python and torch stay in bindings/")
            elif room == "format" and re.search(r"[./]", name):
                found.append(f"{name}: format/ includes the standard library only")
        elif target not in MAY_INCLUDE[room] | {room}:
            found.append(f"{name}: {room}/ may include {sorted(MAY_INCLUDE[room])}, by folder/file")
        elif name.endswith((".cu", ".cpp")):
            found.append(f"{name}: sources are compiled, not included")
        elif target == "cuda" and not on_device and room != "bindings":
            found.append(f"{name}: only CUDA sources include cuda/")
        elif target == "cpu" and on_device:
            found.append(f"{name}: CUDA sources do without cpu/")
        elif name.endswith(".cuh") and not on_device:
            found.append(f"{name}: only CUDA sources include CUDA headers")
    return found


@pytest.mark.parametrize("path", CPP_SOURCES, ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_cpp_includes_follow_the_rooms(path: Path) -> None:
    assert include_violations(path.relative_to(ROOT / "csrc").as_posix(), path.read_text()) == []


def test_include_checker_sees_violations() -> None:
    assert include_violations("ops/linear/tiled.h", '#include "ops/codec/scan.h"') == [
        "ops/codec/scan.h: ops/linear/ may include ['codecs', 'cpu', 'cuda', 'format'], by folder/file"
    ]
    assert include_violations("ops/codec/scan_cpu.cpp", '#include "ops/codec/scan_avx2.cpp"') == [
        "ops/codec/scan_avx2.cpp: sources are compiled, not included"
    ]
    assert include_violations("format/block.h", "#include <cstdint>\n#include <immintrin.h>") == [
        "immintrin.h: format/ includes the standard library only"
    ]
    assert include_violations("cpu/parallel.cpp", '#include "ops/codec/scan.h"') == [
        "ops/codec/scan.h: cpu/ may include ['format'], by folder/file"
    ]
    assert include_violations("codecs/planes_simd.h", '#include "codecs/planes.cuh"') == [
        "codecs/planes.cuh: only CUDA sources include CUDA headers"
    ]
    assert include_violations("ops/codec/scan_cpu.cpp", '#include "ops/codec/scan.h"\n#include "format/block.h"') == []
