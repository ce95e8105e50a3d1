"""NVFP4 as ModelOpt stores it: ``weight`` uint8 ``[out, in / 2]`` with ``weight_scale`` and ``weight_scale_2``.

Scales are FP8, one for 16 columns, and a float32 for the tensor. The weight is ``E2M1 * (weight_scale *
weight_scale_2)`` in the model's dtype; the low half of a byte comes first.
"""

from __future__ import annotations

from kbitq.format import element_count
from kbitq.formats.base import Catalogue, Found
from kbitq.formats.row_codes import RowCodes
from kbitq.formats.scales import Scales

_GROUP = 16
_FACTOR = "weight_scale_2"


def recognise(catalogue: Catalogue) -> Found:
    """Weights of ModelOpt's NVFP4. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for stem, factor in catalogue.ending(_FACTOR):
        codes = catalogue.tensors.get(stem + "weight")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            continue
        shape = (codes.shape[0], 2 * codes.shape[1])
        if shape[1] % _GROUP:
            raise catalogue.broken(codes.name, f"{shape[1]} columns are not groups of {_GROUP}")
        if element_count(catalogue.want(factor.name, ("F32",)).shape) != 1:
            raise catalogue.broken(factor.name, "it should have one element")
        if stem + "pre_quant_scale" in catalogue.tensors:
            raise catalogue.refused("has scales of activations folded out of its weights (pre_quant_scale)")
        scale = catalogue.want(stem + "weight_scale", ("F8_E4M3",), (shape[0], shape[1] // _GROUP))
        parts = (codes.name, scale.name, factor.name)
        of = Scales(scale.name, 1, _GROUP, factor=factor.name)
        found.weights.append(
            RowCodes(codes.name, shape, catalogue.float_dtype, "ModelOpt, NVFP4", parts, 4, of, table="e2m1_one_zero")
        )
        if stem + "input_scale" in catalogue.tensors:
            found.dropped[stem + "input_scale"] = f"activation scale of the quantized form of {codes.name}"
    return found
