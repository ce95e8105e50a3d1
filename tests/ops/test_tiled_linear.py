"""The fused linear on the GPU and its tile order: against float64, deterministic, and the planes come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.tolerances import LINEAR
from kbitq import ops
from kbitq._core import core
from kbitq.codecs import codebooks
from kbitq.ops import linear as linear_op
from kbitq.ops import tiled_linear

KS = (2, 3, 4, 5)
# float16 and float32 with more room than on a CPU: sums of many thousand terms, in the order of the tensor cores.
TOLERANCE = LINEAR | {torch.float16: 1e-3, torch.float32: 1e-5}
ROWS_OF_X = (*range(1, 66), 100, 300)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def quantized(rows: int, cols: int, k: int, groups: int = 1, device: str = "cpu", factor: float = 1.0):
    """packed, absmax, codebook [groups, 2^K] of random weights, each group with a size of its own."""
    levels = torch.from_numpy(codebooks.optimal(k)).to(device)
    size = rows // groups
    parts = []
    for g in range(groups):
        w = random(size, cols, seed=100 * g + k, device=device) * factor * (g + 1)
        parts.append(ops.quantize(w, levels, amax=ops.scan(w)[0]))
    packed, absmax, books = zip(*parts, strict=True)
    return torch.cat(packed), torch.cat(absmax), torch.stack(books)


def exact_weight(packed, absmax, books, cols: int) -> torch.Tensor:
    """float64 [rows, cols]; the decode rule's product is exact in it only before float32 rounds, which is 2^-25."""
    size = packed.shape[0] // books.shape[0]
    parts = [
        ops.dequantize(packed[g * size : (g + 1) * size], absmax[g * size : (g + 1) * size], levels, cols)
        for g, levels in enumerate(books)
    ]
    return torch.cat(parts).double()


SMALLER = """
import torch
from ops.test_tiled_linear import KS, TestLinear, exact_weight, quantized, random
from kbitq.ops import tiled_linear
from kbitq.ops.linear import linear
device = torch.device("cuda")
for k in KS:
    for rows, cols in ((33, 9000), (4096, 1024), (272, 4096)):
        triple = quantized(rows, cols, k, 1, "cuda")
        if tiled_linear.can_tile(triple[0], triple[2]):
            TestLinear.check(rows, cols, k, torch.bfloat16, (1, 2, 4, 8, 11, 16, 17, 130), bias=True)
        for m in (1, 16, 40):
            x = random(m, cols, seed=m, dtype=torch.bfloat16, device="cuda")
            want = x.double() @ exact_weight(*triple, cols).t()
            assert (linear(x, *triple).double() - want).norm() / want.norm() < 6e-3, (k, rows, cols, m)
print("fused" if tiled_linear.can_tile(*quantized(32, 64, 2, 1, "cuda")[::2]) else "decoded")
"""


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(y).all()
    return float((y.double() - want).norm() / want.norm())


# --- tiles and planes ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", [(16, 256), (1, 1), (17, 257), (48, 32), (33, 1000)], ids=str)
def test_tiles_give_the_planes_back(device, k, shape):
    """Random words, not weights: every bit of them must survive, in short blocks too."""
    rows, cols = shape
    blocks = (cols + 31) // 32
    generator = torch.Generator().manual_seed(rows * cols)
    packed = torch.randint(-(2**31), 2**31, (rows, blocks * k), generator=generator, dtype=torch.int64).int().to(device)
    absmax = torch.randint(0, 256, (rows, blocks), generator=generator).to(device, torch.uint8)
    tiles = tiled_linear.tile(packed, absmax, torch.zeros(1 << k, device=device), cols)
    again = tiles.planes()
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], absmax)


def test_padding_of_tiles_is_zero():
    tiles = torch.ops.kbitq.tile(
        torch.full((1, 3), -1, dtype=torch.int32), torch.full((1, 1), 255, dtype=torch.uint8), 5
    )
    assert tiles.shape == core.tile_shape(1, 5, 3)
    assert sum((int(v) & 0xFFFFFFFF).bit_count() for v in tiles.flatten()) == 3 * 32 + 8


def test_tile_arguments_are_named():
    with pytest.raises(ValueError, match="k: tiles have 2 to 5 bits"):
        core.tile_shape(16, 256, 6)
    with pytest.raises(ValueError, match="absmax"):
        torch.ops.kbitq.tile(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.uint8), 32)


@pytest.mark.parametrize(
    "taken, wide, rows, groups",
    [
        (0, False, 0, False),
        (core.few_rows, False, core.few_rows, False),
        (1 << 62, False, 128, True),
        (1 << 62, True, 768, True),
    ],
    ids=["too old", "99 KB", "B200", "Hopper"],
)
def test_which_products_a_card_takes(monkeypatch, taken, wide, rows, groups):
    monkeypatch.setattr(tiled_linear, "_rows_taken", lambda device: taken)
    monkeypatch.setattr(tiled_linear, "_has_wide", lambda device: wide)
    assert tiled_linear.fused_rows(0, 14336, 4096) == rows
    assert tiled_linear.takes_groups(0) == groups


# --- multiplication --------------------------------------------------------------------------------


@pytest.mark.cuda
class TestLinear:
    @pytest.fixture(autouse=True)
    def _gpu(self, cuda_device):
        """All of these need a GPU."""

    @staticmethod
    def check(rows, cols, k, dtype, batches, groups=1, factor=1.0, bias=False):
        triple = quantized(rows, cols, k, groups, "cuda", factor)
        weight, tiles = exact_weight(*triple, cols), tiled_linear.tile(*triple, cols)
        for m in batches:
            x = random(m, cols, seed=m, dtype=dtype, device="cuda")
            b = random(rows, seed=7, dtype=dtype, device="cuda") * factor if bias else None
            want = x.double() @ weight.t() + (0 if b is None else b.double())
            y = tiled_linear.linear(x, tiles, b)
            assert y.dtype == dtype and y.shape == (m, rows)
            assert error(y, want) < TOLERANCE[dtype], f"K={k} M={m} [{rows}, {cols}]"
            assert torch.equal(y, tiled_linear.linear(x, tiles, b)), f"not deterministic: K={k} M={m}"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("k", KS)
    def test_every_small_batch(self, k, dtype):
        self.check(272, 1024, k, dtype, ROWS_OF_X)

    @pytest.mark.parametrize(
        "shape", [(1, 1), (15, 31), (100, 333), (33, 9000), (4096, 40), (2304, 2880), (64, 14336)], ids=str
    )
    @pytest.mark.parametrize("k", KS)
    def test_tails(self, k, shape):
        for dtype in (torch.bfloat16, torch.float16):
            self.check(*shape, k, dtype, (1, 2, 3, 5, 8, 9, 17, 40, 65, 130), bias=True)

    @pytest.mark.parametrize("k", KS)
    def test_large_matrices(self, k):
        """As many row tiles as keep every CTA busy several times over."""
        self.check(14336, 4096, k, torch.bfloat16, (1, 4, 8, 16, 64, 300))

    @pytest.mark.parametrize("shape", [(4096, 14336), (28672, 8192), (300000, 512), (16, 65536), (200, 14336)], ids=str)
    @pytest.mark.parametrize("k", KS)
    def test_every_way_to_cut(self, k, shape):
        """Columns shared by clusters, warps in two lanes, sums in several batches, one row tile for the whole GPU."""
        self.check(*shape, k, torch.bfloat16, (1, 2, 4, 8, 9, 16), bias=True)

    @pytest.mark.parametrize("card", ["86:101376", "80:166912", "75:65536"])
    def test_smaller_cards(self, card):
        """The plans for other cards' shared memory, without clusters; on the oldest, weights are decoded instead."""
        run = subprocess.run(
            [sys.executable, "-c", SMALLER],
            env={
                **os.environ,
                "KBITQ_TEST_CARD": card,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            },
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        assert run.stdout.split()[-1] == ("decoded" if card.startswith("75") else "fused")

    @pytest.mark.parametrize("k", KS)
    def test_float32_activations(self, k):
        self.check(100, 333, k, torch.float32, (1, 9, 70))

    @pytest.mark.parametrize("groups", [2, 3, 200])
    @pytest.mark.parametrize("k", KS)
    def test_codebook_per_group_of_rows(self, k, groups):
        self.check(16 * 3 * groups, 512, k, torch.bfloat16, (1, 5, 20, 64, 140), groups=groups)

    @pytest.mark.parametrize("factor", [1e-28, 1e-10, 1e20])
    def test_extreme_scales(self, factor):
        for k in KS:
            self.check(64, 512, k, torch.bfloat16, (1, 8, 33, 200), factor=factor)

    def test_rows_of_very_different_size(self):
        """The smallest scale bytes are subnormal, and float16 still holds what comes of them."""
        levels = torch.from_numpy(codebooks.optimal(4)).cuda()
        w = random(64, 512, device="cuda") * torch.logspace(0, -4.2, 64, device="cuda")[:, None]
        packed, absmax, codebook = ops.quantize(w, levels, amax=ops.scan(w)[0])
        tiles, weight = (
            tiled_linear.tile(packed, absmax, codebook, 512),
            exact_weight(packed, absmax, codebook[None], 512),
        )
        for dtype in (torch.bfloat16, torch.float16):
            for m in (1, 6, 24):
                x = random(m, 512, seed=m, dtype=dtype, device="cuda") * 16
                missed = (tiled_linear.linear(x, tiles).double() - x.double() @ weight.t()).norm(dim=0)
                usual = (
                    weight.norm(dim=1) * float(x.double().norm()) / 512**0.5
                )  # of a row's products, before they cancel
                assert (missed < 3 * TOLERANCE[dtype] * usual).all()

    def test_shapes_of_x(self):
        triple = quantized(48, 320, 3, device="cuda")
        tiles, weight = tiled_linear.tile(*triple, 320), exact_weight(*triple, 320)
        x = random(2, 3, 5, 320, dtype=torch.bfloat16, device="cuda")
        assert error(tiled_linear.linear(x, tiles), x.double() @ weight.t()) < TOLERANCE[torch.bfloat16]
        assert tiled_linear.linear(x[:0], tiles).shape == (0, 3, 5, 48)
        odd = random(4 * 320 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(4, 320)  # not aligned to 16 bytes
        assert error(tiled_linear.linear(odd, tiles), odd.double() @ weight.t()) < TOLERANCE[torch.bfloat16]
        wide = random(12, 640, dtype=torch.bfloat16, device="cuda")[:, ::2]
        assert error(tiled_linear.linear(wide, tiles), wide.double() @ weight.t()) < TOLERANCE[torch.bfloat16]

    @pytest.mark.parametrize("k", KS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_decoded_tiles_are_the_dequantized_planes(self, k, dtype):
        for rows, cols in ((48, 512), (33, 1001), (1, 1)):
            packed, absmax, books = quantized(rows, cols, k, device="cuda")
            out = torch.full((rows, cols), float("nan"), dtype=dtype, device="cuda")
            core.decode_tiles(
                tiled_linear.tile(packed, absmax, books, cols).data, books[0], out, ops.codec.stream_of(out)
            )
            assert torch.equal(out, ops.dequantize(packed, absmax, books[0], cols, dtype))

    def test_inputs_that_are_not_finite_stay_in_their_row(self):
        tiles = tiled_linear.tile(*quantized(64, 512, 3, device="cuda"), 512)
        x = random(4, 512, dtype=torch.bfloat16, device="cuda")
        x[2, 300] = float("inf")
        for m in (4, 12):
            y = tiled_linear.linear(x.repeat(m // 4, 1), tiles)
            assert torch.isfinite(y[[0, 1, 3]]).all()
            assert not torch.isfinite(y[2]).any()

    def test_graph(self):
        tiles = tiled_linear.tile(*quantized(1024, 4096, 4, device="cuda"), 4096)
        for m in (1, 7, 30, 300):
            x = random(m, 4096, dtype=torch.bfloat16, device="cuda")
            want = tiled_linear.linear(x, tiles)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = tiled_linear.linear(x, tiles)
            for seed in (1, 2):
                x.copy_(random(m, 4096, seed=seed, dtype=torch.bfloat16))
                graph.replay()
                assert torch.equal(y, tiled_linear.linear(x, tiles))
            assert not torch.equal(y, want)

    def test_streams_do_not_share_partial_sums(self):
        tiles = tiled_linear.tile(*quantized(256, 8192, 3, device="cuda"), 8192)
        x = random(32, 8192, dtype=torch.bfloat16, device="cuda")
        want = tiled_linear.linear(x, tiles)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(tiled_linear.linear(x, tiles))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for y in results)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("k", KS)
    def test_wide_x_on_a_large_weight(self, k, dtype):
        """From 17 rows of x on, and every instance of the kernel; row tiles and columns that fill nothing evenly."""
        self.check(5128, 4360, k, dtype, (17, 32, 33, 64, 65, 128, 129, 256, 273), bias=True)

    @pytest.mark.parametrize("cols", [4363, 31, 520])
    def test_wide_x_that_cannot_be_read_by_vectors(self, cols):
        self.check(112, cols, 3, torch.bfloat16, (65, 200), groups=7)
        self.check(21_000_000 // cols // 16 * 16 + 16, cols, 4, torch.bfloat16, (20, 50), factor=1e-3)

    def test_wide_x_in_a_graph_and_on_two_streams(self):
        tiles = tiled_linear.tile(*quantized(6144, 4096, 3, device="cuda"), 4096)
        xs = [random(48, 4096, seed=i, dtype=torch.bfloat16, device="cuda") for i in range(2)]
        want = [tiled_linear.linear(x, tiles) for x in xs]
        streams, results = [torch.cuda.Stream() for _ in xs], [[], []]
        torch.cuda.synchronize()
        for _ in range(20):
            for x, stream, into in zip(xs, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    into.append(tiled_linear.linear(x, tiles))
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for into, w in zip(results, want, strict=True) for y in into)
        held, graph = xs[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tiled_linear.linear(tiled_linear.linear(held, tiles)[:, :4096], tiles)
        for x, w in zip(xs, want, strict=True):
            held.copy_(x)
            graph.replay()
            assert torch.equal(y, tiled_linear.linear(w[:, :4096], tiles))

    def test_compiled(self):
        tiles = tiled_linear.tile(*quantized(64, 512, 3, device="cuda"), 512)
        f = torch.compile(lambda x: tiled_linear.linear(x * 2, tiles) + 1, fullgraph=True)
        x = random(3, 512, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(f(x), tiled_linear.linear(x * 2, tiles) + 1)

    @pytest.mark.parametrize("counts", [[3, 0, 1, 70, 0], [0, 0, 0, 0, 9], [1, 1, 1, 1, 1], [0, 300, 2, 0, 0]], ids=str)
    @pytest.mark.parametrize("k", KS)
    def test_experts(self, k, counts):
        experts, rows, cols = len(counts), 96, 416
        for books_each, dtype in ((1, torch.bfloat16), (2, torch.float16)):
            triple = quantized(experts * rows, cols, k, experts * books_each, "cuda")
            tiles, weight = tiled_linear.tile(*triple, cols), exact_weight(*triple, cols).view(experts, rows, cols)
            x = random(sum(counts), cols, dtype=dtype, device="cuda")
            offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
            y = tiled_linear.grouped_linear(x, tiles, offsets)
            parts = zip(x.double().split(counts), weight, strict=True)
            assert error(y, torch.cat([part @ w.t() for part, w in parts])) < TOLERANCE[dtype]
            assert torch.equal(y, tiled_linear.grouped_linear(x, tiles, offsets))

    def test_remembered_tiles_follow_changes(self):
        packed, absmax, books = quantized(32, 256, 3, device="cuda")
        first = tiled_linear.tiles_of(packed, absmax, books, 256)
        assert tiled_linear.tiles_of(packed, absmax, books, 256) is first
        packed.bitwise_not_()
        again = tiled_linear.tiles_of(packed, absmax, books, 256)
        assert torch.equal(again.planes()[0], packed)
        assert not torch.equal(again.data, first.data)

    def test_what_can_be_tiled(self):
        packed, _, books = quantized(40, 64, 3, device="cuda")
        assert tiled_linear.can_tile(packed, books)
        assert not tiled_linear.can_tile(packed.cpu(), books)
        assert not tiled_linear.can_tile(packed, books.repeat(5, 1))  # groups of 8 rows
        assert not tiled_linear.can_tile(packed, torch.zeros(64, device="cuda"))

    @pytest.mark.parametrize("k", [2, 3, 4, 5, 6, 8])
    def test_through_the_op(self, k):
        """kbitq::linear takes the fast way where it can, and the same numbers come out where it cannot."""
        packed, absmax, books = quantized(48, 512, k, device="cuda")
        weight = exact_weight(packed, absmax, books, 512)
        for m in (1, 12, 200):
            x = random(m, 512, dtype=torch.bfloat16, device="cuda")
            y = linear_op.linear(x, packed, absmax, books)
            assert error(y, x.double() @ weight.t()) < TOLERANCE[torch.bfloat16]

    def test_a_weight_is_repacked_once(self, monkeypatch):
        layer = torch.nn.Module()
        for name, tensor in zip(("packed", "absmax", "books"), quantized(48, 512, 3, device="cuda"), strict=True):
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        x = random(2, 512, dtype=torch.bfloat16, device="cuda")
        y = linear_op.linear(x, layer.packed, layer.absmax, layer.books)
        monkeypatch.setattr(tiled_linear, "tile", None)
        assert torch.equal(linear_op.linear(x, layer.packed, layer.absmax, layer.books), y)
