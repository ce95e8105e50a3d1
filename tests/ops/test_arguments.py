"""Every operator with arguments that make no sense: a ValueError that names one of its arguments, never anything else.

A new operator must be added to ``ARGUMENTS``; the test finds all that are registered.
"""

import re
from collections.abc import Callable

import pytest
import torch

import kbitq.functional
import kbitq.ops.linear
import kbitq.ops.tiled_linear
from kbitq import functional, ops, quantize

ROWS, COLS, K = 32, 96, 3
W = torch.linspace(-1, 1, ROWS * COLS).view(ROWS, COLS)
Q = quantize(W, K)
TILES = torch.ops.kbitq.tile(Q.packed, Q.absmax, COLS)
TRIPLE = {"packed": Q.packed, "absmax": Q.absmax, "codebook": Q.codebook}
NF4 = torch.ops.kbitq.nf4_quantize(W, 64)
Q4_0 = torch.zeros(ROWS * COLS // 32 * 18, dtype=torch.uint8)
FEW, MANY = torch.ones(2, COLS), torch.ones(200, COLS)  # fused, and by panels
ARGUMENTS: dict[str, list[dict[str, object]]] = {
    "scan": [{"w": W}],
    "quantize": [
        {"w": W, "levels": Q.codebook, "amax": torch.ones(1), "importance": torch.ones(1, COLS), "scale": "mse"}
    ],
    "dequantize": [{**TRIPLE, "cols": COLS, "dtype": torch.float32}],
    "stats": [{"w": W, **TRIPLE}],
    "linear": [{"x": x, **TRIPLE, "bias": torch.ones(ROWS)} for x in (FEW, MANY)],
    "linear_grad": [{"grad": torch.ones(3, ROWS), **TRIPLE, "cols": COLS}],
    "tile": [{"packed": Q.packed, "absmax": Q.absmax, "cols": COLS}],
    "untile": [{"tiles": TILES, "rows": ROWS, "cols": COLS}],
    "linear_tiles": [{"x": FEW, "tiles": TILES, "codebook": Q.codebook[None], "bias": None, "rows": ROWS}],
    "linear_tiles_grad": [{"grad": torch.ones(3, ROWS), "tiles": TILES, "codebook": Q.codebook[None], "cols": COLS}],
    "lookup_tiles": [
        {
            "rows": torch.tensor([31]),
            "tiles": TILES,
            "codebook": Q.codebook[None],
            "cols": COLS,
            "dtype": torch.float32,
        }
    ],
    "nf4_quantize": [{"w": W, "block": 64}],
    "nf4_dequantize": [{"codes": NF4[0], "scales": NF4[1], "count": W.numel(), "block": 64, "dtype": torch.float32}],
    "nf4_linear": [
        {"x": x, "codes": NF4[0], "scales": NF4[1], "rows": ROWS, "block": 64, "bias": torch.ones(ROWS)}
        for x in (FEW, MANY)
    ],
    "nf4_linear_grad": [{"grad": torch.ones(3, ROWS), "codes": NF4[0], "scales": NF4[1], "cols": COLS, "block": 64}],
    "dequantize_gguf": [{"raw": Q4_0, "type": "Q4_0", "shape": [ROWS, COLS], "dtype": torch.float32}],
    "gguf_linear": [{"x": x, "raw": Q4_0, "type": "Q4_0", "shape": [ROWS, COLS]} for x in (FEW, MANY)],
}
ON_CUDA = {
    "grouped_linear_tiles": {
        "x": FEW, "tiles": TILES, "codebook": Q.codebook[None], "offsets": torch.zeros(2, dtype=torch.int32),
        "rows": ROWS,
    },
}  # fmt: skip
CHECKED_BEFORE = {"fake_integers", "fake_bits"}
"""Operators of one function each, which checks (tests/functional/test_integers.py); they take whatever broadcasts."""
OF_SERVERS = {"experts"}
"""Registered when a server's plug-in is imported, as another test of the same process may have done; it takes the name
of a layer that the server made (tests/integrations/serving)."""

SIZES = (-1, -(1 << 63), 1 << 31, 1 << 33, 1 << 62, (1 << 63) - 1)


def registered() -> set[str]:
    names = (schema.name for schema in torch._C._jit_get_all_schemas())
    return {name.partition("::")[2] for name in names if name.startswith("kbitq::")}


def wrong(value: object) -> list[object]:
    if isinstance(value, torch.Tensor):
        none = [] if value.dim() == 1 and value.numel() == 1 else [value.flatten()[:0]]
        return [value.flatten()[0].clone(), value[None, None, None], *none]
    return list(SIZES) if isinstance(value, int) else []


def test_all_operators_are_tried() -> None:
    assert registered() - OF_SERVERS == ARGUMENTS.keys() | ON_CUDA.keys() | CHECKED_BEFORE


def will_do(name: str, argument: str, value: object) -> bool:
    """Some arguments take more shapes: rows in any number of dimensions."""
    rows = argument in ("x", "grad") and isinstance(value, torch.Tensor) and value.dim() == 5
    shaped_anew = argument == "raw" and isinstance(value, torch.Tensor) and value.numel() == Q4_0.numel()
    return rows or shaped_anew or (name, argument) in (("scan", "w"), ("nf4_quantize", "w"))


def cases(table: dict[str, list[dict[str, object]]]) -> list[tuple[str, dict[str, object], str]]:
    return [
        (name, {**arguments, argument: value}, f"{name}-{argument}-{i}")
        for name, alternatives in table.items()
        for arguments in alternatives
        for argument, good in arguments.items()
        for i, value in enumerate(wrong(good))
        if not will_do(name, argument, value)
    ]


@pytest.mark.parametrize(
    ("name", "given", "_id"), cases(ARGUMENTS), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_sentence_names_the_argument(name: str, given: dict[str, object], _id: str) -> None:
    with pytest.raises(ValueError, match=rf"\b({'|'.join(given)}|x)\b"):
        getattr(torch.ops.kbitq, name)(**given)


def complaint(operator: Callable[..., object], given: dict[str, object]) -> str | None:
    """What a ValueError says; None where all is well. Anything else is raised."""
    try:
        operator(**given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() | ON_CUDA.keys()))
def test_so_it_does_when_traced(name: str) -> None:
    """Without data, as torch.compile and torch.export call an operator: reading a shape must not stumble there."""
    operator, given = getattr(torch.ops.kbitq, name), {**ON_CUDA, **{n: a[0] for n, a in ARGUMENTS.items()}}[name]

    def bare(value: object) -> object:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    usual = {argument: bare(value) for argument, value in given.items()}
    operator(**usual)
    for argument, value in given.items():
        for bad in wrong(value):
            said = complaint(operator, {**usual, argument: bare(bad)})
            assert said is None or re.search(rf"\b({'|'.join(given)})\b", said)


@pytest.mark.parametrize("n", [-1, -(1 << 40), 1 << 31, 1 << 62])
def test_functional_sizes(n: int) -> None:
    with pytest.raises(ValueError, match=r"\bn\b"):
        functional.dequantize_kbit(Q.packed.view(-1), Q.absmax.view(-1), Q.codebook, K, n)


@pytest.mark.parametrize("k", [-1, 0, 1, 9, 64, 1 << 40])
def test_functional_k(k: int) -> None:
    for call in (
        lambda: functional.quantize_kbit(W, k),
        lambda: functional.create_normal_float_codebook(k),
        lambda: functional.dequantize_kbit(Q.packed.view(-1), Q.absmax.view(-1), Q.codebook, k, 32),
    ):
        with pytest.raises(ValueError, match=r"(?i)\bk\b"):
            call()


def test_python_functions_of_ops() -> None:
    scalar = torch.tensor(1.0)
    for call, argument in (
        (lambda: ops.dequantize(Q.packed, Q.absmax, Q.codebook, 1 << 62), "cols"),
        (lambda: ops.quantize(scalar, Q.codebook, amax=torch.ones(1)), "w"),
        (lambda: ops.stats(scalar, Q.packed, Q.absmax, Q.codebook), "w"),
        (lambda: ops.prepare_importance(scalar), "importance"),
        (lambda: kbitq.ops.linear.linear(scalar, Q.packed, Q.absmax, Q.codebook), "x"),
        (lambda: kbitq.ops.linear.linear(scalar.requires_grad_(), Q.packed, Q.absmax, Q.codebook), "x"),
    ):
        with pytest.raises(ValueError, match=rf"^{argument}\b"):
            call()
