"""A Python file beside a public model, through which ``trust_remote_code`` finds kbitq, or says what to install."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbitq.errors import CheckpointError
from kbitq.text_safety import shown

MODULE = "kbitq_auto"
FILE = f"{MODULE}.py"

# Subclasses, because transformers writes the name of this file into the classes that it finds here.
_TEXT = '''"""The weights beside this file are quantized by kbitq. transformers can read them where kbitq is imported.

transformers runs this file where trust_remote_code=True is given. Without it, `import kbitq` does the same.
"""

import transformers

try:
    import kbitq  # noqa: F401
except ImportError as error:
    raise ImportError("the weights of this model are quantized by kbitq: pip install kbitq") from error


class {config}(transformers.{config}):
    """As in transformers."""


class {model}(transformers.{model}):
    """As in transformers."""

    config_class = {config}
'''


def remote_code(config: Mapping[str, Any], auto_class: str) -> tuple[str, dict[str, Any]]:
    """The text of ``FILE`` for a model, and its config.json with the entry that leads there.

    Args:
        config: the content of config.json.
        auto_class: the class of transformers that loads the model, as ``AutoModelForCausalLM``.

    Raises:
        CheckpointError: transformers has no such model, or it comes with Python files of its own.
    """
    import transformers

    own = config.get("auto_map")
    if own and not (isinstance(own, dict) and all(str(name).startswith(f"{MODULE}.") for name in own.values())):
        raise CheckpointError("its config.json has an auto_map: the model comes with Python files of its own")
    kind, named = config.get("model_type"), config.get("architectures")
    model = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    found = getattr(transformers, model, None) if model.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if found is None or not is_model or found.config_class.model_type != kind:
        named_so = f"names {shown(model)}, which is no such model of transformers" if model else "names no model"
        raise CheckpointError(f"its config.json {named_so}")
    settings = found.config_class.__name__
    classes = {"AutoConfig": f"{MODULE}.{settings}", auto_class: f"{MODULE}.{model}"}
    return _TEXT.format(config=settings, model=model), {**config, "auto_map": classes}
