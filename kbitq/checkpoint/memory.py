"""How a bound on memory becomes the size of a tile, and back."""

from __future__ import annotations

DEFAULT_TILE_BYTES = 16 << 20
MIN_TILE_BYTES = 64 << 10

# Peak use over tile bytes: two read-ahead buffers, the values decoded (float32 of float64, or FP8 with its scales at
# four times the size), the packed words, the scale bytes, and row statistics (24 bytes a row, of rows of 32 and more).
TILES_IN_USE = 12
FIT_BYTES = 96 << 20  # of the 65,536 blocks that a codebook is fitted to, and the sums over them in float64
BYTES_PER_TENSOR = 8192  # plan, layout, metadata and ledger of one tensor


def tile_bytes(max_memory: int | None) -> int:
    """Bytes of a tile for a bound on what a run uses beyond the interpreter with torch; None: the default tile."""
    if max_memory is None:
        return DEFAULT_TILE_BYTES
    return max(MIN_TILE_BYTES, min(DEFAULT_TILE_BYTES, max_memory // TILES_IN_USE))


def peak_memory(max_memory: int | None, tensors: int, fitting: bool = False) -> int:
    """Estimate of the most memory a run uses beyond the interpreter with torch: tiles, and what is known of tensors.

    ``fitting``: whether it fits codebooks.
    """
    return TILES_IN_USE * tile_bytes(max_memory) + BYTES_PER_TENSOR * tensors + FIT_BYTES * fitting
