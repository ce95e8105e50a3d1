"""How a bound on memory becomes the size of a tile, and back."""

from __future__ import annotations

DEFAULT_TILE_BYTES = 16 << 20
MIN_TILE_BYTES = 64 << 10
TILE_BYTES_PER_THREAD = 2 << 20  # on the CPU: what was read is still in the caches when it is quantized and measured

# Peak use over tile bytes: three buffers read into, the values decoded (float32 of float64, or FP8 with its scales at
# four times the size), and twice the packed words, scale bytes and row statistics (24 bytes a row of 32 and more).
TILES_IN_USE = 15
FIT_BYTES = 96 << 20  # of the 65,536 blocks that a codebook is fitted to, and the sums over them in float64
SPOOL_BYTES = 2 << 30  # of a source that is read over the network, kept on the disk between the two passes over it
FEEDBACK_ELEMENTS = 1 << 24  # of a tile that gets error feedback: it walks over all columns, so few tiles are quicker
FEEDBACK_ELEMENTS_ON_GPU = 1 << 26  # without a bound; of the host's memory they take less than others on the CPU
FEEDBACK_ELEMENT_BYTES = 40  # three buffers read into, what is left of the weights, one copy, decoded values, parts
BYTES_PER_TENSOR = 8192  # plan, layout, metadata and ledger of one tensor


def tile_bytes(max_memory: int | None, threads: int | None = None) -> int:
    """Bytes of a tile for a bound on what a run uses beyond the interpreter with torch; None: the default tile.

    ``threads``: how many the CPU computes with; None where a GPU does, which wants large tiles.
    """
    best = DEFAULT_TILE_BYTES if threads is None else min(DEFAULT_TILE_BYTES, TILE_BYTES_PER_THREAD * threads)
    return best if max_memory is None else max(MIN_TILE_BYTES, min(best, max_memory // TILES_IN_USE))


def peak_memory(
    max_memory: int | None, tensors: int, fitting: bool = False, feedback: int = 0, least_tile: int = 0, held: int = 0
) -> int:
    """Estimate of the most memory a run uses beyond the interpreter with torch: tiles, and what is known of tensors.

    ``fitting``: whether it fits codebooks. ``feedback``: ``feedback_bytes`` of the tensor with the most.
    ``least_tile``: bytes of rows that a codec codes together. ``held``: bytes that are held of a whole tensor.
    """
    tiles = TILES_IN_USE * max(tile_bytes(max_memory), least_tile)
    return tiles + BYTES_PER_TENSOR * tensors + FIT_BYTES * fitting + feedback + held


def factor_bytes(columns: int, block: int | None = None) -> int:
    """Bytes while an H of so many columns is factorised, of which only blocks on the diagonal may be kept: it and its
    factor in float32, three matrices of float64 of a block."""
    return 8 * columns**2 + 24 * min(columns, block or columns) ** 2


def feedback_bytes(max_memory: int | None, inputs: int, whole: int | None = None, block: int | None = None) -> int:
    """Bytes of error feedback in a tensor: with an H of so many inputs (in blocks), and a tile.

    ``whole``: elements of a transposed matrix, which is one tile; None of another.
    """
    elements = feedback_elements(max_memory, inputs, block) if whole is None else whole
    return factor_bytes(inputs, block) + FEEDBACK_ELEMENT_BYTES * elements


def feedback_elements(max_memory: int | None, columns: int, block: int | None = None, *, on_gpu: bool = False) -> int:
    """Elements of a tile that gets error feedback, within what a bound leaves beside the factor; at least a row."""
    if max_memory is None:
        return FEEDBACK_ELEMENTS_ON_GPU if on_gpu else FEEDBACK_ELEMENTS
    left = (max_memory - factor_bytes(columns, block)) // FEEDBACK_ELEMENT_BYTES
    return max(columns, min(FEEDBACK_ELEMENTS, left))
