"""torch.ops.kbitq.linear against the decoded weight and float64, in every regime."""

import subprocess
import sys

import pytest
import torch

import kbitq
from helpers.tolerances import LINEAR, relative_error
from kbitq.ops.linear import FUSED_ROWS, FUSED_ROWS_FLOAT, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(rows: int, cols: int, k: int, *, groups: int = 1, device: str = "cpu", scale: float = 0.05):
    """A quantized triple with one codebook for each of ``groups`` groups of rows, and its decoded float64 matrix."""
    draw = torch.Generator().manual_seed(rows * 1000 + cols * 10 + k)
    parts = [
        kbitq.quantize(torch.randn(rows // groups, cols, generator=draw) * scale * 4**g, k, scale="absmax")
        for g in range(groups)
    ]
    packed, absmax = torch.cat([q.packed for q in parts]), torch.cat([q.absmax for q in parts])
    codebook = torch.stack([q.codebook for q in parts]) if groups > 1 else parts[0].codebook
    dense = torch.cat([q.dequantize(torch.float64) for q in parts])
    return tuple(t.to(device) for t in (packed, absmax, codebook)), dense.to(device)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def expected(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ dense.T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", range(2, 9))
def test_any_number_of_rows(k: int, dtype: torch.dtype, device: str) -> None:
    triple, dense = weight(72, 100, k, device=device)
    bias = inputs(72, dtype=dtype, device=device)
    for m in [*range(1, 66), 300]:
        x = inputs(m, 100, dtype=dtype, device=device)
        y = linear(x, *triple, bias)
        assert y.dtype == dtype
        assert y.shape == (m, 72)
        assert relative_error(y, expected(x, dense, bias)) < LINEAR[dtype], m


@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 31), (3, 33), (5, 64), (67, 129), (130, 1), (8, 1000), (257, 96)])
@pytest.mark.parametrize("m", [1, 3, FUSED_ROWS + 3, FUSED_ROWS_FLOAT + 3])
def test_odd_shapes_and_tails(rows: int, cols: int, m: int, engine: str) -> None:
    triple, dense = weight(rows, cols, 3, device=engine)
    x = inputs(m, cols, device=engine)
    assert relative_error(linear(x, *triple), expected(x, dense)) < LINEAR[torch.float32]


@pytest.mark.parametrize("m", [1, FUSED_ROWS, FUSED_ROWS + 1, FUSED_ROWS_FLOAT + 6])
@pytest.mark.parametrize("groups", [1, 2, 3, 12])
def test_a_codebook_for_each_group_of_rows(groups: int, m: int, engine: str) -> None:
    triple, dense = weight(24, 70, 4, groups=groups, device=engine)
    x = inputs(m, 70, device=engine)
    assert relative_error(linear(x, *triple), expected(x, dense)) < LINEAR[torch.float32]


@pytest.mark.parametrize("k", range(2, 9))
@pytest.mark.parametrize("rows, cols, groups", [(5, 33, 1), (24, 1000, 3), (67, 128, 1)])
def test_bfloat16_on_every_engine(rows: int, cols: int, groups: int, k: int, engine: str) -> None:
    """Some processors multiply it as it is, from levels in bfloat16."""
    triple, dense = weight(rows, cols, k, groups=groups, device=engine)
    bias = inputs(1, rows, dtype=torch.bfloat16, device=engine)[0]
    for m in (1, 2, 3, 4, 7, 8, FUSED_ROWS):
        x = inputs(m, cols, dtype=torch.bfloat16, device=engine)
        assert relative_error(linear(x, *triple, bias), expected(x, dense, bias)) < LINEAR[torch.bfloat16], m
        assert torch.equal(linear(x, *triple, bias), linear(x, *triple, bias))


@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12, 1e30])
def test_bfloat16_of_any_size(factor: float, engine: str) -> None:
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * factor
    q = kbitq.quantize(w.to(engine), 4)
    x = inputs(3, 96, dtype=torch.bfloat16, device=engine)
    y = linear(x, q.packed, q.absmax, q.codebook)
    assert relative_error(y / factor, x.double() @ (kbitq.dequantize(q).double() / factor).T) < LINEAR[torch.bfloat16]


FORKED = """
import os, signal, sys, torch, kbitq
from kbitq.ops.linear import linear
torch.set_num_threads(2)
q = kbitq.quantize(torch.randn(512, 2048), 3)
x = torch.randn(1, 2048).bfloat16()
y = linear(x, q.packed, q.absmax, q.codebook)
torch.randn(600, 600) @ torch.randn(600, 600)  # torch's own threads are there
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(not torch.equal(linear(x, q.packed, q.absmax, q.codebook), y))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    """The parent's, which the loop shares with torch, are not there for it to wait for."""
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)


def test_weights_of_many_panels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triple, dense = weight(100, 64, 3, groups=4, device=device)
    for name in ("_CPU_PANEL_BYTES", "_CUDA_PANEL_BYTES"):
        monkeypatch.setattr(f"kbitq.ops.linear.{name}", 7 * 64 * 4)  # seven rows at a time
    x = inputs(80, 64, device=device).requires_grad_()
    y = linear(x, *triple)
    y.square().sum().backward()
    reference = expected(x, dense)
    assert relative_error(y, reference) < LINEAR[torch.float32]
    assert relative_error(x.grad, 2 * reference @ dense) < LINEAR[torch.float32]


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 3, 64), (1, 1, 1, 64), (4, 5, 64), (3, 0, 64)])
def test_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    triple, dense = weight(48, 64, 5, device=device)
    x = inputs(*shape, device=device)
    y = linear(x, *triple)
    assert y.shape == (*shape[:-1], 48)
    assert relative_error(y, expected(x, dense)) < LINEAR[torch.float32]


def test_strided_input(device: str) -> None:
    triple, dense = weight(48, 64, 3, device=device)
    for m in (2, 80):
        x = inputs(64, m, device=device).t()
        assert relative_error(linear(x, *triple), expected(x, dense)) < LINEAR[torch.float32]


@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("m", [1, 80])
def test_extreme_scales(scale: float, m: int, device: str) -> None:
    triple, dense = weight(40, 96, 3, device=device, scale=scale)
    x = inputs(m, 96, device=device)
    assert relative_error(linear(x, *triple) / scale, expected(x, dense) / scale) < LINEAR[torch.float32]


@pytest.mark.parametrize("m", [1, 80])
def test_rows_of_zeros_give_exact_zeros(m: int, device: str) -> None:
    w = inputs(16, 96)
    w[3] = 0
    w[7:9] = 0
    q = kbitq.quantize(w, 3)
    y = linear(inputs(m, 96, device=device), *(t.to(device) for t in (q.packed, q.absmax, q.codebook)))
    assert (y[:, [3, 7, 8]] == 0).all()
    assert (y[:, [0, 4, 15]] != 0).all()


@pytest.mark.parametrize("m", [1, 8, 80])
def test_the_same_call_gives_the_same_bytes(m: int, device: str) -> None:
    triple, _ = weight(300, 200, 3, device=device)
    x = inputs(m, 200, dtype=torch.bfloat16, device=device)
    first = linear(x, *triple)
    assert all(torch.equal(first, linear(x, *triple)) for _ in range(5))


def test_the_number_of_threads_does_not_matter() -> None:
    triple, _ = weight(1100, 1100, 3)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(linear(inputs(1, 1100), *triple))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [2, 80])
def test_gradients_of_x_and_bias(m: int, dtype: torch.dtype, device: str) -> None:
    triple, dense = weight(36, 70, 4, groups=2, device=device)
    x = inputs(m, 70, dtype=dtype, device=device).requires_grad_()
    bias = inputs(36, dtype=dtype, device=device).requires_grad_()
    coefficients = inputs(m, 36, dtype=dtype, device=device)
    (linear(x, *triple, bias) * coefficients).sum().backward()
    assert x.grad.dtype == dtype
    assert relative_error(x.grad, coefficients.double() @ dense) < LINEAR[dtype]
    assert relative_error(bias.grad, coefficients.double().sum(0)) < LINEAR[dtype]


def test_gradient_of_a_gradient(device: str) -> None:
    triple, dense = weight(36, 70, 4, device=device)
    x = inputs(3, 70, device=device).requires_grad_()
    (first,) = torch.autograd.grad(linear(x, *triple).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    exact = x.detach().double().requires_grad_()
    (reference,) = torch.autograd.grad((exact @ dense.T).square().sum(), exact, create_graph=True)
    reference.square().sum().backward()
    assert relative_error(x.grad, exact.grad) < 5 * LINEAR[torch.float32]


def test_no_gradient_is_kept_when_none_is_needed(device: str) -> None:
    triple, _ = weight(36, 70, 4, device=device)
    x = inputs(3, 70, device=device).requires_grad_()
    with torch.no_grad():
        assert not linear(x, *triple).requires_grad
    assert not linear(x.detach(), *triple).requires_grad
    assert linear(x, *triple).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 80])
def test_opcheck(m: int, device: str) -> None:
    triple, _ = weight(36, 70, 3, device=device)
    x, bias = inputs(m, 70, device=device).requires_grad_(), inputs(36, device=device).requires_grad_()
    torch.library.opcheck(torch.ops.kbitq.linear.default, (x, *triple, bias))
    torch.library.opcheck(torch.ops.kbitq.linear.default, (x.detach().bfloat16(), *triple, None))
    torch.library.opcheck(
        torch.ops.kbitq.linear_grad.default, (inputs(m, 36, device=device).requires_grad_(), *triple, 70)
    )


@pytest.mark.slow
def test_compile_in_one_graph_with_gradient(device: str) -> None:
    triple, dense = weight(36, 70, 3, device=device)

    @torch.compile(fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(linear(x * 2, *triple)).sum(-1)

    for m in (1, 5, 80):  # the second and third go through one graph with a dynamic size
        x = inputs(m, 70, device=device).requires_grad_()
        y = function(x)
        y.sum().backward()
        exact = x.detach().double().requires_grad_()
        reference = torch.relu(exact * 2 @ dense.T).sum(-1)
        reference.sum().backward()
        assert relative_error(y, reference) < LINEAR[torch.float32]
        assert relative_error(x.grad, exact.grad) < LINEAR[torch.float32]


def test_autocast_casts_as_a_dense_layer_would(device: str) -> None:
    triple, dense = weight(36, 64, 3, device=device)
    x = inputs(4, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = linear(x, *triple, inputs(36, device=device))
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected(x, dense, inputs(36, device=device))) < 2 * LINEAR[torch.bfloat16]


@pytest.mark.parametrize("m", [2, 80])
@pytest.mark.parametrize(
    "change, names",
    [
        (lambda x, p, a, c: (x[:, :-40], p, a, c), ("packed", "x")),
        (lambda x, p, a, c: (x.double(), p, a, c), ("x",)),
        (lambda x, p, a, c: (x, p[:-1], a, c), ("absmax",)),
        (lambda x, p, a, c: (x, p, a.float(), c), ("absmax",)),
        (lambda x, p, a, c: (x, p.float(), a, c), ("packed",)),
        (lambda x, p, a, c: (x, p, a, torch.cat([c, c])), ("packed",)),
        (lambda x, p, a, c: (x, p, a, c.expand(5, -1).contiguous()), ("codebook",)),
    ],
    ids=["features", "dtype of x", "rows", "dtype of absmax", "dtype of packed", "K", "groups"],
)
def test_arguments_that_do_not_fit(change, names: tuple[str, ...], m: int, device: str) -> None:
    triple, _ = weight(36, 64, 3, device=device)
    with pytest.raises(ValueError) as caught:
        linear(*change(inputs(m, 64, device=device), *triple))
    assert any(name in str(caught.value) for name in names)
