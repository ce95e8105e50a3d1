"""How the GPU kernel for few rows of x cuts a matrix: whatever the card and the shape, the cut covers it and fits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbitq._core import core

KB = 1024
# capability: multiprocessors, shared memory of a block, clusters of 2, 4 and 8 at a time
CARDS = {
    "H200": (132, 227 * KB, [66, 30, 15]),
    "A100": (108, 163 * KB, []),
    "RTX 4090": (128, 99 * KB, []),
    "RTX 5090": (170, 99 * KB, [85, 40, 20]),
    "RTX 3050": (18, 99 * KB, []),
}
CODECS = [("planes", k) for k in (2, 3, 4, 5)] + [(c, k) for c in ("trellis", "trellis/128") for k in (1, 2, 3, 4)]
KS = (2, 3, 4, 5)


def plan_of(card: str, k: int, m: int, tiles: int, groups: int, chunks: int, codec: str = "planes") -> dict[str, int]:
    """As the launcher: where the usual table does not fit, with the smaller one."""
    work = (k, m, tiles, groups, chunks, *CARDS[card])
    plan = core.few_plan(*work, codec=codec)
    return plan if plan["warps"] else core.few_plan(*work, small_table=True, codec=codec)


@given(
    card=st.sampled_from(sorted(CARDS)),
    coded=st.sampled_from(CODECS),
    m=st.integers(1, core.few_rows),
    tiles=st.one_of(st.integers(1, 300), st.integers(1, 20000)),
    groups=st.sampled_from((1, 2, 3, 6, 200)),
    chunks=st.integers(1, 300),
)
def test_every_cut_covers_the_matrix_and_fits(card, coded, m, tiles, groups, chunks):
    codec, k = coded
    plan = plan_of(card, k, m, tiles, groups, chunks, codec)
    multiprocessors, shared, clusters = CARDS[card]
    warps, teams, splits, parts = plan["warps"], plan["teams"], plan["splits"], plan["parts"]
    assert 4 <= warps <= 16
    assert warps % teams == 0
    assert plan["bytes"] <= shared
    assert 1 <= parts <= tiles
    most = math.ceil(tiles / parts)  # row tiles of a part
    side_by_side = warps // teams * splits
    assert (plan["passes"] - 1) * side_by_side < chunks <= plan["passes"] * side_by_side
    assert plan["batch"] >= teams
    assert plan["batch"] % teams == 0
    if plan["total_tiles"]:
        assert plan["total_tiles"] >= most
    else:  # sums go to y as they come
        assert splits == 1
        assert plan["passes"] == 1 or plan["batch"] >= most
    if plan["cluster"]:
        assert splits > 1
        assert clusters
    elif splits > 1:  # through the workspace
        assert not clusters
        assert tiles * groups * core.tile_rows * m * splits <= multiprocessors * core.tiled_workspace_sums
        assert parts * groups <= core.tiled_counters


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_the_whole_card_works(m):
    """Llama's layers on an H200: no multiprocessor has more than a quarter too much to do."""
    for rows, cols in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)):
        plan = plan_of("H200", 3, m, rows // 16, 1, cols // 256)
        tiles = math.ceil(rows // 16 / plan["parts"])
        busiest = plan["passes"] * math.ceil(tiles / plan["teams"]) * plan["warps"]
        assert busiest <= 1.25 * rows / 16 * cols / 256 / 132


def test_what_does_not_fit_is_said():
    """K = 5 with the larger table on a card with 99 KB."""
    assert core.few_plan(5, 1, 64, 1, 16, *CARDS["RTX 4090"])["warps"] == 0
