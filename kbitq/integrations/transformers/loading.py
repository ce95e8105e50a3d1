"""A causal language model and its tokenizer from a folder, as the command line needs them: quietly, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kbitq.errors import BuildError, CheckpointError, KbitqError, first_line


def resolve_device(device: str) -> str:
    """``auto`` is a GPU if torch sees one. Raises BuildError for ``cuda`` where there is none."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise BuildError("torch sees no CUDA device", hint="device='cpu' works everywhere", remedy="cpu")
    return ("cuda" if found else "cpu") if device == "auto" else device


def load_model(folder: str | Path, *, device: str = "auto", dtype: str = "auto") -> Any:
    """A causal language model in evaluation mode. kbitq's folders stay packed; ordinary ones load as they are.

    Args:
        folder: with a config.json.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``auto`` (the config's), ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        CheckpointError: transformers cannot make a causal language model of it, or weights are missing.
    """
    _check_folder(folder)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    target, loader = resolve_device(device), transformers.AutoModelForCausalLM
    model: Any
    info: Any
    try:
        model, info = loader.from_pretrained(  # type: ignore[misc]
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    except (KbitqError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config.json of no sense makes transformers raise anything
        fits = "ignore_mismatched_sizes" not in str(error)  # which transformers advises, and which loads random weights
        why = first_line(error) if fits else "the shapes of its weights are not those that its config.json says"
        raise CheckpointError(f"{folder} cannot be loaded as a causal language model: {why}") from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder}: the weights lack {missing[0]}" + _and_more(missing))
    return model.to(target).eval()


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder. Raises CheckpointError where there is none."""
    _check_folder(folder)
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} has no tokenizer that transformers can load") from error


def _check_folder(folder: str | Path) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a folder with a config.json", hint="give the folder of a whole model")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
