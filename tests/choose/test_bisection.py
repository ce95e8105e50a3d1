"""The smallest value that is enough."""

import pytest

from kbitq.choose.bisection import smallest


@pytest.mark.parametrize("first", range(9))
def test_finds_the_first_with_few_questions(first: int) -> None:
    asked: list[float] = []

    def enough(value: float) -> bool:
        asked.append(value)
        return value >= first

    assert smallest(range(8), enough) == (first if first < 8 else None)
    assert asked[0] == 7 and len(asked) <= 4 and len(set(asked)) == len(asked)


def test_where_enough_is_not_monotonic_a_border_is_found() -> None:
    values = [False, True, False, True, True]
    found = smallest(range(5), values.__getitem__)
    assert found is not None and values[int(found)] and not values[int(found) - 1]


def test_no_value_is_no_answer() -> None:
    assert smallest([], lambda _: True) is None
