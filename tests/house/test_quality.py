"""Quality that must not fall: SQNR on N(0,1) and on a real model's weights, against the table in docs/format.md."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import kbitq
from kbitq import ops, quantized

# dB by (codebook, scale rule) and K: docs/format.md section 3, first and second number of a cell.
NORMAL = {
    ("nf", "mse"): {2: 9.77, 3: 15.91, 4: 21.95, 5: 27.42},
    ("optimal", "mse"): {2: 9.79, 3: 15.93, 4: 22.26, 5: 28.38, 6: 34.3, 7: 40.2, 8: 46.2},
}
MINILM = {
    ("nf", "absmax"): {2: 6.88, 3: 14.67, 4: 21.03, 5: 26.27},
    ("nf", "mse"): {2: 9.38, 3: 15.55, 4: 21.76, 5: 27.30},
    ("optimal", "mse"): {2: 9.37, 3: 15.53, 4: 21.91, 5: 28.06, 6: 34.0},
}
TOLERANCE_DB = 0.03


def cells(table: dict) -> list:
    return [
        pytest.param(*rule, k, db, id=f"{'-'.join(rule)}-K{k}") for rule, row in table.items() for k, db in row.items()
    ]


def sqnr_db(tensors: list[torch.Tensor], k: int, codebook: str, scale: str) -> float:
    """Over all tensors together."""
    totals = np.zeros(2)
    for w in tensors:
        q = kbitq.quantize(w, k, scale=scale, codebook=codebook)
        totals += ops.stats(w, **q.matrices()).sum(0)[:2].cpu().numpy()
    return 10 * float(np.log10(totals[0] / totals[1]))


@pytest.fixture(scope="module")
def normal_values() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(2024).standard_normal((1024, 4096)).astype(np.float32))


@pytest.fixture(scope="module")
def encoder_weights(minilm: Path) -> list[torch.Tensor]:
    """The 36 weight matrices of the encoder's layers, float32."""
    with safe_open(minilm / "model.safetensors", framework="pt") as file:
        names = [n for n in file.keys() if n.startswith("encoder.") and n.endswith(".weight")]  # noqa: SIM118
        tensors = [file.get_tensor(n) for n in names]
    matrices = [t for t in tensors if t.dim() == 2]
    assert len(matrices) == 36
    return matrices


@pytest.mark.parametrize("codebook, scale, k, db", cells(NORMAL))
def test_normal_values(device, normal_values, codebook, scale, k, db):
    assert sqnr_db([normal_values.to(device)], k, codebook, scale) >= db - TOLERANCE_DB


@pytest.mark.parametrize("codebook, scale, k, db", cells(MINILM))
def test_minilm_encoder(device, encoder_weights, codebook, scale, k, db):
    assert sqnr_db([w.to(device) for w in encoder_weights], k, codebook, scale) >= db - TOLERANCE_DB


def test_the_reported_sqnr_is_the_measured_one(normal_values):
    w = normal_values[:64]
    q = kbitq.quantize(w, 3)
    error = w.double() - q.dequantize(torch.float32).double()
    assert q.sqnr_db == pytest.approx(10 * np.log10(float(w.double().square().sum() / error.square().sum())), abs=1e-9)
    assert q.max_abs_err == float(error.abs().max())
    assert quantized.sqnr_db(1.0, 0.0) is None


@pytest.mark.parametrize("k", range(2, 9))
def test_mse_beats_absmax_and_optimal_beats_nf(normal_values, k):
    w = [normal_values[:128]]
    db = {rule: sqnr_db(w, k, *rule) for rule in (("nf", "absmax"), ("nf", "mse"), ("optimal", "mse"))}
    assert db["nf", "absmax"] < db["nf", "mse"] < db["optimal", "mse"]


def test_importance_lowers_the_weighted_error(normal_values):
    w = normal_values[:128]
    importance = torch.from_numpy(np.random.RandomState(5).exponential(size=4096).astype(np.float32)) ** 2
    weighted = {}
    for name, given in (("plain", None), ("given", importance)):
        error = kbitq.quantize(w, 3, importance=given).dequantize() - w
        weighted[name] = float((error.square() * importance).sum())
    assert weighted["given"] < 0.97 * weighted["plain"]
