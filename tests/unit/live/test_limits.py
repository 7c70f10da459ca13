"""Long limits share a timer, and nothing of one that was lifted stays."""

import asyncio
import time

import pytest

from prfaas.errors import DeadlineExceeded
from prfaas.live.clock import AsyncioClock
from prfaas.live.limits import Limits


async def test_only_those_that_have_run_out_are_felt():
    """Whatever lengths there are, and in whatever order they were set."""
    clock = AsyncioClock(long_s=0.0)

    async def waits(seconds: float) -> float:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await clock.within(seconds, "work", asyncio.sleep(3600))
        return time.monotonic() - begun

    lengths = (0.3, 0.05, 0.3, 0.2)
    async with asyncio.timeout(30):
        took = await asyncio.gather(*map(waits, lengths))
    assert all(felt >= length for length, felt in zip(lengths, took, strict=True))


async def test_nothing_stays_of_limits_that_were_kept():
    """A router has set and lifted millions of them."""
    limits = Limits()
    kept = limits.set(3600.0)
    for _ in range(100):
        limits.lift(limits.set(3600.0))
    assert [list(same) for same in limits._by_length.values()] == [[kept]]
    limits.lift(kept)
    async with asyncio.timeout(10):
        while limits._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not limits._by_length
