"""What models are calibrated on."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """1,360 characters, each of which is a token."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and 31 others look on! " * 20)
    return path
