"""Several answers as one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from prfaas.errors import PeerUnavailable
from services.router.openai.interleave import interleaved

LIVENESS_S = 20.0


class Sources:
    """Each yields (its number, 0), (its number, 1) and so on, and says when it has been closed."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.closed: set[int] = set()

    async def source(self, number: int, count: int, *, fails: bool = False) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for item in range(count):
                self.taken.append((number, item))
                yield number, item
                await asyncio.sleep(0)
            if fails:
                raise PeerUnavailable("d0", "gone")
        finally:
            self.closed.add(number)


async def test_each_comes_whole_and_in_its_own_order():
    """None waits for another to end."""
    sources = Sources()
    async with asyncio.timeout(LIVENESS_S):
        seen = [item async for item in interleaved([sources.source(number, 20) for number in range(3)])]
    for number in range(3):
        assert [item for owner, item in seen if owner == number] == list(range(20))
    assert {owner for owner, _ in seen[:6]} == {0, 1, 2}
    assert sources.closed == {0, 1, 2}


async def test_the_first_failure_ends_all():
    """The others are closed before it is told."""
    sources = Sources()
    stream = interleaved([sources.source(0, 10_000), sources.source(1, 2, fails=True), sources.source(2, 10_000)])
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(PeerUnavailable):
            async for _ in stream:
                pass
    assert sources.closed == {0, 1, 2}
    assert len(sources.taken) < 100


async def test_a_reader_that_stops_reading_holds_them_up():
    """What waits is bounded, and leaving closes all."""
    sources = Sources()
    async with (
        asyncio.timeout(LIVENESS_S),
        aclosing(interleaved([sources.source(at, 10_000) for at in range(3)])) as stream,
    ):
        await anext(stream)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(sources.taken) <= 1 + 3 + 3
    assert sources.closed == {0, 1, 2}
