"""Makes tests/formats/data: a file for each format, by the format's own package. In the environment of those packages:

PYTHONPATH=tests python tests/formats/make_fixtures.py [FORMAT ...]
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from formats.makers.cases import digest

DATA = Path(__file__).parent / "data"
FORMATS = ("gptq", "awq", "compressed_tensors", "bitsandbytes", "hqq", "mlx", "modelopt", "mxfp4", "torchao")


def main(names: list[str]) -> None:
    for name in names or FORMATS:
        maker = importlib.import_module(f"formats.makers.{name}")
        told, tensors = {}, {}
        for number, case in enumerate(maker.make(maker.FIXTURES)):
            told[case.name] = {
                "config": case.config,
                "metadata": case.metadata,
                "decoded": {n: [str(t.dtype), list(t.shape), digest(t)] for n, t in case.decoded.items()},
            }
            tensors.update({f"{number}|{n}": t.contiguous() for n, t in case.tensors.items()})
        path = DATA / f"{name}.safetensors"
        save_file(tensors, path, {"cases": json.dumps(told)})
        print(f"{path.name}: {len(told)} cases, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
