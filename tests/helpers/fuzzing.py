"""Values nearly right, and what must come of them: a result or a sentence.

``KBITQ_FUZZ_EXAMPLES`` is how many examples a test tries.
"""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kbitq.errors import KbitqError

many = settings(
    max_examples=int(os.environ.get("KBITQ_FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
few = settings(many, max_examples=max(1, many.max_examples // 10))

words = st.sampled_from(
    ["dtype", "shape", "data_offsets", "__metadata__", "kbitq", "format_version", "tensors", "weight_map", "k", "F32",
     "I32", "a.weight", "a.weight_packed", "quant_method", "../x", "model.safetensors", "F8_E4M3", "shapes", "dtypes"]
)  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | words
)
keys = words | st.text(max_size=4)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)


values = st.recursive(scalars, grown, max_leaves=12)


def mutated(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one place in it changed, added or taken away."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        rest = {k: v for k, v in value.items() if k != key}
        what = data.draw(st.sampled_from(["deeper", "deeper", "gone", "renamed"]))
        if what == "gone":
            return rest
        if what == "renamed":
            return {**rest, data.draw(words): value[key]}
        return {**value, key: mutated(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(data, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and data.draw(st.booleans()):
        return value + data.draw(st.sampled_from([-1, 1, 8, 2**31, 2**63, -(2**63)]))
    return data.draw(values)


def shaken(data: st.DataObject, raw: bytes) -> bytes:
    """Bytes with a few of them changed, or cut short."""
    out = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        if out:
            out[data.draw(st.integers(0, len(out) - 1))] = data.draw(st.integers(0, 255))
    return bytes(out[: data.draw(st.integers(0, len(out)))]) if data.draw(st.booleans()) else bytes(out)


def answered(call: Callable[[], object]) -> None:
    """Any other exception than ours is a finding."""
    try:
        call()
    except KbitqError as error:
        assert str(error).isprintable() or "\n" not in str(error)
