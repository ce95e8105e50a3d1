"""The YAML at the head of a card, and the source's text at its foot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

SOURCE_HEADING = "## The card of the source\n"
_MARK = "<!-- Below: the source's own card, about the model before it was quantized. -->\n"
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)

# What holds for a quantization of a model as for the model. Its results, its widget's examples and its own base model
# are claims about another model, and stay in its text.
_CARRIED = ("license", "license_name", "license_link", "language", "datasets", "library_name", "pipeline_tag", "tags")
_OWN_TAGS = ("kbitq", "quantized")


def split(readme: str | None) -> tuple[dict[str, Any], str]:
    """The fields of a README.md's front matter and the text below it; of a card, the source's text."""
    if readme is None:
        return {}, ""
    found = _FRONT.match(readme)
    fields = _fields(found[1]) if found else {}
    text = readme[found.end() :] if found else readme
    if _MARK in text:
        text = text.split(_MARK, 1)[1]
    elif is_card(fields):
        text = ""
    return fields, text.lstrip("\n")


def is_card(fields: Mapping[str, Any]) -> bool:
    """Whether front matter is that of a card of ours."""
    tags = fields.get("tags")
    return isinstance(tags, list) and all(tag in tags for tag in _OWN_TAGS)


def merged(fields: Mapping[str, Any], base_model: str | None) -> str:
    """The front matter of a card, with what of the source's (or of an earlier card's) still holds."""
    kept = {key: fields[key] for key in _CARRIED if key != "tags" and _plain(fields.get(key))}
    given = fields.get("tags")
    tags = [tag for tag in given if isinstance(tag, str)] if isinstance(given, list) else []
    kept["tags"] = [*(tag for tag in tags if tag not in _OWN_TAGS), *_OWN_TAGS]
    if base_model is None and is_card(fields) and isinstance(fields.get("base_model"), str):
        base_model = fields["base_model"]
    base = {"base_model": base_model, "base_model_relation": "quantized"} if base_model else {}
    return _block({**base, **kept})


def source_text(readme: str) -> str | None:
    """The README.md of the source out of a card, with the fields that were carried over; None if it had none.

    A README.md that is no card of ours comes back as it is.
    """
    fields, text = split(readme)
    if not is_card(fields):
        return readme
    kept = {key: fields[key] for key in _CARRIED if key != "tags" and _plain(fields.get(key))}
    if tags := [tag for tag in fields["tags"] if tag not in _OWN_TAGS]:
        kept["tags"] = tags
    if not kept and not text:
        return None
    return (_block(kept) + "\n" if kept else "") + text


def with_source(card: str, text: str) -> str:
    """A card with the source's text below it."""
    return f"{card}\n{SOURCE_HEADING}\n{_MARK}\n{text}" if text else card


def _fields(block: str) -> dict[str, Any]:
    """A mapping of front matter, or nothing where it is not one: a strange card is no reason to fail."""
    try:
        loaded = yaml.safe_load(block)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return {key: value for key, value in loaded.items() if isinstance(key, str)} if isinstance(loaded, dict) else {}


def _plain(value: Any) -> bool:
    """A text, or a list of texts: anything else would be written back in another form."""
    return bool(value) and (
        isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    )


def _block(fields: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000)
    return f"---\n{text}---\n"
