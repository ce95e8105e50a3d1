"""The verdict on one tensor: what becomes of it, why, and its size before and after."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kbitq.checkpoint.plan.options import QuantizeOptions
from kbitq.checkpoint.source.open import SourceTensor
from kbitq.choose.selection import Selection, TensorRule
from kbitq.codecs.base import coded_entries, for_dtype, rows_together
from kbitq.format import DEFAULT_CODEC, matrix_shape


@dataclass(frozen=True)
class TensorPlan:
    """The verdict on one tensor.

    Attributes:
        name: in the source.
        shape: of the source.
        dtype: of the source, in safetensors' spelling.
        verdict: ``quantized`` or ``kept``.
        reason: for the verdict.
        k: bits of an index; None for a tensor that is kept.
        bytes_in: that are read of the source; decoded ones, where it is in another tool's format.
        bytes_out: in the output, constants included.
        bytes_plain: in the output if it were kept.
        scale: the rule that chooses scales.
        codebook: a name or a file.
        pinned: whether a rule set its K (and codec).
        codec: how it is coded.
        bytes_stored: in the source's files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    verdict: str
    reason: str
    k: int | None
    bytes_in: int
    bytes_out: int
    bytes_plain: int
    scale: str = "mse"
    codebook: str = "optimal"
    pinned: bool = False
    codec: str = DEFAULT_CODEC
    bytes_stored: int = 0

    @property
    def quantized(self) -> bool:
        return self.k is not None

    @property
    def rows_together(self) -> int:
        """Rows of the matrix that are coded together; 1 where a row may be cut, and of a tensor that is kept."""
        return rows_together(self.codec, matrix_shape(self.name, self.shape)[1]) if self.quantized else 1

    def coded(self, codec: str, k: int) -> TensorPlan:
        """The same tensor in another codec, or at another K."""
        codec = for_dtype(codec, self.dtype)
        size = sum(e.nbytes for e in coded_entries(codec, self.name, self.shape, k))
        return replace(self, codec=codec, k=k, bytes_out=size)

    def kept(self, reason: str) -> TensorPlan:
        """The same tensor, copied byte for byte."""
        return replace(self, verdict="kept", reason=reason, k=None, bytes_out=self.bytes_plain)


def plan_tensor(selection: Selection, tensor: SourceTensor, options: QuantizeOptions) -> TensorPlan:
    """What the selection and the options say of one tensor."""
    verdict = selection.verdict(tensor.name, tensor.shape, tensor.dtype)
    rule = verdict.rule or TensorRule("*")
    size = tensor.plain_nbytes
    codec = for_dtype(verdict.codec, tensor.dtype)
    if verdict.k is not None:
        size = sum(e.nbytes for e in coded_entries(codec, tensor.name, tensor.shape, verdict.k))
    return TensorPlan(
        tensor.name,
        tensor.shape,
        tensor.dtype,
        verdict.word,
        verdict.reason,
        verdict.k,
        tensor.nbytes,
        size,
        tensor.plain_nbytes,
        rule.scale or options.scale,
        rule.codebook or options.codebook,
        rule.k is not None,
        codec,
        tensor.file_nbytes,
    )
