"""When the mock workers of the router's benchmark give their tokens."""

import asyncio
import time

import pytest

from bench.router.pacing import Steps, Streams

PACE_US, TOKENS = 5000, 4


class Sequence:
    def __init__(self, over: asyncio.Event, name: str = "", heard: list[str] | None = None) -> None:
        self.pace_us, self.left, self.at, self._over = PACE_US, TOKENS, list[float](), over
        self._name, self._heard = name, [] if heard is None else heard

    def step(self) -> bool:
        self.left -= 1
        self.at.append(time.monotonic())
        self._heard.append(self._name)
        if not self.left:
            self._over.set()
        return self.left > 0


@pytest.mark.parametrize("kind", [Steps, Streams])
async def test_every_sequence_gets_all_its_tokens_at_its_pace(kind):
    """No token comes early, and none is left out."""
    over, pacer, begun = asyncio.Event(), kind(), time.monotonic()
    sequence = Sequence(over)
    pacer.add(sequence)
    async with asyncio.timeout(10):
        await over.wait()
    assert len(sequence.at) == TOKENS
    assert sequence.at[-1] - begun >= 0.9 * TOKENS * PACE_US / 1e6


async def test_sequences_of_an_engine_step_together():
    """One that comes between two steps joins the next."""
    over, pacer, heard = asyncio.Event(), Steps(), list[str]()
    pacer.add(Sequence(asyncio.Event(), "first", heard))
    pacer.add(Sequence(over, "second", heard))
    async with asyncio.timeout(10):
        await over.wait()
    assert heard == ["first", "second"] * TOKENS


@pytest.mark.parametrize("kind", [Steps, Streams])
async def test_a_stopped_engine_gives_nothing_until_it_goes_on(kind):
    """And then the rest."""
    over, pacer = asyncio.Event(), kind()
    sequence = Sequence(over)
    pacer.add(sequence)
    pacer.stop()
    await asyncio.sleep(5 * PACE_US / 1e6)
    assert sequence.at == []
    pacer.go_on()
    async with asyncio.timeout(10):
        await over.wait()
    assert len(sequence.at) == TOKENS
