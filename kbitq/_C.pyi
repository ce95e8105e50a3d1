"""The compiled core. Tensor arguments are contiguous torch tensors on one device; use kbitq.ops."""

from torch import Tensor

version: str
has_cuda: bool
tile_rows: int
tile_max_bits: int
few_rows: int
tiled_counters: int
tiled_workspace_sums: int

def cuda_status() -> str: ...
def simd() -> str: ...
def simd_levels() -> list[str]: ...
def set_simd(level: str) -> None: ...
def tiles() -> bool: ...
def allow_tiles(allowed: bool) -> None: ...
def scan(w: Tensor, amax: Tensor, status: Tensor, threads: int = 1, stream: int = 0) -> None: ...
def quantize(
    w: Tensor, levels: Tensor, amax: Tensor | None, importance: Tensor | None, packed: Tensor, absmax: Tensor,
    codebook: Tensor | None, scale: str, threads: int = 1, stream: int = 0, codec: str = "planes",
) -> None: ...  # fmt: skip
def unpack_codes(
    data: Tensor, starts: Tensor, shifts: Tensor | None, out: Tensor, bits: int, order: str = "stream", threads: int = 1
) -> None: ...
def pack_codes(codes: Tensor, out: Tensor, bits: int, threads: int = 1) -> None: ...
def decode_codes(
    data: Tensor, starts: Tensor, shifts: Tensor | None, table: Tensor | None, scale: Tensor, zero: Tensor | None,
    bias: Tensor | None, group_of: Tensor | None, group_size: int, phase: int, out: Tensor, bits: int,
    order: str = "stream", round_each: bool = False, threads: int = 1,
) -> None: ...  # fmt: skip
def feedback(
    w: Tensor, triangle: Tensor, scales: Tensor, levels: Tensor, packed: Tensor, threads: int = 1, stream: int = 0
) -> None: ...
def dequantize(
    packed: Tensor, absmax: Tensor, codebook: Tensor, out: Tensor, threads: int = 1, stream: int = 0,
    codec: str = "planes",
) -> None: ...  # fmt: skip
def stats(
    w: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, out: Tensor, threads: int = 1, stream: int = 0,
    codec: str = "planes",
) -> None: ...  # fmt: skip
def decode_gguf(raw: Tensor, type: int, out: Tensor, threads: int = 1, stream: int = 0) -> None: ...
def linear_gguf(x: Tensor, raw: Tensor, type: int, out: Tensor, threads: int = 1, stream: int = 0) -> None: ...
def linear(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, threads: int = 1,
    codec: str = "planes",
) -> None: ...  # fmt: skip
def tile_shape(rows: int, cols: int, k: int, codec: str = "planes") -> tuple[int, int, int]: ...
def tiled_linear_rows(device: int) -> int: ...
def few_plan(
    k: int, m: int, tiles: int, groups: int, chunks: int, multiprocessors: int, shared_bytes: int,
    clusters: list[int], small_table: bool = False, codec: str = "planes",
) -> dict[str, int]: ...  # fmt: skip
def tiled_workspace_bytes(device: int) -> int: ...
def tiled_staging_bytes(m: int, rows: int, cols: int, device: int) -> int: ...
def repack(
    packed: Tensor, absmax: Tensor, tiles: Tensor, cols: int, inverse: bool, threads: int = 1, stream: int = 0,
    codec: str = "planes",
) -> None: ...  # fmt: skip
def linear_tiles(
    x: Tensor, tiles: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, workspace: Tensor, counters: Tensor,
    offsets: Tensor | None, staging: Tensor | None, stream: int = 0, codec: str = "planes",
) -> None: ...  # fmt: skip
def decode_tiles(tiles: Tensor, codebook: Tensor, out: Tensor, stream: int = 0, codec: str = "planes") -> None: ...

nf4_levels: list[float]
nf4_few_rows: int

def nf4_quantize(w: Tensor, codes: Tensor, scales: Tensor, block: int, threads: int = 1, stream: int = 0) -> None: ...
def nf4_dequantize(
    codes: Tensor, scales: Tensor, out: Tensor, block: int, threads: int = 1, stream: int = 0
) -> None: ...
def nf4_linear(
    x: Tensor, codes: Tensor, scales: Tensor, block: int, bias: Tensor | None, out: Tensor, threads: int = 1,
    stream: int = 0,
) -> None: ...  # fmt: skip
