"""Two pumps that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.integration.kv_pumps import Pump, assert_transfers, pumps


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Pump]]:
    with pumps({}, {}) as started:
        yield started


@pytest.fixture
def pair(shared: list[Pump]) -> Iterator[list[Pump]]:
    """Two pumps. Whatever a test does to them, they end with nothing reserved or connected by hand, and still work."""
    yield shared
    for pump in shared:
        pump.hang_up()
    for pump in shared:
        pump.assert_baseline()
    assert_transfers(*shared)
