"""Values that follow from their keys alone."""

import pytest

from prfaas.remembered import MOST, Remembered


def test_a_value_is_worked_out_once():
    """When it is first asked for, and not before."""
    asked: list[int] = []

    def doubled(key: int) -> int:
        asked.append(key)
        return 2 * key

    values = Remembered(doubled)
    assert (values[3], values[3], values[4]) == (6, 6, 8) and asked == [3, 4]


def test_what_is_kept_is_bounded():
    """However many keys there are in a long life; the values stay right."""
    values = Remembered(lambda key: 2 * key)
    for key in range(3 * MOST + 5):
        assert values[key] == 2 * key and len(values) <= MOST
    values.check()


def test_a_value_that_depends_on_more_than_its_key_is_found_out():
    """Nothing outdates what is remembered, so nothing may."""
    factor = [2]
    values = Remembered(lambda key: factor[0] * key)
    assert values[3] == 6
    factor[0] = 5
    with pytest.raises(AssertionError):
        values.check()
