"""How integers and FP8 find their scales: in pieces that fit a cache, and with a quick rounding."""

import pytest
import torch

from kbitq.codecs import compressed_tensors, integer_groups
from kbitq.codecs.base import Request
from kbitq.codecs.compressed_tensors import Fp8

NAMES = ("compressed-tensors-g32", "compressed-tensors-channel", "int8", "fp8", "fp8-block")


def asked(w: torch.Tensor, scale: str = "mse") -> Request:
    return Request(k=8, amax=w.abs().max().view(1), scale=scale, importance=torch.rand(1, w.shape[1]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["mse", "absmax"])
def test_the_bytes_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, name: str, scale: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(130, 256) * torch.rand(130, 1)
    codec, request = compressed_tensors.make(name), asked(w, scale)
    whole = codec.encode_rows(w, request)
    monkeypatch.setattr(integer_groups, "_IN_CACHE", 1 << 10)
    pieces = codec.encode_rows(w, request)
    assert all(torch.equal(whole[part].view(torch.uint8), pieces[part].view(torch.uint8)) for part in whole)


def test_of_all_candidates_the_best_is_kept() -> None:
    """One at a time, in float64, where the errors of candidates are not nearly the same."""
    torch.manual_seed(0)
    w = torch.randn(64, 128)
    found = compressed_tensors.make("compressed-tensors-F32").best_scales(w, Request(k=4, amax=w.abs().max().view(1)))
    amax = w.double().abs().amax(1, keepdim=True) / 7
    tried = [amax * shrink for shrink in integer_groups.SHRINKS]
    errors = [((w / s).round().clamp(-8, 7) * s - w).square().sum(1, keepdim=True) for s in tried]
    mine = ((w / found.double()).round().clamp(-8, 7) * found.double() - w).square().sum(1, keepdim=True)
    assert (mine <= torch.cat(errors, 1).amin(1, keepdim=True) * (1 + 1e-5)).all()
    assert (found < amax * 0.99).any(), "a case in which nothing is cut off tells little"


def test_the_quick_rounding_to_fp8_is_the_conversion() -> None:
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    grid = torch.arange(1 << 8, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    values = torch.cat((halves, ties, ties.nextafter(torch.tensor(1e3)), ties.nextafter(torch.tensor(-1e3))))
    converted = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    rounded = Fp8("fp8", "BF16").round_(values.clone(), 8)
    assert torch.equal(rounded.nan_to_num(nan=9.5), converted.nan_to_num(nan=9.5))
    assert rounded.isnan().sum() == values.isnan().sum() > 0


def test_groups_that_are_not_finite_get_a_scale_of_1() -> None:
    w = torch.ones(3, 32)
    w[0, 3], w[1, 4] = float("nan"), float("inf")
    scale = compressed_tensors.make("compressed-tensors-g32").best_scales(w, Request(k=4, amax=torch.ones(1)))
    assert scale[:2].tolist() == [[1.0], [1.0]] and scale[2] < 1
