"""Error feedback down the rows of weights stored [in, out]: against a slow version in float64, and against none."""

import numpy as np
import pytest
import torch

from kbitq import ops, quantize
from kbitq.codecs import feedback
from kbitq.codecs.base import Request, get_codec

CODECS = ("planes", "trellis", "trellis/128")
SHAPES = ((32, 32), (70, 40), (130, 300), (64, 129))


def correlated(inputs: int, seed: int) -> torch.Tensor:
    """H of inputs that depend on each other, as a layer's do."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=draw) * torch.logspace(0, -2, inputs)
    x = torch.randn(400, inputs, generator=draw) @ mix
    return x.T @ x


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked(codec: str, w: torch.Tensor, k: int) -> Request:
    return Request(k, ops.scan(w)[0], "mse", torch.from_numpy(get_codec(codec).levels("optimal", k)[0].copy()))


def encoded(codec: str, w: torch.Tensor, h: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    factor = feedback.factorise(h, transposed=True).to(w.device)
    return feedback.encode(get_codec(codec), w, asked(codec, w, k).to(w.device), factor)


def loss(codec: str, w: torch.Tensor, parts: dict[str, torch.Tensor], h: torch.Tensor) -> float:
    values = get_codec(codec).decode(parts, w.shape[1], torch.float32)
    return feedback.proxy_loss((w.float() - values).cpu(), h, transposed=True)


def loss_by_hand(name: str, w: torch.Tensor, h: torch.Tensor, k: int) -> float:
    """The loss of rows that are quantized one by one, each after the errors of all rows above it, in float64."""
    codec, request, exact = get_codec(name), asked(name, w, k), h.double().numpy()
    damped = exact + feedback.DAMPING * np.diag(exact).mean() * np.eye(len(exact))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, made = w.double().numpy().copy(), np.zeros(w.shape)
    for i in range(len(left)):
        row = torch.from_numpy(left[i : i + 1].astype(np.float32))
        made[i] = codec.decode(codec.encode(row, request), w.shape[1], torch.float32).double().numpy()[0]
        left[i + 1 :] -= np.outer(upper[i, i + 1 :], (left[i] - made[i]) / upper[i, i])
    error = w.double().numpy() - made
    return float(np.trace(error.T @ exact @ error))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("k", [2, 4])
def test_the_loss_is_that_of_the_slow_version(codec: str, k: int) -> None:
    w, h = drawn((150, 160), k), correlated(150, k)
    mine = loss(codec, w, encoded(codec, w, h, k), h)
    assert mine == pytest.approx(loss_by_hand(codec, w, h, k), rel=0.01)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_never_worse_than_without(codec: str, shape: tuple[int, int], engine: str) -> None:
    for seed in range(3):
        w, h = drawn(shape, seed).to(engine), correlated(shape[0], seed)
        made = encoded(codec, w, h, 2)
        assert loss(codec, w, made, h) < loss(codec, w, get_codec(codec).encode(w, asked(codec, w, 2)), h)
        assert {n: p.shape for n, p in made.items()} == {p.name: p.shape for p in get_codec(codec).parts("", shape, 2)}


@pytest.mark.parametrize("codec", CODECS)
def test_inputs_that_do_not_depend_on_each_other_leave_nothing_to_feed_back(codec: str) -> None:
    w = drawn((96, 64), 0)
    made, plain = encoded(codec, w, torch.eye(96), 3), get_codec(codec).encode(w, asked(codec, w, 3))
    assert all(torch.equal(made[name], plain[name]) for name in plain)


def test_an_input_that_was_always_zero_has_no_weights() -> None:
    w, h = drawn((64, 40), 0), correlated(64, 2)
    h[5], h[:, 5], w[5] = 0, 0, 1000.0
    made = encoded("planes", w, h, 4)
    assert get_codec("planes").decode(made, 40, torch.float32)[5].abs().max() == 0


def test_a_stack_has_an_h_for_each_expert() -> None:
    stack, hs = drawn((3, 64, 48), 0), torch.stack([correlated(64, seed) for seed in range(3)])
    whole = quantize(stack, 2, hessian=hs, transposed=True, name="m.experts.down_proj").dequantize()
    plain = quantize(stack, 2, name="m.experts.down_proj").dequantize()
    for w, made, without, h in zip(stack, whole, plain, hs, strict=True):
        with_it, bare = (feedback.proxy_loss(w - values, h, transposed=True) for values in (made, without))
        assert with_it < 0.9 * bare
    with pytest.raises(ValueError, match=r"hessian has shape \[3, 64, 64\], needs \[3, 48, 48\]"):
        quantize(stack, 2, hessian=hs, name="m.experts.down_proj")
