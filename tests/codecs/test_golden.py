"""Bytes that never change: the codec against a file that was written once (tests/golden/make_codec.py)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from kbitq import ops
from kbitq.codecs import codebooks, reference

GOLDEN = load_file(Path(__file__).with_name("golden") / "codec.safetensors")
SOURCES = ("plain", "large", "small")
CASES = sorted({name.rsplit(".", 1)[0] for name in GOLDEN if name.endswith("absmax")})


def recipe(case: str) -> tuple[np.ndarray, int, str, str, np.ndarray | None]:
    """ "plain.k3.nf.mse" -> source, K, codebook, scale, importance."""
    source, k, codebook, *scale = case.split(".")
    if codebook == "importance":
        return GOLDEN[source], int(k[1:]), "optimal", "mse", GOLDEN["importance"]
    return GOLDEN[source], int(k[1:]), codebook, scale[0], None


def compare(case: str, packed: np.ndarray, absmax: np.ndarray, codebook: np.ndarray) -> None:
    for part, got in (("packed", packed), ("absmax", absmax), ("codebook", codebook)):
        if part == "codebook" and (got.size > 16 or case.endswith(".importance")):
            continue  # levels times 2^x, as those of smaller K: make_codec.py leaves them out
        want = GOLDEN[f"{case}.{part}"]
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), part


@pytest.mark.parametrize("case", CASES)
def test_reference_gives_the_golden_bytes(case):
    w, k, codebook, scale, importance = recipe(case)
    compare(case, *reference.quantize(w, k, codebooks.levels(codebook, k)[0], scale=scale, importance=importance))


def test_core_gives_the_golden_bytes(engine):
    for case in CASES:
        w, k, codebook, scale, importance = recipe(case)
        w, levels = torch.from_numpy(w).to(engine), torch.from_numpy(codebooks.levels(codebook, k)[0]).to(engine)
        if importance is not None:
            importance = ops.prepare_importance(torch.from_numpy(importance)).to(engine)
        result = ops.quantize(w, levels, amax=ops.scan(w)[0], importance=importance, scale=scale)
        compare(case, *(t.cpu().numpy() for t in result))


def test_every_k_rule_and_source_is_covered():
    assert len(CASES) == 7 * (len(SOURCES) * 3 + 1)
