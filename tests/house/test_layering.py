"""Who may import whom, in Python and in C++: the shape of the house, checked on the source without running it."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Part of kbitq -> the parts it may import besides itself and errors. A new part must be added here on purpose.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "format": set(),
    "reference": {"format"},
    "_optimal_levels": set(),
    "codebooks": {"_optimal_levels", "format"},
    "selection": {"format"},
    "_core": {"_C"},
    "ops": {"_core", "format", "codebooks"},
    "fit": {"ops", "functional", "format", "codebooks"},
    "importance": {"format"},
    "budget": set(),
    "quantized": {"ops", "fit", "format", "codebooks"},
    "functional": {"ops", "codebooks", "format"},
    "roles": set(),
    "recipe": {"selection"},
    "checkpoint": {
        "ops",
        "selection",
        "format",
        "codebooks",
        "quantized",
        "fit",
        "importance",
        "budget",
        "recipe",
        "roles",
    },
    "gpu_linear": {"_core", "ops", "format"},
    "linear_op": {"_core", "ops", "format", "gpu_linear"},
    "nn": {"ops", "linear_op", "gpu_linear", "format", "quantized", "selection", "codebooks"},
    "evaluate": set(),
    "generate": set(),
    "hub": {"format", "checkpoint"},  # it gives checkpoint a Storage, and leaves out the files that are not carried
    "integrations": {"nn", "checkpoint", "ops", "format", "quantized", "selection"},
    "report": {"checkpoint", "format", "functional", "ops", "roles"},
}
# Packages that only one part may import.
ONLY_IN = {"huggingface_hub": "hub", "typer": "cli", "rich": "cli"}
# Parts that may import no third-party package but these.
THIRD_PARTY: dict[str, set[str]] = {"errors": set(), "format": set(), "reference": {"numpy"}, "selection": set()}


def python_sources() -> list[Path]:
    return sorted([*ROOT.glob("kbitq/**/*.py"), *ROOT.glob("cli/**/*.py")])


def part_of(path: Path) -> str:
    """errors for kbitq/errors.py, checkpoint for kbitq/checkpoint/plan.py, cli for anything in cli/."""
    first, *rest = path.relative_to(ROOT).parts
    return "cli" if first == "cli" else Path(rest[0]).stem


def imported_modules(path: Path, source: str) -> set[str]:
    """Absolute dotted names of everything that a file imports, wherever in the file."""
    parts = path.relative_to(ROOT).parts
    package = ["kbitq", *parts[:-1]] if parts[0] == "cli" else list(parts[:-1])
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{stem}.{alias.name}" for alias in node.names)
    return names


def violations(part: str, names: set[str]) -> list[str]:
    """What a part imports although it may not."""
    found = []
    for name in sorted(names):
        top, *rest = name.split(".")
        if top != "kbitq":
            allowed = THIRD_PARTY.get(part)
            if top in ONLY_IN and part != ONLY_IN[top]:
                found.append(f"{name}: only {ONLY_IN[top]} imports {top}")
            elif allowed is not None and top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{name}: {part} does without")
        elif part not in ("cli", "__init__") and rest and rest[0] not in MAY_IMPORT[part] | {part, "errors"}:
            found.append(f"{name}: {part} may import {sorted(MAY_IMPORT[part])}")
        elif part != "cli" and rest and rest[0] == "cli":
            found.append(f"{name}: the library does not know the command line")
    return found


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_follow_the_layers(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT or part in ("cli", "__init__"), f"{part}: say in MAY_IMPORT what it may import"
    assert violations(part, imported_modules(path, path.read_text())) == []


def test_relative_imports_are_resolved() -> None:
    source = "def f():\n    from ..ops import scan\n    from . import read\n    import torch.nn\nfrom .. import format"
    assert imported_modules(ROOT / "kbitq/checkpoint/plan.py", source) == {
        "kbitq.ops.scan",
        "kbitq.checkpoint.read",
        "torch.nn",
        "kbitq.format",
    }
    assert imported_modules(ROOT / "cli/main.py", "from . import console\nfrom .. import ops") == {
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


# Folder of csrc -> the folders whose headers it may include. cpu/kernels* and cpu/matmul* are the tables that gather
# the ops' kernels by instruction set, so they alone in cpu/ know the ops.
MAY_INCLUDE: dict[str, set[str]] = {
    "format": {"format"},
    "cpu": {"cpu", "format"},
    "cuda": {"cuda", "format"},
    "ops": {"ops", "cpu", "cuda", "format"},
    "bindings": {"bindings", "ops", "cpu", "cuda", "format"},
}
CPP_SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def op_of(file_name: str) -> str:
    """codec for codec.h, codec_avx2.cpp, codec_cuda.cu: the neighbours that make one op."""
    return re.split(r"[_.]", file_name)[0]


def include_violations(path: str, text: str) -> list[str]:
    """What a C++ file (path relative to csrc) includes although it may not."""
    folder, file_name = path.split("/")[0], path.split("/")[-1]
    is_kernel_table = folder == "cpu" and op_of(file_name) in ("kernels", "matmul")
    found = []
    for quote, name in INCLUDE.findall(text):
        target, target_file = name.split("/")[0], name.split("/")[-1]
        if quote == "<":
            if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", name) and folder != "bindings":
                found.append(f"{name}: Python and torch stay in bindings/")
            elif folder == "format" and re.search(r"[./]", name):
                found.append(f"{name}: format/ includes the standard library only")
        elif "/" not in name or target not in MAY_INCLUDE[folder] | ({"ops"} if is_kernel_table else set()):
            found.append(f"{name}: {folder}/ may include {sorted(MAY_INCLUDE[folder])}, by folder/file")
        elif name.endswith((".cu", ".cpp")):
            found.append(f"{name}: sources are compiled, not included")
        elif folder == target == "ops" and op_of(file_name) != op_of(target_file):
            found.append(f"{name}: an op never includes another")
        elif folder == "ops" and target == "cuda" and not file_name.endswith((".cu", ".cuh")):
            found.append(f"{name}: only CUDA sources include cuda/")
        elif folder == "ops" and target == "cpu" and file_name.endswith((".cu", ".cuh")):
            found.append(f"{name}: CUDA sources do without cpu/")
    return found


@pytest.mark.parametrize("path", CPP_SOURCES, ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_cpp_includes_follow_the_layers(path: Path) -> None:
    assert include_violations(path.relative_to(ROOT / "csrc").as_posix(), path.read_text()) == []


def test_include_checker_sees_violations() -> None:
    assert include_violations("ops/gemv_cuda.cu", '#include "ops/gemm.h"') == [
        "ops/gemm.h: an op never includes another"
    ]
    assert include_violations("ops/gemv_cpu.cpp", '#include "ops/gemv_avx2.cpp"') == [
        "ops/gemv_avx2.cpp: sources are compiled, not included"
    ]
    assert include_violations("format/block.h", "#include <cstdint>\n#include <immintrin.h>") == [
        "immintrin.h: format/ includes the standard library only"
    ]
    assert include_violations("cpu/parallel.cpp", '#include "ops/scan.h"') == [
        "ops/scan.h: cpu/ may include ['cpu', 'format'], by folder/file"
    ]
    assert include_violations("ops/gemv_cpu.cpp", '#include "ops/gemv.h"\n#include "format/block.h"') == []
