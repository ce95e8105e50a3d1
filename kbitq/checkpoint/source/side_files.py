"""The files of a folder that hold no weights of ours: which are carried over to the output, and which are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from kbitq.format import CONFIG_FILE
from kbitq.text_safety import shown

WEIGHTS_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SUMS_FILE, REPORT_FILE, RECIPE_FILE = "SHA256SUMS", "quantization_report.json", "quantization_recipe.toml"
CARD_FILE, EVALUATION_FILE = "README.md", "quantization_evaluation.json"
# Not in SHA256SUMS: itself, what evaluating and publishing change, and the Hub's own file.
NOT_SUMMED = frozenset((SUMS_FILE, CARD_FILE, EVALUATION_FILE, ".gitattributes"))
# Unpickling runs code, and so does anything that may hold a pickle: such files are neither opened nor passed on.
PICKLE_SUFFIXES = frozenset(
    (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".dill", ".mar", ".nemo")
)
# The same weights in another tool's format would be a second, unquantized copy of the model.
OTHER_WEIGHTS_SUFFIXES = frozenset(
    (".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".mlmodel", ".mlpackage", ".pb")
)
# They say how another tool quantized the source; programs that find them would take the output for that.
OTHER_QUANTIZATION = frozenset(("hf_quant_config.json", "quantize_config.json", "quant_config.json"))
WRITTEN_BY_KBITQ = frozenset((CONFIG_FILE, SUMS_FILE, REPORT_FILE, RECIPE_FILE, EVALUATION_FILE))


@dataclass
class Sorted:
    """The files of a folder by what becomes of them. ``notes`` are sentences about those left out."""

    carried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)


def sort_files(names: Iterable[str], weights: Iterable[str]) -> Sorted:
    """Sort the files of a folder, given those whose tensors are read (``weights``)."""
    taken, result = set(weights), Sorted()
    for name in names:
        suffix = PurePosixPath(name).suffix.lower()
        if name in taken or name in WRITTEN_BY_KBITQ or (name.endswith(INDEX_SUFFIX) and "/" not in name):
            continue
        if not name.isprintable():
            result.notes.append(f"{shown(name)} is not carried over: a name that cannot be printed")
        elif suffix in PICKLE_SUFFIXES or name.endswith(".bin.index.json"):
            result.pickles.append(name)
            result.notes.append(f"{name} is not carried over: pickles are refused")
        elif suffix in OTHER_WEIGHTS_SUFFIXES:
            result.notes.append(f"{name} is not carried over: weights in another format")
        elif name in OTHER_QUANTIZATION:
            result.notes.append(f"{name} is not carried over: it says how the source was quantized")
        elif is_duplicate_weights(name):
            result.notes.append(f"{name} is not carried over: a second copy of the weights")
        else:
            result.carried.append(name)
            if suffix == WEIGHTS_SUFFIX:
                result.notes.append(f"{name} is carried over unquantized: it is no part of the model's weight files")
    return result


def is_duplicate_weights(name: str) -> bool:
    """Whether a file is the publisher's own-format copy of the weights (Mistral's ``consolidated*``)."""
    return name.startswith("consolidated") and name.endswith((WEIGHTS_SUFFIX, ".json"))
