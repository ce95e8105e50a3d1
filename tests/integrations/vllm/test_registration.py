"""kbitq stands in the tables by which servers find plug-ins, and importing it there imports no server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_servers_find_the_plug_in(group: str) -> None:
    declared = rf'\[project\.entry-points\."{re.escape(group)}"\]\nkbitq = "([\w.]+):(\w+)"\n'
    found = re.search(declared, PROJECT.read_text())
    assert found is not None
    module, function = found.groups()
    code = (
        f"import {module}, sys; assert {function!r} in dir({module}); print({group.partition('.')[0]!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
