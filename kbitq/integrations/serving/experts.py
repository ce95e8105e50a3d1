"""The experts of a layer of a server: parts that arrive expert by expert or as a stack, and products with all of them.

Neighbouring experts of one codec and K make a stack; usually that is all of them, gate and up together. On a GPU with
grouped kernels a stack is one launch, whichever experts the tokens go to: nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kbitq.codecs.base import Coding, constant_dims, get_codec, part_kinds
from kbitq.errors import FormatError
from kbitq.integrations.serving.matrix import Arriving, Matrix, decoded, merged
from kbitq.ops import register, tiled_linear

Activation = Callable[[Tensor], Tensor]

FIRST, SECOND = ("w1", "w3"), "w2"
"""Gate and up, which are fused (models without a gate have the first alone), and down."""


class ArrivingExperts:
    """What has arrived of this device's experts.

    Args:
        where: the layer, for messages.
        count: experts of this device.
        hidden: columns of gate and up, rows of down.
        inner: rows of gate and up on this device, and columns of down.
        parts: those of a device that an expert is cut into, along ``inner``.
        codecs: the weights are of these.
    """

    def __init__(self, where: str, count: int, hidden: int, inner: int, parts: int, codecs: Sequence[str]) -> None:
        self.where, self.count, self.codecs = where, count, codecs
        self.hidden, self.inner, self.parts = hidden, inner, parts
        self.matrices: dict[tuple[str, int], Arriving] = {}
        self.constants: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.global_ids: dict[int, int] = {}

    def take(
        self, part: str, shard: str, ids: tuple[int, int], tensor: Tensor, rank: int, device: torch.device
    ) -> bool:
        """Keep a part of one expert's matrix.

        Args:
            part: its name.
            shard: ``w1``, ``w2`` or ``w3``.
            ids: of the expert, in the model and on this device (negative: it is another's).
            tensor: the part.
            rank: which of the parts along ``inner`` is this device's.
            device: to keep it on.

        Returns:
            Whether this device has use for it.
        """
        model_wide, local = ids
        if any(part_kinds(codec).get(part) for codec in self.codecs):
            self.constants.setdefault((part, shard), {})[model_wide] = tensor.detach().to(device, copy=True)
            return True
        if local < 0:
            return False
        self.global_ids[local] = model_wide
        mine = self.matrices.setdefault((shard, local), self._arriving(shard, local))
        if shard == SECOND:
            mine.cut(rank, self.inner)
        elif tensor.shape[0] != self.inner:
            tensor = tensor.narrow(0, rank * self.inner, self.inner)
        mine.take(part, tensor, device)
        return True

    def make_up(self, coding: Coding, gated: bool, rank: int, device: torch.device) -> None:
        """Take what means nothing for all experts, coded so, as if it had arrived."""
        for local in range(self.count):
            for shard in (FIRST[0], *(FIRST[1:] if gated else ()), SECOND):
                mine = self.matrices.setdefault((shard, local), self._arriving(shard, local))
                self.global_ids[local] = local
                if shard == SECOND:
                    mine.cut(rank, self.inner)
                mine.make_up(coding, torch.float32, device)

    def _arriving(self, shard: str, local: int) -> Arriving:
        where = f"{self.where}: {shard} of expert {local}"
        if shard == SECOND:
            return Arriving(where, self.hidden, self.inner * self.parts, self.codecs)
        return Arriving(where, self.inner, self.hidden, self.codecs)

    def finished(self, dtype: torch.dtype) -> list[list[Matrix]]:
        """For each expert its matrices: those of :data:`FIRST` there are, then :data:`SECOND`.

        Raises:
            FormatError: parts are missing or do not fit.
            ValueError: a matrix cannot be cut for this device.
        """
        shards = [shard for shard in (*FIRST, SECOND) if any(key[0] == shard for key in self.matrices)]
        return [[self._finished(shard, local, dtype) for shard in shards] for local in range(self.count)]

    def _finished(self, shard: str, local: int, dtype: torch.dtype) -> Matrix:
        mine = self.matrices.get((shard, local))
        if mine is None:
            raise FormatError(f"{self.where}: the files have no {shard} of expert {local}")
        for (part, of), held in self.constants.items():
            if of == shard:  # one alone is for a whole stack, whatever the server counts it as
                only = next(iter(held.values())) if len(held) == 1 else held.get(self.global_ids[local])
                if only is not None:
                    mine.parts[part] = only
        matrix = mine.finished(dtype)
        assert isinstance(matrix, Matrix)
        return matrix


@dataclass(frozen=True)
class Stack:
    """Matrices ``[rows, cols]`` of experts ``begin`` to ``end``, of one coding.

    Attributes:
        begin: first expert.
        end: the one after the last.
        matrix: of one of them, without parts: codec, K and sizes.
        parts: of all, ``[end - begin, ...]``; empty where there are tiles.
        constants: ``[end - begin, G, ...]``, for the tiles.
        tiles: their tile order, on a GPU.
    """

    begin: int
    end: int
    matrix: Matrix
    parts: dict[str, Tensor]
    constants: Tensor | None = None
    tiles: Tensor | None = None

    @classmethod
    def of(cls, begin: int, matrices: Sequence[Matrix]) -> Stack:
        """Stack matrices of one coding."""
        one, dims = matrices[0], constant_dims(matrices[0].codec)
        parts = {}
        for name in one.parts:
            held = [m.parts[name] for m in matrices]
            parts[name] = torch.stack([h[None] if h.dim() == dims.get(name) else h for h in held])
        empty = Matrix(one.codec, one.k, one.rows, one.cols, {})
        tiles = get_codec(one.codec).tiles(parts, one.cols)
        end = begin + len(matrices)
        if tiles is None:
            return cls(begin, end, empty, parts)
        *_, last = parts.values()
        return cls(begin, end, empty, {}, last.flatten(0, 1), tiles.data)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """``x W^T`` with the matrix of one expert."""
        at, one = expert - self.begin, self.matrix
        if self.tiles is not None and self.constants is not None:
            tiles, books = (t.unflatten(0, (self.end - self.begin, -1))[at] for t in (self.tiles, self.constants))
            return torch.ops.kbitq.linear_tiles(x, tiles, books, None, one.rows, one.codec)
        parts = {name: held[at] for name, held in self.parts.items()}
        if not x.is_cuda:
            return get_codec(one.codec).linear(x, parts, None)
        # Not the codec's `linear`, which may make tiles for this one matrix: it is a new view each time.
        return nn.functional.linear(x, decoded(one.codec, parts, one.cols, x.dtype))

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """``[tokens, rows]``: rows ``offsets[e]`` to ``offsets[e + 1]`` of x by the matrix of expert e; no others."""
        one, mine = self.matrix, offsets[self.begin : self.end + 1]
        return torch.ops.kbitq.grouped_linear_tiles(x, self.tiles, self.constants, mine, one.rows, one.codec)


Projection = list[Stack]
"""A matrix of every expert, in as many stacks as it takes; they follow one another."""


class PackedExperts:
    """The experts of a layer, ready to be multiplied by.

    Args:
        experts: for each its matrices, as :meth:`ArrivingExperts.finished` gives them.
        activation: from what gate and up give, side by side, to what down takes.
        weights_on_input: whether a token is multiplied by its router weight before it, rather than after.
    """

    def __init__(
        self, experts: Sequence[Sequence[Matrix]], activation: Activation, weights_on_input: bool = False
    ) -> None:
        self.count, self.activation, self.weights_on_input = len(experts), activation, weights_on_input
        first = [merged(matrices[:-1]) for matrices in experts]
        if len({tuple((m.codec, m.k, m.rows) for m in own if isinstance(m, Matrix)) for own in first}) > 1:
            first = [list(matrices[:-1]) for matrices in experts]
        self.first = [_projection([own[i] for own in first]) for i in range(len(first[0]))]
        self.second = _projection([matrices[-1] for matrices in experts])

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All tokens through the experts chosen for them.

        Args:
            x: ``[tokens, hidden]``.
            weights: of the experts' outputs, ``[tokens, top_k]``.
            chosen: experts of each token, ``[tokens, top_k]``, as this device counts them; negative: another's.

        Returns:
            ``[tokens, hidden]``.
        """
        if self._takes_groups(x, chosen):
            return self._by_groups(x, weights, chosen)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._all_by_all(x, weights, chosen)
        return self._one_by_one(x, weights, chosen)

    def _takes_groups(self, x: Tensor, chosen: Tensor) -> bool:
        if not x.is_cuda or x.dtype not in tiled_linear.GROUPED_DTYPES:
            return False
        if any(stack.tiles is None for stacks in (*self.first, self.second) for stack in stacks):
            return False
        many = chosen.numel() > self.count * tiled_linear.FUSED_ROWS and not torch.cuda.is_current_stream_capturing()
        return tiled_linear.takes_groups(x.get_device()) and not many

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        hidden = torch.cat([_stack(stacks, expert).multiply(expert, x) for stacks in self.first], -1)
        return _stack(self.second, expert).multiply(expert, self.activation(hidden))

    def _by_groups(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Rows of x sorted by expert, so that each stack is one launch."""
        top_k = chosen.shape[-1]
        flat = chosen.reshape(-1)
        by_expert, order = torch.sort(torch.where(flat < 0, self.count, flat), stable=True)
        ends = torch.arange(self.count + 1, device=x.device, dtype=by_expert.dtype)
        offsets = torch.searchsorted(by_expert, ends, out_int32=True)
        rows = x[order // top_k]
        if self.weights_on_input:
            rows = rows * weights.reshape(-1)[order, None].to(x.dtype)
        hidden = torch.cat([_by_groups(stacks, rows, offsets) for stacks in self.first], -1)
        out = _by_groups(self.second, self.activation(hidden), offsets)
        out = torch.where((by_expert < self.count)[:, None], out, 0)  # of other devices' experts nothing was computed
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        out = out[back].view(*chosen.shape, -1).float()
        return (out if self.weights_on_input else out * weights[..., None]).sum(-2).to(x.dtype)

    def _one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The experts that were chosen, one after the other; the host must know which."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            if expert >= 0:
                token, slot = torch.where(chosen == expert)
                factor = weights[token, slot, None]
                rows = x[token] * factor.to(x.dtype) if self.weights_on_input else x[token]
                own = self._expert(expert, rows).float()
                out.index_add_(0, token, own if self.weights_on_input else own * factor)
        return out.to(x.dtype)

    def _all_by_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every token through every expert, mostly times 0: to record a graph where there are no grouped kernels."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.count):
            here = chosen == expert
            factor = (weights * here).sum(-1, keepdim=True).float()
            if self.weights_on_input:
                own = self._expert(expert, x * factor.to(x.dtype)).float()
                out += torch.where(here.any(-1, keepdim=True), own, 0)
            else:
                out += self._expert(expert, x).float() * factor
        return out.to(x.dtype)


def _projection(matrices: Sequence[Matrix | Tensor]) -> Projection:
    stacks: Projection = []
    run: list[Matrix] = []
    for matrix in [*matrices, None]:
        assert matrix is None or isinstance(matrix, Matrix)
        if run and (matrix is None or (matrix.codec, matrix.k) != (run[0].codec, run[0].k)):
            stacks.append(Stack.of(stacks[-1].end if stacks else 0, run))
            run = []
        if matrix is not None:
            run.append(matrix)
    return stacks


def _stack(stacks: Projection, expert: int) -> Stack:
    return next(stack for stack in stacks if expert < stack.end)


def _by_groups(stacks: Projection, x: Tensor, offsets: Tensor) -> Tensor:
    if len(stacks) == 1:
        return stacks[0].grouped(x, offsets)
    at = torch.arange(x.shape[0], device=x.device)
    out = x.new_zeros((x.shape[0], stacks[0].matrix.rows))
    for stack in stacks:
        here = (at >= offsets[stack.begin]) & (at < offsets[stack.end])
        out = torch.where(here[:, None], stack.grouped(x, offsets), out)
    return out


# --- the operator ----------------------------------------------------------------------------------
# Which experts are asked for is data, so a compiler must not look into the loop over them.

_layers: dict[str, PackedExperts] = {}


def keep(name: str, experts: PackedExperts) -> None:
    """Make experts known to the operator ``torch.ops.kbitq.experts`` under their layer's name."""
    _layers[name] = experts


def _experts(x: Tensor, weights: Tensor, chosen: Tensor, layer: str) -> Tensor:
    return _layers[layer](x, weights, chosen)


def _experts_fake(x: Tensor, weights: Tensor, chosen: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


register("experts(Tensor x, Tensor weights, Tensor chosen, str layer) -> Tensor", _experts, _experts_fake)
