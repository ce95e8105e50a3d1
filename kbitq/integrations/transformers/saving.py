"""A packed model back to files: its tensors' names and descriptions there, for transformers' writer and for ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from kbitq import format as fmt
from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.layout import DEFAULT_SHARD_BYTES, Group, Shard, index_json, index_name, lay_out
from kbitq.codecs.base import coded_entries, part_name, part_names
from kbitq.errors import CheckpointError
from kbitq.integrations.transformers.manifest import Manifest, meta_of
from kbitq.integrations.transformers.routes import conversions_for_saving, merged_conversions, stacks_rows
from kbitq.nn import KbitExperts
from kbitq.nn.packed import PackedMatrix
from kbitq.ops.dtypes import STORED_NAMES

_STEM = "model"


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, max_shard_size: int | None = None) -> None:
    """Save a packed transformers model as ``kbitq quantize`` writes it.

    The weight files of a model that was loaded and not changed come out byte for byte as they were. transformers'
    ``save_pretrained`` keeps every tensor's bytes, but lays files out its own way and repeats the metadata in each.

    Args:
        model: with packed weights, however they came about.
        folder: made if needed; files in it are replaced.
        max_shard_size: bytes of data in a file; None keeps the division into files that the model was loaded with.

    Raises:
        CheckpointError: the model has no packed weight, is partly on disk, or the folder cannot be written.
    """
    target = Path(folder)
    tensors = _in_files(model, _without_ties(model))
    meta = describe_files(model, tensors)
    if not meta.tensors:
        raise CheckpointError(f"{target}: the model has no weight quantized by kbitq")
    if offloaded := next((n for n, t in tensors.items() if t.device.type == "meta"), None):
        raise CheckpointError(
            f"{target}: tensor {offloaded} is offloaded", hint="load the model without an offload folder"
        )
    target.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, meta, _manifest(model), max_shard_size)
    for shard in shards:
        _write(target, shard, tensors)
    stem = shards[0].name.split("-0")[0].removesuffix(".safetensors")
    if len(shards) > 1:
        (target / index_name(stem)).write_text(index_json(shards))
    _save_config(model, target, fmt.build_quantization_config(meta.tensors, _not_converted(tensors, meta)))


def finish_on_the_fly(model: Any, described: Mapping[str, fmt.TensorMeta], kept: Mapping[str, str]) -> Manifest:
    """After quantizing while loading: what a file would have said of the tensors.

    Packed stacks will be taken apart on saving, as the dense ones would have been.

    Args:
        model: as it was loaded.
        described: what is said of each tensor that was quantized.
        kept: why others were not.
    """
    used = list(model._weight_conversions)
    merges = [c for c in used if isinstance(c, WeightConverter) and stacks_rows(c)]
    stacks = [(m, name) for m in model.modules() if isinstance(m, KbitExperts) for name in m.packed_names()]
    ours = {}  # of one name where codecs have parts of one name
    for codec in sorted({module.codec_of(name) for module, name in stacks}):
        ours.update({tuple(c.source_patterns): c for merge in merges for c in merged_conversions(merge, codec)})
    model._weight_conversions = conversions_for_saving([*used, *ours.values()])
    return Manifest(quantized=dict(described), kept=dict(kept))


def state_for_transformers(model: Any, config: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict that ``save_pretrained`` gets, guard included, and the metadata; brings ``config`` up to date."""
    state = model.state_dict()
    origin = {n: _like(t) for n, t in _without_ties(model).items()}
    files = _in_files(model, origin)
    meta = describe_files(model, files)
    if not meta.tensors:
        return state, {}
    config.update_stored(fmt.build_quantization_config(meta.tensors, _not_converted(files, meta)))
    guard = fmt.guard_name({n: m.shape for n, m in meta.tensors.items()})
    if guard is not None:
        end = _first_part(meta.tensors[guard].codec, "")
        first = files[guard + end]
        # Under its name in the model, which transformers translates; a part of a stack has none there.
        inside = next((n.removesuffix(end) for n, t in origin.items() if t is first), guard)
        state[inside] = torch.empty(fmt.GUARD_SHAPE)
    return state, {fmt.METADATA_KEY: meta.to_json()}


def guard_config_file(folder: str | os.PathLike[str], weights: str | None = None) -> None:
    """Put the guard into the config.json of a folder with packed weights, where transformers wrote it.

    Args:
        folder: without a config.json, or with that of another model, it is left as it is.
        weights: file of the weights, if it has not the usual name.
    """
    path = Path(folder) / fmt.CONFIG_FILE
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    quantization = config.get(fmt.CONFIG_KEY) or {}
    if quantization.get("quant_method") != fmt.QUANT_METHOD or "format_version" not in quantization:
        return
    ordinary = {**fmt.unguarded_config(config), **({fmt.GUARD_KEY: weights} if weights is not None else {})}
    made = fmt.guarded_config(ordinary, quantization)
    path.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n", "utf-8")


def describe_files(model: nn.Module, files: Mapping[str, Tensor]) -> fmt.ShardMeta:
    """The metadata of a model's files, given their tensors by name (values do not matter)."""
    manifest = _manifest(model)
    known = {_first_part(meta.codec, name): (name, meta) for name, meta in _descriptions(model)}
    tensors = dict(known[part] for part in files if part in known)
    return fmt.ShardMeta(tensors, {n: r for n, r in manifest.kept.items() if n in files})


# --- the model's tensors as the files have them ----------------------------------------------------


def _manifest(model: nn.Module) -> Manifest:
    return getattr(model, "kbitq_manifest", None) or Manifest()


def _first_part(codec: str, name: str) -> str:
    """Name in the files of the first part of a packed tensor, which stands for all of it here."""
    return next(iter(part_names(codec, name).values()))


def _parts_in_files(tensors: Mapping[str, fmt.TensorMeta]) -> set[str]:
    """Names in the files of all parts of packed tensors."""
    return {part for name, meta in tensors.items() for part in part_names(meta.codec, name).values()}


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _without_ties(model: Any) -> dict[str, Tensor]:
    return remove_tied_weights_from_state_dict(model.state_dict(), model)


def _in_files(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under their names in files; stacks are taken apart where the files have them apart.

    A stack of one codebook for all experts stays whole.
    """
    whole = {
        f"{prefix}.{part}"
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, KbitExperts)
        for leaf in module.packed_names()
        if module.is_whole(leaf)
        for part in part_names(module.codec_of(leaf), leaf).values()
    }
    apart = revert_weight_conversion(model, {n: t for n, t in state.items() if n not in whole})
    return {**apart, **{n: t for n, t in state.items() if n in whole}}


def _descriptions(model: Any) -> list[tuple[str, fmt.TensorMeta]]:
    """(name in the files, description) of every packed weight."""
    found: list[tuple[str, fmt.TensorMeta]] = []
    manifest = _manifest(model)
    matrices: dict[str, Tensor] = {}
    metas: dict[int, tuple[str, fmt.TensorMeta]] = {}  # of a first part: how its name ends, and the tensor
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedMatrix):
            tensor, end = _like(next(iter(module.parts.values()))), _first_part(module.info.codec, "")
            matrices[f"{prefix}.weight{end}"] = tensor
            metas[id(tensor)] = end, meta_of(module.info, module.k, module.shape)
        elif isinstance(module, KbitExperts):
            for leaf in module.packed_names():
                found += _of_stack(model, manifest, prefix, module, leaf)
    for part, tensor in _in_files(model, matrices).items():
        end, meta = metas[id(tensor)]
        found.append((part.removesuffix(end), meta))
    return found


def _of_stack(
    model: Any, manifest: Manifest, prefix: str, module: KbitExperts, leaf: str
) -> list[tuple[str, fmt.TensorMeta]]:
    codec, found = module.codec_of(leaf), []
    held = {f"{prefix}.{part_name(leaf, part)}": _like(tensor) for part, tensor in module.parts_of(leaf).items()}
    end, cols = _first_part(codec, ""), module.stack(leaf).shape[2]
    for part, tensor in _in_files(model, held).items():
        name = part.removesuffix(end)
        if name != part:
            made = meta_of(module.info[leaf], module.k_of(leaf), (*tensor.shape[:-1], cols))
            found.append((name, manifest.quantized.get(name, made)))
    return found


def _not_converted(files: Mapping[str, Tensor], meta: fmt.ShardMeta) -> list[str]:
    """Modules whose weights were left alone."""
    parts = _parts_in_files(meta.tensors)
    return [
        fmt.module_name(name)
        for name, tensor in files.items()
        if name not in parts
        and tensor.dim() >= 2
        and tensor.is_floating_point()
        and (name.endswith(".weight") or fmt.is_fused_experts(name, tensor.shape))
    ]


# --- writing ---------------------------------------------------------------------------------------


def _group(name: str, tensors: Mapping[str, Tensor], meta: fmt.ShardMeta, guard: str | None) -> Group:
    """What is stored of one tensor: itself, or its parts (and the guard that bears its name)."""
    if name in meta.tensors:
        described = meta.tensors[name]
        entries = coded_entries(described.codec, name, described.shape, described.k)
        if name == guard:
            entries.append(fmt.Entry(name, fmt.GUARD_DTYPE, fmt.GUARD_SHAPE))
        return Group(entries, fmt.ShardMeta({name: described}))
    kept = {name: meta.kept[name]} if name in meta.kept else {}
    tensor = tensors[name]
    return Group([fmt.Entry(name, STORED_NAMES[tensor.dtype], tuple(tensor.shape))], fmt.ShardMeta(kept=kept))


def _shards(
    tensors: Mapping[str, Tensor], meta: fmt.ShardMeta, manifest: Manifest, max_shard_size: int | None
) -> list[Shard]:
    parts = _parts_in_files(meta.tensors)
    names = [*meta.tensors, *(n for n in tensors if n not in parts)]
    guard = fmt.guard_name({n: m.shape for n, m in meta.tensors.items()})
    groups = {name: _group(name, tensors, meta, guard) for name in names}
    homes = {name: manifest.shards.get(group.entries[0].name) for name, group in groups.items()}
    if max_shard_size is not None or None in homes.values():
        ordered = [groups[name] for name in sorted(groups)]
        return lay_out(ordered, _STEM, max_shard_size or DEFAULT_SHARD_BYTES, kbitq=True)
    made = []
    for file in sorted({str(home) for home in homes.values()}):
        members = [groups[name] for name, home in homes.items() if home == file]
        described = fmt.ShardMeta()
        for group in members:
            described.tensors.update(group.meta.tensors)
            described.kept.update(group.meta.kept)
        made.append(Shard(file, fmt.place(e for g in members for e in g.entries), described))
    return made


def _write(folder: Path, shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Write one file under a name of its own, then give it the final one."""
    partial = folder / f"{shard.name}.partial"
    partial.unlink(missing_ok=True)
    with FileWriter(partial, shard.nbytes) as writer:
        writer.write(0, shard.header())
        for name, offset in shard.offsets.items():
            if name in tensors:  # all but the guard, which has no bytes
                writer.write(offset, tensors[name].detach().cpu().contiguous())
        writer.sync()
    partial.replace(folder / shard.name)


def _save_config(model: Any, folder: Path, config: dict[str, Any]) -> None:
    from kbitq.integrations.transformers.config import KbitqConfig

    before = getattr(model.config, "quantization_config", None)
    made = before if isinstance(before, KbitqConfig) else KbitqConfig()
    made.update_stored(config)
    model.config.quantization_config = made
    weights = getattr(model.config, fmt.GUARD_KEY, None)  # saving takes it away
    try:
        model.config.save_pretrained(folder)
    finally:
        if before is None:
            del model.config.quantization_config
    guard_config_file(folder, weights if weights is not None and (folder / weights).is_file() else None)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
