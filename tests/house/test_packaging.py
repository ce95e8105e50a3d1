"""What a user of the installed package relies on: lazy imports, an entry point that answers fast, one version."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_leaves_torch_alone() -> None:
    heavy = json.loads(
        python(
            "import sys, json, kbitq; print(json.dumps([m for m in ('torch', 'numpy', 'rich') if m in sys.modules]))"
        )
    )
    assert heavy == []


def test_face_is_complete_and_lazy() -> None:
    names = ["QuantizedTensor", "quantize", "dequantize", "load_file", "save_file", "__version__"]
    code = (
        f"import json, kbitq; print(json.dumps([n for n in {names} if n not in dir(kbitq) or not hasattr(kbitq, n)]))"
    )
    assert json.loads(python(code)) == []


def test_version_is_one_fact() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    from kbitq import _C, __version__

    assert declared[1] == __version__ == metadata.version("kbitq") == _C.version


def test_changelog_names_the_version() -> None:
    from kbitq import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_version_option_does_not_import_torch() -> None:
    out = python(
        "import sys\nfrom kbitq.cli.main import run\nassert run(['--version']) == 0\nprint('torch' in sys.modules)"
    )
    from kbitq import __version__

    assert __version__ in out and out.splitlines()[-1] == "False"


def test_runtime_dependencies_are_the_promised_ones() -> None:
    required = {
        re.split(r"[<>=\[; ]", line)[0].replace("_", "-")
        for line in metadata.requires("kbitq") or []
        if "extra ==" not in line
    }
    # tomli on Python 3.10 only, which has no tomllib of its own.
    assert required - {"tomli"} == {"torch", "safetensors", "numpy", "typer", "rich", "huggingface-hub", "pyyaml"}


def test_documents_link_to_files_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("csrc/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
    assert links
