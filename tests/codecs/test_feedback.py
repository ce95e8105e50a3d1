"""Error feedback: against a slow float64 version, and against quantizing without it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kbitq import ops
from kbitq.calibration.triangle import blocks
from kbitq.codecs import feedback, reference
from kbitq.codecs.base import Request, get_codec
from kbitq.codecs.integer_groups import IntegerGroups
from kbitq.errors import CalibrationError

CODECS = ("planes", "trellis", "trellis/128")


def correlated(cols: int, seed: int, tokens: int = 400) -> torch.Tensor:
    """H of inputs that depend on each other, as a layer's do."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(cols, cols, generator=draw) * torch.logspace(0, -2, cols)
    x = torch.randn(tokens, cols, generator=draw) @ mix
    return x.T @ x


def both(
    codec_name: str, w: torch.Tensor, h: torch.Tensor, k: int, scale: str = "mse"
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss with feedback and without it, and the parts of the former."""
    codec = get_codec(codec_name)
    request = Request(k, ops.scan(w)[0], scale, torch.from_numpy(codec.levels("optimal", k)[0].copy()))
    factor = feedback.factorise(h).to(w.device)
    made = feedback.encode(codec, w, request.to(w.device), factor)
    losses = [
        feedback.proxy_loss((w.float() - codec.decode(parts, w.shape[1], torch.float32)).cpu(), h)
        for parts in (made, codec.encode(w, request))
    ]
    return losses[0], losses[1], made


def by_hand(w: np.ndarray, h: np.ndarray, k: int) -> np.ndarray:
    """W' of ``planes`` in float64, column by column: scales of a block chosen as the reference chooses them."""
    damped = h + feedback.DAMPING * np.diag(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T  # Hinv = upper^T upper
    left, made = w.astype(np.float64).copy(), np.zeros_like(w, np.float64)
    levels = reference_levels(k)
    x = reference.tensor_exponent(float(np.abs(w).max()))
    for first in range(0, w.shape[1], 32):
        here = slice(first, min(first + 32, w.shape[1]))
        weight = 1 / np.diag(upper)[here] ** 2
        block = reference.to_blocks((left[:, here] * 2.0**-x).astype(np.float32))[:, 0]
        padded = np.zeros((len(w), 32), np.float32)
        padded[:, : len(weight)] = reference.prepare_importance(weight / weight.max())
        valid = np.broadcast_to(np.arange(32) < len(weight), block.shape)
        top = reference.top_byte(x, "F32")
        s = reference.decode_e4m4(reference.choose_bytes(block, levels, top, "mse", valid, padded)).astype(np.float64)
        for j in range(here.start, here.stop):
            grid = levels.astype(np.float64) * s[:, None] * 2.0**x
            made[:, j] = np.take_along_axis(grid, np.abs(grid - left[:, j : j + 1]).argmin(1)[:, None], 1)[:, 0]
            error = (left[:, j] - made[:, j]) / upper[j, j]
            left[:, j + 1 :] -= np.outer(error, upper[j, j + 1 :])
    return made


def levels_of(codec: str, k: int) -> torch.Tensor | None:
    levels = get_codec(codec).levels("optimal", k)[0]
    return None if levels is None else torch.from_numpy(levels.copy())


def reference_levels(k: int) -> np.ndarray:
    return get_codec("planes").levels("optimal", k)[0]


@pytest.mark.parametrize("k", [2, 3, 5])
def test_planes_have_the_loss_of_the_slow_version(k: int, engine: str) -> None:
    w = torch.from_numpy(np.random.RandomState(k).standard_normal((24, 100)).astype(np.float32))
    h = correlated(100, k)
    mine, _, _ = both("planes", w.to(engine), h, k)
    slow = feedback.proxy_loss(w - torch.from_numpy(by_hand(w.numpy(), h.double().numpy(), k)).float(), h)
    assert mine == pytest.approx(slow, rel=0.01)


@pytest.mark.parametrize("codec", [*CODECS, "gptq-g32"])
@pytest.mark.parametrize("block", [96, 100, 150])
def test_an_h_of_blocks_is_factorised_and_walked_block_by_block(codec: str, block: int) -> None:
    h = torch.block_diag(*(correlated(len(part), 5 + part.start) for part in blocks(256, block)))
    whole, apart = feedback.factorise(h), feedback.factorise(h.tril(), block=block)
    assert float((whole.upper - apart.upper).abs().max()) < 1e-5 * float(whole.upper.abs().max())
    assert not apart.upper[:block, block:].any()
    asked = Request(4, torch.ones(1), "mse", levels_of(codec, 4), shape=(8, 256))
    w = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    made = [feedback.encode(get_codec(codec), w, asked, factor) for factor in (apart, replace(apart, block=None))]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_factor_is_of_the_inverse_and_reads_only_the_lower_triangle() -> None:
    h = correlated(70, 3)
    h[5] = h[:, 5] = 0.0
    made = feedback.factorise(h.tril())
    damped = h.double() + feedback.DAMPING * h.diagonal().double().mean() * torch.eye(70)
    damped[5, 5] = 1.0
    assert torch.equal(made.upper, made.upper.triu())
    product = made.upper.double() @ damped @ made.upper.double().T
    assert float((product - torch.eye(70)).abs().max()) < 1e-5


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (16, 70), (33, 256), (8, 129)])
def test_it_is_never_worse_than_without(codec: str, rows: int, cols: int, engine: str) -> None:
    for seed in range(3):
        w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(engine)
        with_it, without, made = both(codec, w, correlated(cols, seed), 2)
        assert with_it < without
        assert {n: p.shape for n, p in made.items()} == {
            p.name: p.shape for p in get_codec(codec).parts("", (rows, cols), 2)
        }


def integers_by_hand(w: np.ndarray, h: np.ndarray, k: int, codec: IntegerGroups) -> np.ndarray:
    """W' of integers in float64, column by column; the scales of a group are the codec's own choice."""
    damped = h + feedback.DAMPING * np.diag(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, made, half = w.astype(np.float64).copy(), np.zeros_like(w, np.float64), 1 << k - 1
    for j in range(w.shape[1]):
        if j % (codec.group or w.shape[1]) == 0:
            group = slice(j, j + (codec.group or w.shape[1]))
            weight = torch.from_numpy(1 / np.diag(upper)[group] ** 2).float()[None]
            asked = Request(k, torch.ones(1), importance=weight / weight.max())
            scale = codec.scales(torch.from_numpy(left[:, group]).float(), asked).double().numpy()[:, 0]
        made[:, j] = np.clip(np.round(left[:, j] / scale), -half, half - 1) * scale
        left[:, j + 1 :] -= np.outer((left[:, j] - made[:, j]) / upper[j, j], upper[j, j + 1 :])
    return made


@pytest.mark.parametrize(
    ("name", "k"),
    [("compressed-tensors-g32-F32", 4), ("compressed-tensors-channel-F32", 8), ("gptq-g64-F16", 4), ("int8-F32", 8)],
)
def test_integers_have_the_loss_of_the_slow_version(name: str, k: int) -> None:
    w = torch.randn(24, 128, generator=torch.Generator().manual_seed(k))
    h, codec = correlated(128, k), get_codec(name)
    assert isinstance(codec, IntegerGroups)
    request = Request(k, torch.ones(1))
    losses = []
    for parts in (feedback.encode(codec, w, request, feedback.factorise(h)), codec.encode(w, request)):
        losses.append(feedback.proxy_loss(w - codec.decode(parts, 128, torch.float32), h))
        assert {n: p.numel() for n, p in parts.items()} == {
            p.name: math.prod(p.shape) for p in codec.parts("", (24, 128), k)
        }
    slow = w - torch.from_numpy(integers_by_hand(w.numpy(), h.double().numpy(), k, codec)).float()
    assert losses[0] == pytest.approx(feedback.proxy_loss(slow, h), rel=0.02)
    assert losses[0] < 0.9 * losses[1]


@pytest.mark.parametrize("codec", CODECS)
def test_inputs_that_do_not_depend_on_each_other_leave_nothing_to_feed_back(codec: str) -> None:
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    made = both(codec, w, torch.eye(96), 3)[2]
    coded = get_codec(codec)
    request = Request(3, ops.scan(w)[0], "mse", torch.from_numpy(coded.levels("optimal", 3)[0].copy()))
    plain = coded.encode(w, request)
    assert all(torch.equal(made[name], plain[name]) for name in plain)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_each_other(codec: str, dtype: torch.dtype) -> None:
    w = torch.randn(6, 160, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[0, 0] = 6.0  # the largest magnitude is in the first half
    h, coded = correlated(160, 1), get_codec(codec)
    factor, levels = feedback.factorise(h), torch.from_numpy(coded.levels("optimal", 2)[0].copy())
    request = Request(2, ops.scan(w)[0], "mse", levels)
    whole = feedback.encode(coded, w, request, factor)
    halves = [feedback.encode(coded, half.contiguous(), request, factor) for half in w.split(3)]
    for name in ("packed", "absmax"):
        assert torch.equal(whole[name], torch.cat([half[name] for half in halves]))


def test_an_input_that_was_always_zero_has_no_weights() -> None:
    h = correlated(64, 2)
    h[5], h[:, 5] = 0, 0
    w = torch.randn(4, 64)
    w[:, 5] = 1000.0
    for codec in CODECS[:2]:
        with_it, _, made = both(codec, w, h, 4)
        assert np.isfinite(with_it)
        assert get_codec(codec).decode(made, 64, torch.float32)[:, 5].abs().max() < 200  # a level next to zero


def test_damping_grows_where_it_must() -> None:
    h = correlated(64, 3)
    broken = h - 0.05 * h.diagonal().mean() * torch.eye(64)  # with negative eigenvalues
    broken.diagonal().clamp_(min=1e-6)
    assert feedback.factorise(h).damping == feedback.DAMPING
    assert feedback.factorise(broken).damping > feedback.DAMPING
    for bad in (-h, torch.full((4, 4), torch.nan), 1e6 * (torch.ones(4, 4) - 2 * torch.eye(4)).abs() - 3e6):
        with pytest.raises(CalibrationError):
            feedback.factorise(bad)
