"""Dense streams of codes, fields of words, and their values: against NumPy, on every instruction set."""

import numpy as np
import pytest
import torch

from helpers.simd import at_level
from kbitq._core import core
from kbitq.ops.code_stream import decode_codes, pack_codes, unpack_codes

SHAPES = [(1, 1), (3, 8), (5, 31), (4, 77), (2, 300), (7, 1000)]


def stream_reference(codes: np.ndarray, bits: int) -> np.ndarray:
    """A dense stream of each row, bit by bit, in whole words."""
    planes = (codes[:, :, None] >> np.arange(bits)) & 1
    flat = planes.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view(np.int32)


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


@pytest.fixture(params=core.simd_levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> object:
    with at_level(request.param):
        yield request.param


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(bits, *shape)
    stream = pack_codes(codes, bits)
    assert np.array_equal(stream.numpy(), stream_reference(codes.numpy(), bits))
    assert unpack_codes(stream, bits, shape[1]).equal(codes)


def test_bits_above_a_code_are_left_out() -> None:
    assert pack_codes(torch.tensor([[0xFF, 0x10]], dtype=torch.uint8), 4).tolist() == [[0x0F]]


@pytest.mark.parametrize("group_size", [1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("round_each", [False, True])
def test_one_row_of_parameters_is_for_all_rows(group_size: int, bias: bool, round_each: bool) -> None:
    codes, groups = random_codes(4, 5, 300), -(-300 // group_size)
    scale, zero = torch.rand(1, groups) * 0.01, torch.rand(1, groups) * 15
    parameters = {"zero": zero, **({"bias": zero} if bias else {})}
    stream, dtype = pack_codes(codes, 4), torch.float16
    out = torch.empty(5, 300, dtype=dtype)
    options = {"group_size": group_size, "round_each": round_each}
    assert decode_codes(stream, 4, 300, scale, dtype, **parameters, **options, out=out) is out
    each = {name: value.expand(5, -1).contiguous() for name, value in parameters.items()}
    assert out.equal(decode_codes(stream, 4, 300, scale.expand(5, -1), dtype, **each, **options))
    with pytest.raises(ValueError, match="zero"):
        decode_codes(stream, 4, 300, scale, dtype, **{**parameters, "zero": each["zero"]}, **options)


def test_high_half_first() -> None:
    data = torch.tensor([[0x12, 0x3F]], dtype=torch.uint8)
    assert unpack_codes(data, 4, 4, order="high_first").tolist() == [[1, 2, 3, 15]]


def test_fields() -> None:
    words = torch.tensor([[0x76543210, 0x7EDCBA98]], dtype=torch.int32)
    starts, shifts = torch.zeros(8, dtype=torch.int64), torch.arange(0, 32, 4, dtype=torch.int32)
    got = unpack_codes(words, 4, 2, starts=starts, shifts=shifts, order="words")
    assert got.tolist() == [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 7]]
    halves = unpack_codes(words, 4, 8, starts=starts[:2], shifts=shifts[:2], order="bytes")
    assert halves.tolist() == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_values(bits: int, dtype: torch.dtype) -> None:
    codes = random_codes(bits, 5, 300)
    scale, zero = torch.rand(5, 4) * 1e-3, torch.randint(0, 1 << bits, (5, 4)).float()
    table, bias = torch.randn(1 << bits), torch.randn(5, 4)
    group = (torch.arange(300) + 20) // 80
    stream = pack_codes(codes, bits)
    plain = (codes.float() - zero[:, group]) * scale[:, group]
    assert decode_codes(stream, bits, 300, scale, dtype, zero=zero, group_size=80, phase=20).equal(plain.to(dtype))
    looked_up = table[codes.long()] * scale[:, group] + bias[:, group]
    got = decode_codes(stream, bits, 300, scale, dtype, table=table, bias=bias, group_size=80, phase=20)
    assert got.equal(looked_up.to(dtype))
    of_column = torch.randint(0, 4, (300,), dtype=torch.int32)
    shuffled = (codes.float() - zero[:, of_column.long()]) * scale[:, of_column.long()]
    assert decode_codes(stream, bits, 300, scale, dtype, zero=zero, group_of=of_column).equal(shuffled.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_rounded_after_every_operation(dtype: torch.dtype) -> None:
    codes = random_codes(4, 3, 70)
    scale, zero, bias = (torch.rand(3, 1).to(dtype) for _ in range(3))
    expected = (codes.to(dtype) - zero) * scale + bias
    got = decode_codes(pack_codes(codes, 4), 4, 70, scale, dtype, zero=zero, bias=bias, round_each=True)
    assert got.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    codes, scale = torch.ones(3, 9, dtype=torch.uint8), torch.tensor([[torch.nan], [torch.inf], [3e38]])
    got = decode_codes(pack_codes(codes, 2), 2, 9, scale, dtype)
    assert got[0].isnan().all() and got[1].isinf().all() and got[2].equal(torch.full((9,), 3e38).to(dtype))
    quiet = decode_codes(
        pack_codes(codes, 2), 2, 9, torch.tensor([0x7FFFFFFF] * 3).int().view(torch.float32)[:, None], dtype
    )
    assert quiet.isnan().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cols": 17}, "starts: a row's codes"),
        ({"bits": 9}, "bits"),
        ({"order": "backwards"}, "order"),
        ({"order": "high_first", "bits": 2}, "high_first"),
        ({"order": "words"}, "shifts"),
        ({"shifts": torch.zeros(2, dtype=torch.int32)}, "shifts"),
        ({"starts": torch.tensor([-1, 0])}, "starts"),
        ({"group_size": 3}, "group_size"),
        ({"group_of": torch.full((16,), 4, dtype=torch.int32)}, "group_of"),
        ({"zero": torch.zeros(2, 3)}, "zero"),
        ({"table": torch.zeros(8)}, "table"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, object], message: str) -> None:
    given = {"data": torch.zeros(2, 2, dtype=torch.int32), "bits": 4, "cols": 16, "scale": torch.ones(2, 4)}
    options = {"dtype": torch.float32, "group_size": 4}
    with pytest.raises(ValueError, match=message):
        decode_codes(**{**given, **options, **changed})  # type: ignore[arg-type]
