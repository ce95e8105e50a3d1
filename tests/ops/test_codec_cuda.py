"""What the GPU adds to the codec's tests: sizes at which its grids wrap round, addresses, streams, graphs, devices.

Equal bytes on every small case is tests/test_codec_parity.py's business, which runs on CUDA too; here the CPU core,
itself held against the reference there, is what the GPU is compared with.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

from kbitq import functional, ops, quantize
from kbitq._core import core
from kbitq.codecs import codebooks

pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("device", ["cuda"], indirect=True)]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def optimal(k: int) -> torch.Tensor:
    return torch.from_numpy(codebooks.optimal(k))


def triple(w, levels, scale, importance=None):
    """packed, absmax, codebook and statistics of a matrix, on its device."""
    weights = None if importance is None else importance.to(w.device)
    made = ops.quantize(w, levels.to(w.device), amax=ops.scan(w)[0], importance=weights, scale=scale)
    return (*made, ops.stats(w, *made))


def assert_same_as_cpu(
    w: torch.Tensor, levels: torch.Tensor, scale: str, importance: torch.Tensor | None = None
) -> None:
    want, got = triple(w, levels, scale, importance), triple(w.cuda(), levels, scale, importance)
    for name, ours, theirs in zip(("packed", "absmax", "codebook", "stats"), got, want, strict=True):
        assert torch.equal(ours.cpu(), theirs), f"{name} of {tuple(w.shape)} {w.dtype} {scale} K={len(levels)}"
    for dtype in DTYPES:
        here, there = (ops.dequantize(*t[:3], w.shape[1], dtype) for t in (got, want))
        assert torch.equal(here.cpu(), there), f"decoded {dtype}"


@pytest.mark.parametrize("scale", ["absmax", "mse"])
@pytest.mark.parametrize("k", range(2, 9))
def test_more_blocks_than_the_grid_holds_at_once(device, k, scale):
    """Each warp walks several strips and reuses its buffers; the last strip is short."""
    w = normal(8200 if scale == "absmax" else 18_200, 1056, dtype=DTYPES[k % 3], seed=k)
    assert_same_as_cpu(w, optimal(k), scale)


@pytest.mark.parametrize("cols", [1024, 1000])
def test_importance_on_many_rows(device, cols):
    importance = ops.prepare_importance(normal(4, cols, dtype=torch.float32, seed=1).abs() ** 2)
    for k in (2, 4, 7):
        assert_same_as_cpu(normal(4 * 513, cols, seed=k), optimal(k), "mse", importance)


@pytest.mark.parametrize("k", range(2, 7))
def test_ties(device, k):
    """Values, levels and thresholds on one dyadic grid: comparisons and errors tie by the thousand."""
    rng = np.random.RandomState(k)
    levels = torch.linspace(-1, 1, 2**k + 1)[torch.arange(2**k + 1) != 2 ** (k - 1)]
    for step in (1, 2, 3):
        w = torch.from_numpy(rng.randint(-64 * step, 64 * step + 1, (600, 96)).astype(np.float32)) / (8 * step)
        assert_same_as_cpu(w, levels, "mse")
        assert_same_as_cpu(w, levels, "absmax")


@pytest.mark.parametrize("k", range(2, 9))
def test_codebooks_that_no_grid_of_cells_separates(device, k):
    """Clusters and equal levels, one-sided and nearly symmetric sets: every way of searching."""
    rng = np.random.RandomState(k)
    cluster = np.concatenate([rng.uniform(0.4999, 0.5, 2**k - 2), [-1, 1]])
    nearly = codebooks.optimal(k).copy()
    nearly[0] = np.nextafter(nearly[0], np.float32(0))
    one_sided, equal = rng.uniform(0, 1, 2**k), np.repeat(rng.uniform(-1, 1, 2 ** (k - 1)), 2)
    for levels in (cluster, nearly, one_sided, equal, codebooks.nf(k)):
        ascending = codebooks.normalise(np.sort(levels))
        for scale in ("absmax", "mse"):
            assert_same_as_cpu(normal(37, 320, seed=k), torch.from_numpy(ascending), scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_addresses_that_are_not_aligned(device, offset, dtype):
    """Contiguous views that begin anywhere: of the source, of the words and of the output."""
    rows, cols = 65, 256
    for k in (2, 3, 4, 5):
        flat = normal(rows * cols + offset, dtype=dtype, seed=k)
        w, gpu = flat[offset:].view(rows, cols), flat.cuda()[offset:].view(rows, cols)
        amax, status = ops.scan(gpu)
        assert amax.item() == w.float().abs().max().item() and status.tolist() == [0, -1]
        want = triple(w, optimal(k), "mse")
        packed = torch.zeros(want[0].numel() + offset, dtype=torch.int32, device=device)[offset:].view_as(want[0])
        absmax = torch.zeros(want[1].numel() + offset, dtype=torch.uint8, device=device)[offset:].view_as(want[1])
        levels = optimal(k).cuda()
        codebook = torch.zeros_like(levels)
        ops.quantize_into(gpu, levels, packed, absmax, codebook, amax=amax)
        assert torch.equal(packed.cpu(), want[0]) and torch.equal(absmax.cpu(), want[1])
        assert torch.equal(ops.stats(gpu, packed, absmax, codebook).cpu(), want[3])
        out = torch.empty(rows * cols + offset, dtype=dtype, device=device)[offset:].view(rows, cols)
        ops.dequantize(packed, absmax, codebook, cols, out=out)
        assert torch.equal(out.cpu(), ops.dequantize(*want[:3], cols, dtype))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 300, 8192, 100_003])
def test_drop_in_functions(device, n):
    """Flat tensors, float32 maxima down to denormals and up to the largest, against the CPU."""
    for magnitude in (1.0, 1e-41, 1e-37, 1e30, 3e37):
        a = normal(n, dtype=torch.float32, seed=n).clamp(-5, 5) * magnitude
        for k in (2, 3, 5, 8):
            for form in ("fp32", "e4m4"):
                want = functional.quantize_kbit(a, k, absmax_format=form)
                got = functional.quantize_kbit(a.cuda(), k, absmax_format=form)
                assert all(torch.equal(x.cpu(), y) for x, y in zip(got, want, strict=True)), (k, form, magnitude)
                for dtype in DTYPES:
                    here, there = (functional.dequantize_kbit(*t, k, n, dtype) for t in (got, want))
                    assert torch.equal(here.cpu(), there), (k, form, magnitude, dtype)


def test_statistics_of_rows_of_every_kind(device):
    """One long row in pieces, many short ones to a piece, and lengths around both."""
    for rows, cols in ((1, 300_000), (3, 4097), (5, 4096), (3000, 1), (700, 32), (129, 33), (50, 2080), (2, 4128)):
        assert_same_as_cpu(normal(rows, cols, dtype=torch.float32, seed=rows), optimal(4), "absmax")


def test_scan_counts_across_the_grid(device):
    for dtype in DTYPES:
        w = normal(3, 700_001, dtype=dtype)
        places = [5, 699_999, 700_001, 2 * 700_001 + 17, 3 * 700_001 - 1]
        for i, place in enumerate(places):
            w.view(-1)[place] = (torch.nan, torch.inf, -torch.inf)[i % 3]
        amax, status = ops.scan(w.cuda())
        assert amax.item() == w[torch.isfinite(w)].abs().max().item()
        assert status.tolist() == [len(places), places[0]]
        ragged = w.view(-1)[3 : 3 + 999]
        assert [t.tolist() for t in ops.scan(ragged.cuda())] == [t.tolist() for t in ops.scan(ragged)]


def test_not_finite_input_harms_nothing(device):
    w = normal(64, 320, dtype=torch.float32)
    w[::3, ::5], w[1], w[2, 7] = torch.nan, torch.inf, -torch.inf
    for k in range(2, 9):
        for scale in ("absmax", "mse"):
            made = triple(w.cuda(), optimal(k), scale)
            assert made[0].shape == (64, 10 * k)
    torch.cuda.synchronize()
    assert_same_as_cpu(normal(64, 320), optimal(3), "mse")


def test_work_follows_the_callers_stream(device):
    """The input is written late on a side stream: only work ordered behind it on that stream sees it."""
    w, side = normal(512, 1024), torch.cuda.Stream()
    want = triple(w, optimal(3), "mse")
    late = torch.zeros_like(w, device=device)
    source = w.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        got = triple(late, optimal(3), "mse")
    side.synchronize()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(got, want, strict=True))


def test_ops_do_not_wait_for_the_device(device):
    w, levels = normal(512, 1024).cuda(), optimal(4).cuda()
    before = torch.cuda.get_sync_debug_mode()
    started = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        amax, _ = ops.scan(w)
        made = ops.quantize(w, levels, amax=amax)
        ops.stats(w, *made)
        ops.dequantize(*made, 1024, torch.bfloat16)
        started.record()
        assert not started.query(), "the calls returned only after the device had run them"
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_cuda_graphs(device):
    """Captured once with the caller's buffers, replayed on other values."""
    source, levels = normal(300, 1056).cuda(), optimal(4).cuda()
    amax, status = torch.zeros(1, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    packed = torch.zeros(300, 33 * 4, dtype=torch.int32, device=device)
    absmax = torch.zeros(300, 33, dtype=torch.uint8, device=device)
    codebook, out = torch.zeros_like(levels), torch.zeros_like(source)
    rows = torch.zeros(300, 3, dtype=torch.float64, device=device)

    def everything() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        core.scan(source, amax, status, 1, stream)
        ops.quantize_into(source, levels, packed, absmax, codebook, amax=amax)
        ops.dequantize_into(packed, absmax, codebook, out)
        core.stats(source, packed, absmax, codebook, rows, 1, stream)

    everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    for seed in (1, 2):
        w = normal(300, 1056, seed=seed) * 10.0**seed
        source.copy_(w)
        graph.replay()
        want = triple(w, optimal(4), "mse")
        assert all(torch.equal(x.cpu(), y) for x, y in zip((packed, absmax, codebook, rows), want, strict=True))
        assert torch.equal(out.cpu(), ops.dequantize(*want[:3], 1056, torch.bfloat16))


def test_compiled_to_kernels(device):
    """Inductor's own code around ours, without a graph break."""

    def round_trip(w, levels):
        packed, absmax, codebook = ops.quantize(w * 2, levels, amax=ops.scan(w * 2)[0])
        return ops.dequantize(packed, absmax, codebook, w.shape[1], w.dtype) / 2

    w, levels = normal(64, 96).cuda(), optimal(3).cuda()
    assert torch.equal(torch.compile(round_trip, fullgraph=True)(w, levels), round_trip(w, levels))


def test_kbitq_quantize(device):
    for shape in ((64, 96), (8, 3, 5, 5)):
        w = normal(*shape, dtype=torch.float16)
        ours, theirs = quantize(w.cuda(), 3), quantize(w, 3)
        assert torch.equal(ours.packed.cpu(), theirs.packed) and ours.sqnr_db == theirs.sqnr_db
        assert torch.equal(ours.dequantize().cpu(), theirs.dequantize())


def test_beyond_2_to_the_31(device):
    """2^31 + 37 elements in one row, and in rows of 33: ends and middle against the CPU, a fault in the last place."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("CUDA: less than 24 GiB of memory is free")
    n, levels = 2**31 + 37, optimal(2).cuda()
    w = torch.empty(1, n, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device).manual_seed(0))
    amax, status = ops.scan(w)
    assert status.tolist() == [0, -1]
    for scale in ("absmax", "mse"):
        packed, absmax, codebook = ops.quantize(w, levels, amax=amax, scale=scale)
        out = ops.dequantize(packed, absmax, codebook, n, torch.bfloat16)
        for block in (0, 2**25 - 7, 2**26 - 5, 2**26):
            length = min(32 * 64, n - 32 * block)
            part = w[:, 32 * block : 32 * block + length].cpu()
            words, scales, stored = ops.quantize(part, levels.cpu(), amax=amax.cpu(), scale=scale)
            count = scales.shape[1]
            assert torch.equal(packed[:, 2 * block : 2 * (block + count)].cpu(), words)
            assert torch.equal(absmax[:, block : block + count].cpu(), scales)
            decoded = ops.dequantize(words, scales, stored, length, torch.bfloat16)
            assert torch.equal(out[:, 32 * block : 32 * block + length].cpu(), decoded)
    errors = ((w[:, i : i + 2**28].double() - out[:, i : i + 2**28]).square().sum().item() for i in range(0, n, 2**28))
    assert ops.stats(w, packed, absmax, codebook)[0, 1].item() == pytest.approx(sum(errors), rel=1e-2)
    rows = w[:, : n // 33 * 33].view(-1, 33)
    part, made = rows[-100:].cpu(), ops.quantize(rows, levels, amax=amax)
    want = ops.quantize(part, levels.cpu(), amax=amax.cpu())
    assert torch.equal(made[0][-100:].cpu(), want[0]) and torch.equal(made[1][-100:].cpu(), want[1])
    again = ops.dequantize(*made, 33, torch.bfloat16, out=out.view(-1)[: rows.numel()].view(-1, 33))
    assert torch.equal(again[-100:].cpu(), ops.dequantize(*want, 33, torch.bfloat16))
    w[0, -1] = torch.nan
    assert ops.scan(w)[1].tolist() == [1, n - 1]


def test_another_device_than_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("CUDA: one GPU, this needs two")
    w = normal(129, 1056)
    want = triple(w, optimal(5), "mse")
    with torch.cuda.device(0):
        got = triple(w.to("cuda:1"), optimal(5), "mse")
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(x.cpu(), y) for x, y in zip(got, want, strict=True))


BROKEN = """
import torch
from kbitq import ops
from kbitq._core import core
w = torch.zeros(4, 32, device="cuda")

class Wild:  # a tensor whose memory is not there
    dtype, shape = torch.float32, (1 << 20,)
    data_ptr, get_device, is_contiguous = (lambda self: 256), (lambda self: 0), (lambda self: True)

amax, status = ops.scan(w)
core.scan(Wild(), amax, status, 1, 0)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    ops.scan(w)
except RuntimeError as error:
    print(error)
"""


def test_a_cuda_error_is_an_exception_that_names_the_op(device):
    """In a process of its own: an illegal access leaves the CUDA context unusable."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300)
    assert "scan of 128 elements: CUDA: an illegal memory access" in done.stdout, done.stdout + done.stderr
