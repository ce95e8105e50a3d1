"""Small models as ordinary and as quantized folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """``folders(kind, k, **options)``: an ordinary folder, and the same quantized as ``kbitq quantize`` does."""
    from helpers.small_models import make_model
    from kbitq.checkpoint import QuantizeOptions, plan_quantize, run

    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(kind: str, k: int = 3, **options: Any) -> tuple[Path, Path]:
        source = root / kind
        if not source.exists():
            make_model(kind).save_pretrained(source)
        key = f"{kind}-k{k}-{sorted(options.items())}"
        if key not in made:
            made[key] = root / f"{kind}-{len(made)}"
            run(plan_quantize(source, made[key], QuantizeOptions(k=k, **options)))
        return source, made[key]

    return get
