"""Layers whose weights stay packed, and the functions that put them into a model."""

from kbitq.nn.embedding import KbitEmbedding
from kbitq.nn.experts import ExpertStack, KbitExperts, pack_experts
from kbitq.nn.linear import KbitLinear
from kbitq.nn.replace import dequantize_modules, replace_linears, share_weight
from kbitq.nn.tiled import tile_weights

__all__ = [
    "ExpertStack",
    "KbitEmbedding",
    "KbitExperts",
    "KbitLinear",
    "dequantize_modules",
    "pack_experts",
    "replace_linears",
    "share_weight",
    "tile_weights",
]
