"""What the parity tests of all codecs share: sources, edges of float32, a comparison of bytes."""

import numpy as np
import torch
from hypothesis import strategies as st

from kbitq.codecs import codebooks

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def normal(rows: int, cols: int, dtype: str = "F32", seed: int = 0) -> torch.Tensor:
    values = np.random.RandomState(seed).standard_normal((rows, cols)).astype(np.float32)
    return torch.from_numpy(values).to(DTYPES[dtype])


def same_bytes(name: str, got: torch.Tensor, want: np.ndarray) -> None:
    """Bit for bit, the message naming the first difference."""
    got = got.cpu().contiguous().numpy()
    assert got.shape == want.shape and got.dtype == want.dtype, (name, got.shape, want.shape, got.dtype, want.dtype)
    word = {1: np.uint8, 4: np.uint32, 8: np.uint64}[want.dtype.itemsize]
    wrong = np.argwhere(got.view(word) != np.ascontiguousarray(want).view(word))
    assert not len(wrong), (
        f"{name}: {len(wrong)} differ, first at {wrong[0]}: {got[tuple(wrong[0])]!r}, not {want[tuple(wrong[0])]!r}"
    )


SPECIAL = [
    "zeros",
    "some zero blocks",
    "denormals",
    "denormal beside ones",
    "one outlier",
    "one huge outlier",
    "exact midpoints",
]


def special(name: str) -> torch.Tensor:
    """Six rows of 75 values each, at the edges of what float32 holds; a number is a factor."""
    w = normal(6, 75, seed=7)
    if name == "zeros":
        return torch.zeros_like(w)
    if name == "some zero blocks":
        w[::2, 32:64] = 0
        w[1] = -0.0
    elif name == "denormals":
        w = w.clamp(-3, 3) * 1e-39
    elif name == "denormal beside ones":
        w[1:3] *= 1e-39
    elif name == "one outlier":
        w[3, 40] = 1e6
    elif name == "one huge outlier":
        w[3, 40] = -3.4e38
    elif name == "exact midpoints":
        levels = torch.from_numpy(codebooks.optimal(3))
        w = ((levels[:-1] + levels[1:]) * 0.5).repeat(75)[: 6 * 75].reshape(6, 75) * 31
        w[:, ::32] = 31
    else:
        w = w.clamp(-3, 3) * float(name)
    return w


@st.composite
def sources(draw: st.DrawFn, most_cols: int) -> tuple[torch.Tensor, str, np.random.RandomState]:
    """A finite matrix of any magnitude with a few arbitrary values, its dtype's name, and a generator for the rest."""
    rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, most_cols))
    dtype, seed = draw(st.sampled_from(list(DTYPES))), draw(st.integers(0, 2**32 - 1))
    rng = np.random.RandomState(seed)
    values = rng.standard_normal((rows, cols)) * 2.0 ** draw(st.integers(-140, 120))
    for _ in range(draw(st.integers(0, 4))):
        values[rng.randint(rows), rng.randint(cols)] = draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
    with np.errstate(over="ignore"):
        w = torch.from_numpy(values.astype(np.float32)).to(DTYPES[dtype])
    return torch.where(torch.isfinite(w), w, torch.ones_like(w)), dtype, rng
