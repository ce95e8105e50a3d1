"""How the model of a card is loaded: by the class that fits it, which its config.json and its files tell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from kbitq.card.markdown import code, fenced

# The end of an architecture's name -> the auto class of transformers; the first that fits is taken.
_AUTO_CLASSES = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    ("ForTokenClassification", "AutoModelForTokenClassification"),
    ("ForQuestionAnswering", "AutoModelForQuestionAnswering"),
    ("ForImageClassification", "AutoModelForImageClassification"),
    ("ForSpeechSeq2Seq", "AutoModelForSpeechSeq2Seq"),
    ("ForCTC", "AutoModelForCTC"),
    ("ForImageTextToText", "AutoModelForImageTextToText"),
)
_READERS = {  # what reads a model's input -> files of which one is there; the first that fits is taken
    "AutoProcessor": ("processor_config.json", "preprocessor_config.json"),
    "AutoTokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "spiece.model"),
}
HERE = "."
_REMOTE_CODE = "kbitq_auto.py"
_TRUSTED = (
    "Programs that cannot be changed load it with `trust_remote_code=True` where kbitq is installed "
    f"(`pip install kbitq`), through `{_REMOTE_CODE}`.\n\n"
)
_PACKAGES = {"gptq": "gptqmodel optimum", "bnb": "bitsandbytes"}  # that load formats of other tools
_SENTENCES = "config_sentence_transformers.json"


def auto_class(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that loads a model with this config.json; None if it is not a model of transformers."""
    named = config.get("architectures")
    names = [n for n in named if isinstance(n, str)] if isinstance(named, list) else []
    if not names:
        return "AutoModel" if isinstance(config.get("model_type"), str) else None
    for ending, found in _AUTO_CLASSES:
        if names[0].endswith(ending):
            return found
    if names[0].endswith("ForConditionalGeneration"):
        return _conditional(config)
    return "AutoModel"


def _conditional(config: Mapping[str, Any]) -> str:
    """The class for an architecture that says only that it generates from something else."""
    if any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config")):
        return "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForSeq2SeqLM"
    return "AutoModelForSpeechSeq2Seq" if config.get("model_type") == "whisper" else "AutoModelForSeq2SeqLM"


def usage(place: str, config: Mapping[str, Any] | None, files: Collection[str]) -> str:
    """The section's text.

    Args:
        place: what the loading functions are given: a folder (``.`` is the one that the card is in), a file or
            ``org/name``.
        config: config.json; None where there is none.
        files: names of the files beside the weights.
    """
    outside = "restored.safetensors" if place.endswith(".safetensors") else "restored"
    back = f"kbitq dequantize {shlex.quote(place)} -o {'../' if place == HERE else ''}{outside}"
    program = fenced(_python(place, config or {}, files), "python")
    trusted = _TRUSTED if _REMOTE_CODE in files else ""
    return f"{program}\n{trusted}Back to an ordinary checkpoint: {code(back)}\n"


def usage_elsewhere(kind: str, place: str, config: Mapping[str, Any] | None, files: Collection[str]) -> str:
    """The section's text for a checkpoint in another tool's format, ``kind`` as ``--format`` spells it."""
    family = next(f for f in (*_PACKAGES, "") if kind.startswith(f))
    package = _PACKAGES.get(family, "compressed-tensors")
    back = f"kbitq dequantize {shlex.quote(place)} -o {'../' if place == HERE else ''}restored"
    found = auto_class(config or {})
    program = fenced(_python(place, config or {}, files, ""), "python") + "\n" if found is not None else ""
    serve = "" if family == "bnb" else f" vLLM serves it: {code(f'vllm serve {shlex.quote(place)}')}"
    needs = f"It needs `pip install {package}`, and not kbitq.{serve}\n\n"
    return f"{program}{needs}Back to an ordinary checkpoint: {code(back)}\n"


_REGISTERS = "import kbitq  # registers the format with transformers\n"


def _python(place: str, config: Mapping[str, Any], files: Collection[str], opening: str = _REGISTERS) -> str:
    where, note = json.dumps(place), "  # this folder" if place == HERE else ""
    found = auto_class(config)
    if found is None:
        return f"import kbitq\n\ntensors = kbitq.load_file({where}){note}"
    if _SENTENCES in files:
        imported = "from sentence_transformers import SentenceTransformer"
        return f"{opening}{imported}\n\nmodel = SentenceTransformer({where}){note}"
    reader = next((r for r, names in _READERS.items() if any(name in files for name in names)), None)
    imported = f"from transformers import {', '.join(sorted(filter(None, (found, reader))))}"
    lines = [f"{opening}{imported}\n", f"model = {found}.from_pretrained({where}){note}"]
    if reader is not None:
        lines.append(f"{reader.removeprefix('Auto').lower()} = {reader}.from_pretrained({where})")
    return "\n".join(lines)
