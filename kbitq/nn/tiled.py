"""Weights of a GPU in tile order: the planes are let go once they have been repacked, and come back when asked for.

The kernels of a GPU read tiles (kbitq.ops.tiles), files hold planes, and both at once would take the memory twice. So
the first product replaces the parameters of a weight's planes by ``weight_tiles`` and ``weight_levels``. Whoever asks
for the planes gets them back, bit for bit: ``state_dict``, ``weight_packed`` and copies make them anew for the asker;
a move to another device, ``load_state_dict`` and setting a part bring them back to stay until the next product.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kbitq.codecs.base import get_codec, part_kinds, part_name, part_names
from kbitq.ops import tiled_linear
from kbitq.ops.tiles import Tiles

_planes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of tiles: weak references to the planes that were made of them, so that weights which are tied stay tied."""


def tiles_name(name: str) -> str:
    """The parameter that holds the tiles of the weight ``name``."""
    return f"{name}_tiles"


def levels_name(name: str) -> str:
    """The parameter that holds the levels, a row for each group of rows, which the kernels read with the tiles."""
    return f"{name}_levels"


class _Held(nn.Module):
    """What holds the weights, parts or tiles, and the change from one to the other."""

    _tiled: Mapping[str, tuple[int, ...]] = {}
    """Weights held in tile order, with their shapes. Replaced, never written to: this one is every module's."""

    def packed_names(self) -> Iterable[str]:
        """Names of the weights held packed: ``weight`` stands for ``weight_packed`` and so on. Subclasses say."""
        raise NotImplementedError  # abstract: a layer, an embedding or a stack knows

    def codec_of(self, name: str) -> str:
        """How the weight ``name`` is coded. Each kind of module says."""
        raise NotImplementedError  # abstract: a layer, an embedding or a stack knows

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the weight ``name``, or of the stack. Each kind of module says."""
        raise NotImplementedError  # abstract: a layer, an embedding or a stack knows

    def tiles_of(self, name: str) -> Tiles | None:
        """The tiles that the weight is held by; None where it is held by its parts."""
        if name not in self._tiled:
            return None
        held: Any = self._parameters
        *lead, cols = self._tiled[name]
        rows = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        return Tiles(held[tiles_name(name)], held[levels_name(name)], rows, cols, self.codec_of(name))

    def held_names(self, name: str) -> list[str]:
        """Names of the parameters that hold the weight at present, its bulk first."""
        codec = self.codec_of(name)
        if name not in self._tiled:
            return list(part_names(codec, name).values())
        constants = [part_name(name, part) for part, constant in part_kinds(codec).items() if constant]
        return [tiles_name(name), levels_name(name), *constants]

    def holders(self) -> list[nn.Parameter | None]:
        """The parameters that hold the weights at present."""
        return [self._parameters[held] for name in self.packed_names() for held in self.held_names(name)]

    def constants_of(self, name: str) -> dict[str, nn.Parameter]:
        """The constants among the parts of the weight, which are there in either order."""
        held: Any = self._parameters
        kinds = part_kinds(self.codec_of(name))
        return {part: held[part_name(name, part)] for part, constant in kinds.items() if constant}

    def parts_of(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters that stand for the weight ``name``, by part; of tiles made anew, writing changes nothing."""
        held: Any = self._parameters  # without the search that getattr makes: this is on the way of every forward
        if name in self._tiled:
            held = self._whole()
        return {part: held[stored] for part, stored in part_names(self.codec_of(name), name).items()}

    def hold(self, name: str, tiles: Tiles) -> None:
        """Hold the weight by these tiles, which are its own, and let its parts go, constants apart."""
        shape = self.shape_of(name)
        self._swap(name, {tiles_name(name): tiles.data, levels_name(name): tiles.levels})
        self._tiled = {**self._tiled, name: shape}

    def untile(self) -> None:
        """Hold every weight by its parts again."""
        for name, shape in self._tiled.items():
            self._swap(name, self._restored(name, shape))
        self._tiled = {}

    def _swap(self, name: str, made: Mapping[str, nn.Parameter | Tensor]) -> None:
        """Replace what holds the weight, constants apart, in its place among the parameters."""
        held: dict[str, Any] = self._parameters
        old = self._names_without_constants(name)
        changed: dict[str, Any] = {}
        for key, value in held.items():
            if key == old[0]:
                changed.update(made)
            elif key not in old:
                changed[key] = value
        held.clear()
        held.update(changed)

    def _names_without_constants(self, name: str) -> list[str]:
        if name in self._tiled:
            return [tiles_name(name), levels_name(name)]
        kinds = part_kinds(self.codec_of(name))
        return [part_name(name, part) for part, constant in kinds.items() if not constant]

    def _restored(self, name: str, shape: tuple[int, ...]) -> dict[str, nn.Parameter]:
        """Parameters of the planes by their names; the same ones for as long as somebody holds them."""
        tiles = self.tiles_of(name)
        assert tiles is not None
        known = [reference() for reference in _planes.get(tiles.data, ())]
        if not known or any(parameter is None for parameter in known):
            known = [nn.Parameter(part.view(*shape[:-1], -1), requires_grad=False) for part in tiles.planes()]
            _planes[tiles.data] = [weakref.ref(parameter) for parameter in known]
        kinds = part_kinds(self.codec_of(name))
        names = [part_name(name, part) for part, constant in kinds.items() if not constant]
        return dict(zip(names, known, strict=True))

    def _whole(self) -> dict[str, Any]:
        """All parameters as they are in files, in their order."""
        instead = {tiles_name(name): self._restored(name, shape) for name, shape in self._tiled.items()}
        gone = {levels_name(name) for name in self._tiled}
        whole: dict[str, Any] = {}
        for key, value in self._parameters.items():
            if key in instead:
                whole.update(instead[key])
            elif key not in gone:
                whole[key] = value
        return whole


class TiledModule(_Held):
    """Holds weights by parts, or on a GPU by tiles. :class:`kbitq.nn.packed.PackedModule` says which weights."""

    follows_others: bool = False
    """Whether a weight is held by tiles only because a module that shares it needs them."""

    def tile(self) -> None:
        """Hold every weight by tiles that has them here: on a GPU with kernels for its codec and K."""
        for name in self.packed_names():
            self.tile_weight(name)

    def tile_weight(self, name: str, x: Tensor | None = None) -> bool:
        """Hold the weight by tiles, if it can be, and say whether it is.

        Args:
            name: of the weight.
            x: what is to be multiplied by it: of 16 bits, or tiles would not be used.
        """
        if name in self._tiled:
            return True
        if x is not None and not (x.is_cuda and x.dtype in tiled_linear.GROUPED_DTYPES):
            return False
        if torch.compiler.is_compiling() or _comes_and_goes(self):
            return False
        parts = self.parts_of(name)
        if not all(type(part) is nn.Parameter and part.is_cuda for part in parts.values()):
            return False
        tiles = self._make_tiles(name, parts)
        if tiles is not None:
            self.hold(name, tiles)
        return tiles is not None

    def _make_tiles(self, name: str, parts: Mapping[str, Tensor]) -> Tiles | None:
        return get_codec(self.codec_of(name)).tiles(parts, self.shape_of(name)[-1])

    # --- what torch asks for -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            for weight, shape in self.__dict__.get("_tiled", {}).items():
                if name in part_names(self.codec_of(weight), weight).values():
                    return self._restored(weight, shape)[name]
            raise

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if any(name in part_names(self.codec_of(weight), weight).values() for weight in self._tiled):
            self.untile()
        super().register_parameter(name, param)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold planes: they may come to life on another device."""
        state = dict(self.__dict__)
        if state.pop("_tiled", None):
            state["_parameters"] = self._whole()
        return state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self._tiled:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        tiled, whole = self._parameters, self._whole()
        self.__dict__["_parameters"] = whole
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            self.__dict__["_parameters"] = tiled
        for key in whole.keys() - tiled.keys():
            destination[prefix + key].made_of_tiles = whole[key]  # lives on, for weights that are tied to it

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.untile()
        super()._load_from_state_dict(*args, **kwargs)


def tile_weights(model: nn.Module) -> None:
    """Let the packed weights of a model that lie on GPUs be held in tile order alone, now.

    The first product of a weight does it otherwise. Only what is compiled or captured before any product needs this
    call: there a weight would be held in both orders.

    Args:
        model: any module; what has no kernels, or is not on a GPU, stays as it is.
    """
    for module in _embeddings_last(model):
        module.tile()


def _embeddings_last(model: nn.Module) -> list[TiledModule]:
    """An embedding is held by tiles where a linear layer that it is tied to is."""
    found = [module for module in model.modules() if isinstance(module, TiledModule)]
    return sorted(found, key=lambda module: module.follows_others)


def _comes_and_goes(module: nn.Module) -> bool:
    """Whether accelerate brings the module's parameters for each forward, by their names, and takes them away."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ())))
