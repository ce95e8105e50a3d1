"""The codec `trellis` in tile order: its words come back bit for bit, and the fused linear is right against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.tolerances import LINEAR
from kbitq._core import core
from kbitq.codecs import trellis_reference as reference
from kbitq.ops import codec as codec_ops
from kbitq.ops import linear as linear_op
from kbitq.ops import tiled_linear, tiles

CODECS = ("trellis", "trellis/128")
KS = (1, 2, 3, 4)
# As for planes: sums of many thousand terms, in the order of the tensor cores.
TOLERANCE = LINEAR | {torch.float16: 1e-3, torch.float32: 1e-5}


def scale_columns(codec: str) -> int:
    return 128 if codec == "trellis/128" else 32


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def coded(rows: int, cols: int, k: int, codec: str, groups: int = 1, device: str = "cuda", factor: float = 1.0):
    """packed, absmax, codebook [groups, levels]: random words and scales; each group with levels of its own."""
    generator = torch.Generator().manual_seed(rows * cols + k)
    packed = torch.randint(-(2**31), 2**31, (rows, -(-cols // 32) * k), generator=generator, dtype=torch.int64).int()
    absmax = torch.randint(0x90, 0xD0, (rows, -(-cols // scale_columns(codec))), generator=generator).to(torch.uint8)
    levels = torch.linspace(-1, 1, 4 << k) + 0.01 * torch.randn(groups, 4 << k, generator=generator)
    books = levels.sort(dim=1).values * torch.arange(1, groups + 1)[:, None] * factor
    return packed.to(device), absmax.to(device), books.float().contiguous().to(device)


def decoded(packed, absmax, books, cols: int, codec: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, cols] as the CPU's dequantize makes it."""
    size = packed.shape[0] // books.shape[0]
    out = torch.empty(packed.shape[0], cols, dtype=dtype)
    for g, levels in enumerate(books.cpu()):
        span = slice(g * size, (g + 1) * size)
        core.dequantize(packed[span].cpu(), absmax[span].cpu(), levels, out[span], codec=codec)
    return out.to(packed.device)


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(y).all()
    return float((y.double() - want).norm() / want.norm())


# --- words and records -----------------------------------------------------------------------------


@given(
    codec=st.sampled_from(CODECS),
    k=st.sampled_from(KS),
    rows=st.integers(1, 40),
    cols=st.integers(1, 600),
    seed=st.integers(0, 1000),
)
def test_tiles_give_the_words_back(codec, k, rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (rows, -(-cols // 32) * k), generator=generator, dtype=torch.int64).int()
    absmax = torch.randint(0, 256, (rows, -(-cols // scale_columns(codec))), generator=generator).to(torch.uint8)
    made = tiles.tile(packed, absmax, torch.zeros(4 << k), cols, codec)
    assert made.k == k
    again = made.planes()
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], absmax)


@pytest.mark.parametrize(("codec", "k"), [*(("trellis", k) for k in KS), *(("planes", k) for k in (2, 3, 4, 5))])
def test_every_bit_has_a_place_of_its_own(codec, k):
    """One bit set in the words is one bit set in the tiles, a different one each time: nothing is stored twice."""
    seen = set()
    for word in range(8 * k):
        for bit in range(32):
            packed = torch.zeros(16, 8 * k, dtype=torch.int32)
            packed[bit % 16, word] = torch.tensor(1 << bit, dtype=torch.int64).int()
            flat = torch.ops.kbitq.tile(packed, torch.zeros(16, 8, dtype=torch.uint8), 256, codec).flatten()
            (where,) = flat.nonzero(as_tuple=True)
            assert len(where) == 1
            value = int(flat[where[0]]) & 0xFFFFFFFF
            assert value.bit_count() == 1
            seen.add((int(where[0]), value))
    assert len(seen) == 8 * k * 32


def turned(word: int, left: int) -> int:
    """A 32-bit word rotated left."""
    left %= 32
    return (word << left | word >> (32 - left)) & 0xFFFFFFFF


def pair_of_byte(z: int) -> list[int]:
    """Index bits 0 to 3 of both weights of a pair, from a byte of the table index (csrc/codecs/trellis_tiles.h)."""
    bit = [z >> i & 1 for i in range(8)]
    even = bit[5] | bit[0] << 1 | (bit[0] ^ bit[1] ^ bit[2] ^ bit[5] ^ bit[6]) << 2 | bit[4] << 3
    odd = bit[6] | (bit[1] ^ bit[5]) << 1 | (bit[1] ^ bit[2] ^ bit[3] ^ bit[5]) << 2 | bit[7] << 3
    return [even, odd]


@pytest.mark.parametrize("k", [2, 3])
def test_a_record_is_read_as_its_drawing_says(k):
    """Pairs of neighbours from bytes of q, x and u, as the GPU's kernels look them up, against the specification."""
    generator = torch.Generator().manual_seed(k)
    packed = torch.randint(-(2**31), 2**31, (16, 8 * k), generator=generator, dtype=torch.int64).int()
    want = reference.indices(packed.numpy(), k)
    record = torch.ops.kbitq.tile(packed, torch.zeros(16, 8, dtype=torch.uint8), 256, "trellis").flatten().tolist()
    for row in range(16):
        for block in range(8):
            lane, first = row % 8 * 4 + block % 4, (block // 4 * 2 + row // 8) * k
            words = [record[n // 4 * 128 + lane * 4 + n % 4] & 0xFFFFFFFF for n in range(first, first + k)]
            q, u = words[0], words[1]
            x = q ^ turned(q, -2) ^ (turned(q, -4) & 0xAAAAAAAA)
            for i in range(0, 32, 2):
                byte = turned(x, -i) & 0x0F | turned(q, -i) & 0x60 | turned(u, -i) & 0x90
                pair = pair_of_byte(byte)
                if k == 3:
                    m, j = i // 8, i % 8 // 2
                    unit = m % 2 * 8 + (4 + j if m // 2 else 3 - j)
                    top = turned(words[2], -(1 + 2 * unit))
                    pair = [pair[0] | (top & 1) << 4, pair[1] | (top >> 1 & 1) << 4]
                assert pair == want[row, block, i : i + 2].tolist(), (row, block, i)


@pytest.mark.parametrize(("codec", "words"), [("trellis", 32), ("trellis/128", 8)])
def test_bytes_of_a_record(codec, words):
    """16 x 256 weights: K bits each, and the scales of 32 or 128 columns."""
    for k in KS:
        assert core.tile_shape(17, 257, k, codec) == (2, 2, 128 * k + words)
    with pytest.raises(ValueError, match="k: tiles have 1 to 4 bits"):
        core.tile_shape(16, 256, 5, codec)


def test_arguments_are_named():
    with pytest.raises(ValueError, match="codec"):
        core.tile_shape(16, 256, 3, "trellis/64")
    with pytest.raises(ValueError, match="codec"):
        torch.ops.kbitq.tile(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.uint8), 32, "spiral")
    with pytest.raises(ValueError, match="absmax"):
        torch.ops.kbitq.tile(
            torch.zeros(2, 6, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.uint8), 64, "trellis/128"
        )
    with pytest.raises(ValueError, match="tiles"):
        torch.ops.kbitq.untile(torch.zeros(1, 1, 160, dtype=torch.int32), 16, 256, "trellis/128")


# --- multiplication --------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("k", KS)
class TestLinear:
    @pytest.fixture(autouse=True)
    def _gpu(self, cuda_device):
        """All of these need a GPU."""

    @staticmethod
    def check(rows, cols, k, codec, dtype, batches, groups=1, factor=1.0, bias=False):
        triple = coded(rows, cols, k, codec, groups, factor=factor)
        weight, packed = decoded(*triple, cols, codec).double(), tiles.tile(*triple, cols, codec)
        for m in batches:
            x = random(m, cols, seed=m, dtype=dtype)
            b = random(rows, seed=7, dtype=dtype) * factor if bias else None
            want = x.double() @ weight.t() + (0 if b is None else b.double())
            y = tiled_linear.linear(x, packed, b)
            assert y.dtype == dtype and y.shape == (m, rows)
            assert error(y, want) < TOLERANCE[dtype], f"K={k} M={m} [{rows}, {cols}]"
            assert torch.equal(y, tiled_linear.linear(x, packed, b)), f"not deterministic: K={k} M={m}"

    def test_repack_on_both_devices(self, k, codec):
        """The same records, and the words back."""
        for rows, cols in ((16, 256), (1, 1), (33, 1000), (17, 129)):
            packed, absmax, books = coded(rows, cols, k, codec)
            made = tiles.tile(packed, absmax, books, cols, codec)
            assert torch.equal(made.data.cpu(), tiles.tile(packed.cpu(), absmax.cpu(), books.cpu(), cols, codec).data)
            assert torch.equal(made.planes()[0], packed)
            assert torch.equal(made.planes()[1], absmax)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_decoded_tiles_are_the_dequantized_words(self, k, codec, dtype):
        for rows, cols in ((48, 512), (33, 1001), (1, 1)):
            packed, absmax, books = coded(rows, cols, k, codec)
            out = torch.full((rows, cols), float("nan"), dtype=dtype, device="cuda")
            made = tiles.tile(packed, absmax, books, cols, codec)
            core.decode_tiles(made.data, books[0], out, codec_ops.stream_of(out), codec)
            assert torch.equal(out, decoded(packed, absmax, books, cols, codec, dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_small_batch(self, k, codec, dtype):
        self.check(272, 1024, k, codec, dtype, (*range(1, 36), 63, 64, 65, 100, 300))

    @pytest.mark.parametrize(
        "shape", [(9, 1), (15, 31), (100, 333), (33, 9000), (4096, 40), (2304, 2880), (64, 14336)], ids=str
    )
    def test_tails(self, k, codec, shape):
        """No bias where a result is one product: it may cancel that, and then roundings alone are large."""
        for dtype in (torch.bfloat16, torch.float16):
            self.check(*shape, k, codec, dtype, (1, 2, 3, 5, 8, 9, 17, 40, 65, 130), bias=shape[1] > 1)

    def test_large_matrices(self, k, codec):
        self.check(14336, 4096, k, codec, torch.bfloat16, (1, 2, 4, 8, 16, 64, 300, 1024, 1100))

    @pytest.mark.parametrize("shape", [(4096, 14336), (28672, 8192), (300000, 512), (16, 65536)], ids=str)
    def test_every_way_to_cut(self, k, codec, shape):
        self.check(*shape, k, codec, torch.bfloat16, (1, 2, 4, 9, 16), bias=True)

    def test_float32_activations(self, k, codec):
        self.check(100, 333, k, codec, torch.float32, (1, 9, 70))

    @pytest.mark.parametrize("groups", [2, 200])
    def test_codebook_per_group_of_rows(self, k, codec, groups):
        self.check(16 * 3 * groups, 512, k, codec, torch.bfloat16, (1, 5, 20, 64, 140), groups=groups)

    @pytest.mark.parametrize("factor", [1e-28, 1e-10, 1e20])
    def test_extreme_levels(self, k, codec, factor):
        self.check(64, 512, k, codec, torch.bfloat16, (1, 8, 33, 200), factor=factor)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_wide_x_on_a_large_weight(self, k, codec, dtype):
        self.check(5128, 4360, k, codec, dtype, (17, 32, 33, 64, 65, 128, 129, 256, 273), bias=True)

    def test_wide_x_that_cannot_be_read_by_vectors(self, k, codec):
        self.check(112, 4363, k, codec, torch.bfloat16, (3, 12, 65, 200), groups=7)
        self.check(4832, 4363, k, codec, torch.bfloat16, (20, 50), factor=1e-3)

    def test_graph(self, k, codec):
        packed = tiles.tile(*coded(1024, 4096, k, codec), 4096, codec)
        for m in (1, 7, 30, 300):
            x = random(m, 4096, dtype=torch.bfloat16)
            tiled_linear.linear(x, packed)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = tiled_linear.linear(x, packed)
            x.copy_(random(m, 4096, seed=1, dtype=torch.bfloat16))
            graph.replay()
            assert torch.equal(y, tiled_linear.linear(x, packed))

    def test_through_the_op(self, k, codec):
        """kbitq::linear takes the tiles."""
        packed, absmax, books = coded(48, 512, k, codec)
        weight = decoded(packed, absmax, books, 512, codec).double()
        for m in (1, 12, 1100):
            x = random(m, 512, dtype=torch.bfloat16)
            y = linear_op.linear(x, packed, absmax, books, coding=codec)
            assert error(y, x.double() @ weight.t()) < TOLERANCE[torch.bfloat16]
        assert tiled_linear.tiles_for(x[:1], packed, absmax, books, codec) is not None

    @pytest.mark.parametrize("counts", [[3, 0, 1, 70, 0], [1, 1, 1, 1, 1], [0, 300, 2, 0, 0]], ids=str)
    def test_experts(self, k, codec, counts):
        experts, rows, cols = len(counts), 96, 416
        for books_each, dtype in ((1, torch.bfloat16), (2, torch.float16)):
            triple = coded(experts * rows, cols, k, codec, experts * books_each)
            packed, weight = tiles.tile(*triple, cols, codec), decoded(*triple, cols, codec).double()
            x = random(sum(counts), cols, dtype=dtype)
            offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
            y = tiled_linear.grouped_linear(x, packed, offsets)
            parts = zip(x.double().split(counts), weight.view(experts, rows, cols), strict=True)
            assert error(y, torch.cat([part @ w.t() for part, w in parts])) < TOLERANCE[dtype]
            assert torch.equal(y, tiled_linear.grouped_linear(x, packed, offsets))
