"""The gate that keeps wheels small enough for PyPI passes, and fails."""

import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / ".ci" / "wheel_size"
pytestmark = pytest.mark.skipif(not GATE.exists(), reason="an sdist has no .ci")


def gate(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GATE, folder], capture_output=True, text=True)


@pytest.mark.parametrize(("size", "ok"), [(3_700_000, True), (40_000_000, True), (40_000_001, False)])
def test_a_wheel_is_held_to_its_size(size: int, ok: bool, tmp_path: Path) -> None:
    with (tmp_path / "kbitq-1-py3-none-any.whl").open("wb") as wheel:
        wheel.truncate(size)
    done = gate(tmp_path)
    assert f"kbitq-1-py3-none-any.whl: {size} bytes (at most 40000000)" in done.stdout
    assert (done.returncode == 0) == ok
    assert ("too large" in done.stderr) != ok


def test_no_wheel_is_a_failure(tmp_path: Path) -> None:
    assert gate(tmp_path).returncode == 1
