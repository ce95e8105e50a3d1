"""A causal language model and its tokenizer from a folder, as the command line needs them: quietly, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kbitq.checkpoint.source.header import parse_json_object
from kbitq.errors import BuildError, CheckpointError, KbitqError, first_line
from kbitq.text_safety import shown


def resolve_device(device: str) -> str:
    """``auto`` is a GPU if torch sees one. Raises BuildError for ``cuda`` where there is none."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise BuildError("torch sees no CUDA device", hint="device='cpu' works everywhere", remedy="cpu")
    return ("cuda" if found else "cpu") if device == "auto" else device


def load_model(
    folder: str | Path, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> Any:
    """A causal language model in evaluation mode. kbitq's folders stay packed; ordinary ones load as they are.

    Args:
        folder: with a config.json.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``auto`` (the config's), ``float32``, ``bfloat16`` or ``float16``.
        trust_remote_code: run Python files of the folder, if the model needs them.

    Raises:
        CheckpointError: it is no causal language model, transformers cannot load it, weights are missing, or it needs
            code of its own, which is not trusted.
    """
    _check_folder(folder)
    transformers = _quiet_transformers()
    _check_causal(folder)
    loader = transformers.AutoModelForCausalLM
    return _load(loader, folder, "a causal language model", device, dtype, trust_remote_code)


def load_any_model(
    folder: str | Path, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> Any:
    """A model of the class that its config.json names, encoders included, in evaluation mode.

    Arguments and errors are those of :func:`load_model`.
    """
    _check_folder(folder)
    return _load(model_class(folder), folder, "a model", device, dtype, trust_remote_code)


def model_class(folder: str | Path) -> Any:
    """The class of transformers that a folder's config.json names, or the one that finds it. Raises CheckpointError."""
    transformers = _quiet_transformers()
    named = _config(folder).get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    found = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM


def _load(loader: Any, folder: str | Path, what: str, device: str, dtype: str, trust_remote_code: bool) -> Any:
    """A model on its device; ``what`` it cannot be loaded as."""
    target = resolve_device(device)
    model: Any
    info: Any
    try:
        model, info = loader.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except (KbitqError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config.json of no sense makes transformers raise anything
        _check_trust(folder, error)
        fits = "ignore_mismatched_sizes" not in str(error)  # which transformers advises, and which loads random weights
        why = first_line(error) if fits else "the shapes of its weights are not those that its config.json says"
        raise CheckpointError(f"{folder} cannot be loaded as {what}: {why}") from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder}: the weights lack {missing[0]}" + _and_more(missing))
    return model.to(target).eval()


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder. Raises CheckpointError where there is none, or it needs code that is not trusted."""
    _check_folder(folder)
    transformers = _quiet_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:
        _check_trust(folder, error)
        raise CheckpointError(f"{folder} has no tokenizer that transformers can load") from error


def _check_folder(folder: str | Path) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a folder with a config.json", hint="give the folder of a whole model")


def _config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError where it is no object of JSON."""
    return parse_json_object((Path(folder) / "config.json").read_bytes(), f"{folder}/config.json")


def _quiet_transformers() -> Any:
    """The package, told not to warn and to draw no bars."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _check_trust(folder: str | Path, error: Exception) -> None:
    """Raise CheckpointError where transformers asks for permission to run code of the folder."""
    if "trust_remote_code" in str(error):
        raise CheckpointError(
            f"{folder} comes with Python code of its own, which was not run",
            hint="look at that code; trust_remote_code=True runs it",
            remedy="trust",
        ) from error


def _check_causal(folder: str | Path) -> None:
    """Raise CheckpointError where the config names the class of a model that does not predict the next token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _config(folder)
    named, own = config.get("architectures"), config.get("auto_map")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    known = {str(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if not names or (isinstance(own, dict) and "AutoModelForCausalLM" in own):
        return
    if not any(name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise CheckpointError(
            f"{folder} is no causal language model: its config.json names {shown(names[0])}",
            hint="only a model that predicts the next token can be evaluated or continue a prompt",
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
