"""Decodes many checkpoints with kbitq and with the formats' own packages: `make test-formats` runs it where these are.

PYTHONPATH=tests python tests/formats/compare.py [FORMAT ...]
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from formats.make_fixtures import FORMATS
from formats.makers.cases import digest
from formats.reading import decoded, write_folder


def differences(name: str) -> list[str]:
    """The cases of a format that are not decoded to the same bytes."""
    maker = importlib.import_module(f"formats.makers.{name}")
    wrong, count = [], 0
    for case in maker.make(maker.SHAPES):
        count += 1
        with tempfile.TemporaryDirectory() as place:
            folder = write_folder(Path(place) / "m", case.tensors, case.config, case.metadata)
            for tile_bytes in (1, 1 << 22):
                found = decoded(folder, tile_bytes)
                if {n: (t.dtype, digest(t)) for n, t in found.items()} != {
                    n: (t.dtype, digest(t)) for n, t in case.decoded.items()
                }:
                    wrong.append(f"{name}: {case.name}, tiles of {tile_bytes}")
    print(f"{name}: {count} checkpoints, {len(wrong)} differences")
    return wrong


def main(names: list[str]) -> int:
    wrong = [difference for name in names or FORMATS for difference in differences(name)]
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
