"""How the tensors of a quantized checkpoint reach the parameters of a model: what becomes packed, what is decoded.

transformers renames, merges and splits tensors between files and models. Every packed tensor takes the way that its
dense source would have taken, found with transformers' own functions on the model as it was built, and then either

* its module becomes a packed one, and its parts load under their own names (``Routes.direct``);
* or it is one of the parts that are merged into a stack of experts, and the stack becomes packed (``Routes.merged``);
* or it is decoded on load, where the module has no packed class or a conversion works on values (``Routes.dense``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from kbitq import format as fmt
from kbitq.codecs.base import part_kinds, part_name, part_names
from kbitq.errors import FormatError
from kbitq.integrations.transformers.conversions import (
    GUARD_ROUTE,
    Coded,
    ConstantsByGroup,
    DecodeOnLoad,
    ExactConverter,
    ExactRenaming,
    PlaceDecoded,
)
from kbitq.integrations.transformers.manifest import Manifest
from kbitq.nn import KbitEmbedding, KbitExperts, KbitLinear, pack_experts, share_weight
from kbitq.nn.packed import PackedMatrix, WeightInfo


@dataclass
class Target:
    """A parameter of the model, and the packed tensors that it is made of."""

    name: str
    sources: list[tuple[str, str | None]] = field(default_factory=list)  # (name in the files, source pattern)
    converter: WeightConverter | None = None


@dataclass
class Routes:
    """The ways of all packed tensors into one model."""

    direct: dict[str, str] = field(default_factory=dict)  # target -> name in the files
    merged: dict[str, Target] = field(default_factory=dict)
    dense: dict[str, Target] = field(default_factory=dict)
    guard: str | None = None


def find_routes(model: nn.Module, manifest: Manifest, *, decode: bool) -> Routes:
    """Find the way of every packed tensor, on a model as it was built (on the meta device, nothing replaced).

    Args:
        model: a transformers model.
        manifest: of its checkpoint.
        decode: decode everything.
    """
    routes = Routes(guard=manifest.guard)
    for target in _targets(model, manifest).values():
        metas = [manifest.quantized[name] for name, _ in target.sources]
        if decode:
            routes.dense[target.name] = target
        elif target.converter is None and _has_packed_class(model, target, metas[0].shape):
            routes.direct[target.name] = target.sources[0][0]
        elif target.converter is not None and _is_merge_of_experts(model, target, metas):
            routes.merged[target.name] = target
        else:
            routes.dense[target.name] = target
    return routes


def pack_model(model: nn.Module, routes: Routes, manifest: Manifest) -> None:
    """Replace the modules that the routes lead to by packed ones, uninitialised, on the device they are on."""
    for target, source in routes.direct.items():
        replace_module(model, target, manifest.quantized[source].k, manifest.codec_of(source))
    for stack in routes.merged.values():
        prefix, _, leaf = stack.name.rpartition(".")
        meta = manifest.quantized[stack.sources[0][0]]
        pack_experts(model.get_submodule(prefix), {leaf: (meta.k, len(_patterns(stack.converter)))}, meta.codec)
    describe(model, routes, manifest)


def describe(model: nn.Module, routes: Routes, manifest: Manifest) -> None:
    """Tell the packed modules what the files say of their weights."""
    for target, source in routes.direct.items():
        prefix, _, leaf = target.rpartition(".")
        remember(model.get_submodule(prefix), leaf, WeightInfo.described(manifest.quantized[source]))


def remember(module: nn.Module, leaf: str, info: WeightInfo) -> None:
    """Let a packed module know what is known of its weight ``leaf``."""
    if isinstance(module, KbitExperts):
        module.info[leaf] = info
    elif isinstance(module, PackedMatrix):
        module.info = info


def replace_module(model: nn.Module, target: str, k: int, codec: str) -> nn.Module:
    """Replace the module that owns the parameter ``target``, and those tied to it, by packed ones.

    Args:
        model: any module.
        target: full name of the parameter.
        k: bits of an index.
        codec: how the weight is coded.

    Returns:
        The packed module, uninitialised.
    """
    prefix, _, leaf = target.rpartition(".")
    module = model.get_submodule(prefix)
    if type(module) not in (nn.Linear, nn.Embedding):
        return pack_experts(module, {leaf: (k, 0)}, codec)
    made = packed_like(module, k, codec)
    model.set_submodule(prefix, made)
    retie(model, target, made)
    return made


def packed_like(module: nn.Module, k: int, codec: str) -> KbitLinear | KbitEmbedding:
    """An uninitialised packed layer in place of a linear or an embedding layer; the bias is the same parameter."""
    weight: Any = module.weight
    options: Any = {"device": weight.device, "dtype": weight.dtype, "codec": codec}
    made: KbitLinear | KbitEmbedding
    if isinstance(module, nn.Linear):
        sizes = (module.in_features, module.out_features)
        made = KbitLinear(*sizes, k, bias=False, **options)
        made.register_parameter("bias", module.bias)
    elif isinstance(module, nn.Embedding):
        sizes = (module.num_embeddings, module.embedding_dim)
        made = KbitEmbedding(*sizes, k, module.padding_idx, **options)
    return made.train(module.training)


def share_with_tied(model: Any, source: str, codec: str) -> None:
    """Give the packed weights that are tied to ``source``, which is coded so, its very parameters."""
    parts = part_names(codec, source).values()
    for target, origin in model.all_tied_weights_keys.items():
        if origin in parts:
            prefix, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(prefix), leaf, model.get_parameter(origin))


def retie(model: Any, source: str, layer: PackedMatrix) -> None:
    """Where the model ties other weights to ``source``, which ``layer`` holds now, tie their packed parts instead."""
    ties: dict[str, str] = model.all_tied_weights_keys
    partners = [t for t, s in ties.items() if s == source] + [s for t, s in ties.items() if t == source]
    for partner in partners:
        prefix = partner.rpartition(".")[0]
        module = model.get_submodule(prefix)
        if type(module) in (nn.Linear, nn.Embedding):
            made = packed_like(module, layer.k, layer.info.codec)
            share_weight(layer, made)
            model.set_submodule(prefix, made)
    for target, origin in list(ties.items()):
        if source in (target, origin):
            del ties[target]
            ties.update((part_name(target, part), part_name(origin, part)) for part in layer.parts)
    if partners:
        model._tied_weights_keys = dict(ties)


def conversions(routes: Routes, manifest: Manifest, given: Sequence[Any]) -> list[Any]:
    """The loader's conversions: ours for packed tensors, put before the model's own."""
    renamings = [c for c in given if isinstance(c, WeightRenaming)]
    made: list[Any] = []
    decoded = {name for target in routes.dense.values() for name, _ in target.sources}
    if routes.guard is not None and routes.guard not in decoded:
        made.append(ExactRenaming({routes.guard: GUARD_ROUTE}))
    for number, targets in enumerate(_by_converter(routes.merged.values(), manifest)):
        codec = manifest.codec_of(targets[0].sources[0][0])
        made += [_merge(codec, part, targets, number, renamings) for part in part_kinds(codec)]
    for number, targets in enumerate(_by_converter(routes.dense.values(), manifest)):
        made.append(_decoder(targets, manifest, number, renamings))
    return made + list(given)


def conversions_for_saving(used: Iterable[Any]) -> list[Any]:
    """What to undo when saving. Merges of packed stacks come last: reversed, they are tried first."""
    kept = [c for c in used if not isinstance(c, ExactRenaming) and getattr(c, "reverse", c) is not None]
    return sorted(kept, key=lambda c: isinstance(c, ExactConverter) and not c.decodes)


def merged_conversions(converter: WeightConverter, codec: str) -> list[ExactConverter]:
    """The conversions of the parts of a packed stack, given the model's conversion of the dense one (for saving)."""
    return [_merge(codec, part, [Target("", [], converter)], 0, []) for part in part_kinds(codec)]


# --- finding ---------------------------------------------------------------------------------------


def _targets(model: Any, manifest: Manifest) -> dict[str, Target]:
    given = get_model_conversion_mapping(model)
    renamings = [c for c in given if isinstance(c, WeightRenaming)]
    converters = [c for c in given if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    targets: dict[str, Target] = {}
    for name in manifest.quantized:
        found, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if found in state:
            target = targets.setdefault(found, Target(found, converter=by_pattern.get(str(pattern))))
            target.sources.append((name, pattern))
    merged = {t.name for t in targets.values() if t.converter is not None}
    for name in manifest.plain if merged else ():
        found, _ = rename_source_key(name, renamings, converters, prefix, state)
        if found in merged and name != manifest.guard:
            raise FormatError(
                f"tensor {name}: it is merged with quantized ones into {found}, but is not quantized itself",
                hint="quantize all experts of a layer or none",
                remedy="all-experts",
            )
    return targets


def _has_packed_class(model: Any, target: Target, shape: Sequence[int]) -> bool:
    module = model.get_submodule(target.name.rpartition(".")[0])
    if tuple(model.get_parameter_or_buffer(target.name).shape) != tuple(shape):
        return False
    if has_packed_class(module):
        return len(shape) == 2
    return all(fmt.is_fused_experts(name, shape) for name in (target.name, target.sources[0][0]))


def has_packed_class(module: nn.Module) -> bool:
    """Whether there is a packed layer that computes the same as this one: exact classes only, a subclass may differ."""
    return type(module) is nn.Linear or (type(module) is nn.Embedding and module.max_norm is None)


def _is_merge_of_experts(model: Any, target: Target, metas: Sequence[fmt.TensorMeta]) -> bool:
    """Whether the parts are stacked, and perhaps concatenated by rows, and agree in codec, K and shape."""
    shape = tuple(model.get_parameter_or_buffer(target.name).shape)
    parts = len(_patterns(target.converter))
    alike = len({(m.codec, m.k, m.shape) for m in metas}) == 1 and len(metas) == shape[0] * parts
    return (
        stacks_rows(target.converter) and alike and fmt.is_fused_experts(target.name, shape) and shape[1] % parts == 0
    )


def stacks_rows(converter: Any) -> bool:
    """Whether a conversion only stacks matrices, and at most concatenates the stacks by the matrices' rows."""
    operations = getattr(converter, "operations", ())
    types, dims = [type(op) for op in operations], [getattr(op, "dim", None) for op in operations]
    return (types, dims) in (([MergeModulelist], [0]), ([MergeModulelist, Concatenate], [0, 1]))


def _patterns(converter: WeightConverter | None) -> list[str]:
    return list(converter._original_source_patterns) if converter is not None else []


# --- conversions -----------------------------------------------------------------------------------


def _by_converter(targets: Iterable[Target], manifest: Manifest) -> list[list[Target]]:
    """Targets of one conversion and one codec."""
    groups: dict[tuple[int, str], list[Target]] = {}
    for target in targets:
        codecs = sorted({manifest.codec_of(name) for name, _ in target.sources})
        if len(codecs) > 1:
            raise FormatError(
                f"tensor {target.name}: it is merged from tensors of the codecs {' and '.join(codecs)}",
                hint="quantize all experts of a layer with one codec",
            )
        groups.setdefault((id(target.converter), codecs[0]), []).append(target)
    return list(groups.values())


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _merge(codec: str, part: str, targets: Sequence[Target], number: int, renamings: Sequence[Any]) -> ExactConverter:
    """The model's merge of dense experts, for one of the parts of packed ones."""
    converter = targets[0].converter
    assert converter is not None
    patterns = _patterns(converter)
    operations: list[ConversionOps] = list(converter.operations)
    if part_kinds(codec)[part]:
        operations.append(ConstantsByGroup(len(patterns)))
    goal = part_name(converter._original_target_patterns[0].removesuffix("$"), part)
    sources = [part_name(p.removesuffix("$"), part) for p in patterns]
    reverse = WeightConverter([goal], list(sources), [op.reverse_op for op in operations[::-1]])
    reverse.scope_prefix, reverse.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    # Patterns say which tensors belong together, and must not be those of another conversion.
    unique = {p: f"kbitq{number}:{s}" for p, s in zip(converter.source_patterns, sources, strict=True)}
    table = {
        _renamed(part_name(name, part), renamings): (part_name(target.name, part), unique[str(pattern)])
        for target in targets
        for name, pattern in target.sources
    }
    return ExactConverter(list(unique.values()), [goal], operations, table, reverse, decodes=False)


def _decoder(targets: Sequence[Target], manifest: Manifest, number: int, renamings: Sequence[Any]) -> ExactConverter:
    converter, parts = targets[0].converter, list(manifest.parts_of(targets[0].sources[0][0]))
    stems = {p: f"kbitq-decoded{number}:{p}" for p in (converter.source_patterns if converter else ["tensor"])}
    table: dict[str, tuple[str, str]] = {}
    coded: dict[tuple[str, str], Coded] = {}
    for target in targets:
        for name, pattern in target.sources:
            stem = stems[pattern or "tensor"]
            coded[target.name, stem] = Coded(manifest.codec_of(name), tuple(manifest.quantized[name].shape))
            for part, in_file in manifest.parts_of(name).items():
                table[_renamed(in_file, renamings)] = (target.name, part_name(stem, part))
            if name == manifest.guard:  # it bears the name of a parameter here, so it comes along and is dropped
                table[_renamed(name, renamings)] = (target.name, f"{GUARD_ROUTE}{number}")
    # Stems are patterns too, for the model's operations that follow look their inputs up by pattern.
    patterns = [name for stem in stems.values() for name in (stem, *(part_name(stem, part) for part in parts))]
    patterns.append(f"{GUARD_ROUTE}{number}")
    if converter is None:
        return ExactConverter(patterns, ["tensor"], [DecodeOnLoad(coded), PlaceDecoded()], table, decodes=True)
    operations, goals = [DecodeOnLoad(coded), *converter.operations], list(converter._original_target_patterns)
    return ExactConverter(patterns, goals, operations, table, converter.reverse_transform(), decodes=True)
