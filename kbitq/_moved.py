"""The modules that stood elsewhere before version 0.2, under their old names: importable still, with a warning.

An alias costs nothing until a name is asked of it, and then it is the module that replaced it.
"""

from __future__ import annotations

import importlib
import sys
import warnings

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any
else:
    ModuleType = type(sys)

MOVED = {
    "budget": ("choose.knapsack", "Allocation Budget Choice ERROR_KINDS Errors Sizes allocate curve"),
    "codebooks": ("codecs.codebooks", "BUILTIN Levels OPTIMAL levels nf normalise optimal"),
    "evaluate": ("eval.perplexity", "Divergence Evaluation WINDOW evaluate read_tokens windows_of"),
    "fit": ("codecs.fit", "Fitted ITERATIONS Part SAMPLE_BLOCKS fit fit_tensor matrix_parts sample_positions"),
    "generate": ("eval.generation", "Generation Memory generate memory_of"),
    "gpu_linear": (
        "ops.tiled_linear",
        "FUSED_ROWS FUSED_ROWS_WIDE GROUPED_DTYPES SMALL Tiles can_tile "
        "fused_rows grouped_linear linear multiply_into takes_groups tile tiles_for tiles_of",
    ),
    "importance": ("choose.importance", "Importance Values load_importance"),
    "linear_op": ("ops.linear", "FUSED_ROWS FUSED_ROWS_FLOAT autocast fused_rows linear"),
    "recipe": ("choose.recipe", "Recipe exactly load_recipe parse_rule recipe_text rule_text"),
    "reference": (
        "codecs.reference",
        "Array F32 block_error candidate_bytes choose_bytes decode_e4m4 dequantize encode_e4m4 "
        "find_index pack_planes prepare_importance quantize quantize_flat round_to sqnr_db stats "
        "tensor_exponent to_blocks top_byte tree_sum unpack_planes",
    ),
    "roles": ("choose.tensor_names", "layer_of merged_experts role_of short_roles tie_of"),
    "selection": ("choose.selection", "MIN_ELEMENTS REGEX_PREFIX Rule Selection TensorRule Verdict shrinks"),
}
"""Old name -> new name, both within ``kbitq``, and the public names that stood there. The table is finished: it does
not grow. Code that asks every module for an attribute, as torch's compiler does, wakes nothing up."""


class _Alias(ModuleType):
    """A module that stands for another one."""

    def __init__(self, old: str, new: str, names: str) -> None:
        super().__init__(old, f"Moved to ``{new}``.")
        self._new, self._names = new, names.split()

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("_names", ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        warnings.warn(f"{self.__name__} is now {self._new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(self._new), name)

    def __dir__(self) -> list[str]:
        return list(self._names)


def install() -> None:
    """Called by ``import kbitq``: the old names are found in ``sys.modules``."""
    for old, (new, names) in MOVED.items():
        sys.modules.setdefault(f"kbitq.{old}", _Alias(f"kbitq.{old}", f"kbitq.{new}", names))


def moved(name: str) -> ModuleType | None:
    """The alias for ``kbitq.name``, or None if nothing of that name has moved."""
    return sys.modules[f"kbitq.{name}"] if name in MOVED else None
