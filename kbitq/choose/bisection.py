"""The smallest of ascending values that is enough, by asking about few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def smallest(values: Sequence[float], enough: Callable[[float], bool]) -> float | None:
    """The smallest value that is enough, the one below it not being so.

    Args:
        values: ascending. What is enough should stay so above; where it does not, one of the places is found at which
            a value is enough and the one below is not.
        enough: asked about the largest value first, then about log2 of their number.

    Returns:
        None if not even the largest is enough, or there is no value.
    """
    if not values or not enough(values[-1]):
        return None
    below, found = -1, len(values) - 1
    while found - below > 1:
        middle = (below + found) // 2
        if enough(values[middle]):
            found = middle
        else:
            below = middle
    return values[found]
