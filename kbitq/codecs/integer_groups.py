"""What the formats of integers share: a symmetric grid, a scale for a group of columns or a row, and how to choose it.

``weight = code * scale``, code from -2^(K-1) to 2^(K-1) - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kbitq.codecs.base import Request
from kbitq.codecs.outputs import DTYPES, WHOLE_ROW, Output

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHRINKS = tuple(1 - 0.03 * i for i in range(14))
"""What ``mse`` multiplies the largest magnitude of a group by; the best of them is kept."""

_IN_CACHE = 1 << 17  # values that a thread works on at once: with their copy one megabyte


class IntegerGroups(Output):
    """A codec of integers. Subclasses say parts, how codes and scales become parts, and the reverse."""

    group: int | None
    takes = frozenset(("importance", "calibration"))

    def __init__(self, name: str, group: int | None, dtype: str, ks: Sequence[int]) -> None:
        self.name, self.group, self.dtype, self.ks = name, group, dtype, ks
        self.cut = WHOLE_ROW if group is None else group

    def assemble(self, codes: Tensor, scale: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of codes (float32 ``[rows, cols]``, whole numbers) and scales ``[rows, groups]`` as stored.

        Every subclass defines it.
        """
        raise NotImplementedError  # abstract: the layout of a format

    def take_apart(self, parts: Mapping[str, Tensor], cols: int) -> tuple[Tensor, Tensor]:
        """Codes, float32 ``[rows, cols]``, and scales as stored: ``[rows, groups]``. Every subclass defines it."""
        raise NotImplementedError  # abstract: the layout of a format

    def encode_rows(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        """The parts of whole rows, or of whole groups."""
        scale = self.scales(w, request)
        groups = w.float().view(scale.numel(), -1)
        codes = self.codes(groups, scale.view(-1, 1).float(), request.k).view(w.shape)
        return self.assemble(codes, scale, request)

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """``code * scale``, rounded to the dtype of the scales as readers do, then to ``dtype``."""
        import torch

        codes, scale = self.take_apart(parts, cols)
        groups = codes.view(scale.numel(), -1) * scale.reshape(-1, 1).float()
        values = groups.view(-1, cols).to(getattr(torch, DTYPES[self.dtype])).to(dtype)
        return values if out is None else out.copy_(values)

    def most(self, k: int) -> float:
        """The code that the largest magnitude of a group gets where nothing is cut off."""
        return (1 << k - 1) - 1

    def codes(self, groups: Tensor, scale: Tensor, k: int) -> Tensor:
        """The nearest codes, float32."""
        return self.round_(groups / scale, k)

    def round_(self, values: Tensor, k: int) -> Tensor:
        """Values in units of their scale become the nearest codes; which sign a zero has does not count."""
        return values.round_().clamp_(-(1 << k - 1), (1 << k - 1) - 1)

    def scales(self, w: Tensor, request: Request) -> Tensor:
        """One scale a group ``[rows, groups]`` in the dtype that is stored, of least squared error for ``mse``.

        With importance, of least error weighted by it.
        """
        weights = request.importance
        if weights is None:
            return self.best_scales(w.float().reshape(-1, self.group or w.shape[1]), request).view(w.shape[0], -1)
        sharing, width = len(w) // len(weights), self.group or w.shape[1]
        weights = weights.repeat_interleave(sharing, 0) if len(weights) > 1 else weights.expand(len(w), -1)
        groups, weighted = w.float().reshape(-1, width), weights.reshape(-1, width)
        return self.best_scales(groups, request, weighted).view(w.shape[0], -1)

    def best_scales(self, groups: Tensor, request: Request, weights: Tensor | None = None) -> Tensor:
        """The scale of each of ``groups`` ``[n, values]``, ``[n, 1]`` as stored; ``weights`` of the same shape."""
        import torch

        threads = torch.get_num_threads()
        # A piece has a group for each thread: torch would cut the sum of a single one, and round otherwise.
        pieces = max(1, min(len(groups) // threads, groups.numel() // (_IN_CACHE * threads)))
        weighted = [None] * pieces if weights is None else weights.tensor_split(pieces)
        found = zip(groups.tensor_split(pieces), weighted, strict=True)
        return torch.cat([self._best_of_piece(piece, request, its) for piece, its in found]).view(-1, 1)

    def _best_of_piece(self, groups: Tensor, request: Request, weights: Tensor | None) -> Tensor:
        """The scales of groups that stay in the cache while all candidates are tried, ``[n]``."""
        import torch

        dtype = getattr(torch, DTYPES[self.dtype])
        # A scale that rounds to 0, or to infinity, would lose the group.
        least, large = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        amax = groups.abs().amax(1) / self.most(request.k)
        shrinks = torch.tensor(SHRINKS if request.scale == "mse" else SHRINKS[:1], device=groups.device)
        scales = torch.where(amax > 0, (amax * shrinks[:, None]).clamp(least, large), 1.0).to(dtype)
        errors, tried = torch.empty(scales.shape, device=groups.device), torch.empty_like(groups)
        for scale, error in zip(scales.float().unsqueeze(-1), errors, strict=True):
            self.round_(torch.div(groups, scale, out=tried), request.k).mul_(scale).sub_(groups).square_()
            torch.sum(tried if weights is None else tried.mul_(weights), 1, out=error)
        best, at = errors.nan_to_num_(nan=float("inf"), posinf=float("inf")).min(0)
        return torch.where(best < float("inf"), scales.gather(0, at[None])[0], 1.0)
