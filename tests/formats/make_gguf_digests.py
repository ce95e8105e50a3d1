"""Makes data/gguf_blocks.json: SHA-256 of what the package gguf decodes random blocks to; Q8_K by its definition.

python tests/formats/make_gguf_digests.py        (gguf 0.19.0)
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.gguf_file import BLOCKS, digest, random_blocks


def values(kind, raw):
    if kind == "Q8_K":  # float d, then signed bytes
        return raw[:, :4].copy().view(np.float32) * raw[:, 4:260].view(np.int8).astype(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


with np.errstate(all="ignore"):
    digests = {kind: digest(values(kind, random_blocks(kind, 96))) for kind in BLOCKS}
path = Path(__file__).parent / "data" / "gguf_blocks.json"
path.write_text(json.dumps(digests, indent=1) + "\n")
