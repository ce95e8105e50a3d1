"""A pass over the source for codecs whose parts have sizes that depend on the values, before anything is laid out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs.base import get_codec, output_codec


def settled(plan: Plan, reader: TileReader, meter: ProgressMeter) -> Plan:
    """The plan with the codec of each tensor as its values make it; the same plan where they make no difference.

    What was found is not kept in the journal: a run that is taken up finds it again.
    """
    if not plan.settles:
        return plan
    codings = {}
    for tensor in plan.tensors:
        codec = output_codec(tensor.codec) if tensor.k is not None else None
        if codec is not None and (name := codec.settle(_values(plan, reader, tensor))) is not None:
            codings[tensor.name] = name, tensor.k or 0
            meter.add(tensor.bytes_in, tensor.name)
    return plan.with_codings(codings, plan.choice)


def _values(plan: Plan, reader: TileReader, tensor: TensorPlan) -> Iterator[torch.Tensor]:
    source = plan.checkpoint.tensors[tensor.name]
    return (reader.read(source, span) for span in reader.spans(source, cut=get_codec(tensor.codec).cut))
