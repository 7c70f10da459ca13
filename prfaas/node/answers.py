"""Waiting for the worker's own children: they answer in time, or count as dead."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from prfaas.errors import PeerUnavailable

T = TypeVar("T")

#: How often a silent child is looked at, within the time that its silence may last.
LOOKS = 4


async def answered(child: str, seconds: float, answer: Awaitable[T]) -> T:
    """The child's answer. A child that does not give it in time is stuck: PeerUnavailable."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise PeerUnavailable(child, f"no answer within {seconds:g} s") from None


class Pulse:
    """Whether a child goes on speaking: one that is frozen keeps its process and its socket, but says nothing. Or
    whatever else it has to do again and again: `lacking` says what is wrong when it does not."""

    def __init__(self, child: str, lacking: str = "not a word") -> None:
        self._child, self._lacking = child, lacking
        self._begun = asyncio.Event()
        self._heard = False

    def beat(self) -> None:
        """The child has said something."""
        self._begun.set()
        self._heard = True

    async def watch(self, silence_s: float) -> None:
        """Raise PeerUnavailable once the child, after its first word, has been silent for `silence_s`.

        Looks are counted, not time: when it was this process that stood still, that is one look at most.
        """
        await self._begun.wait()
        silent_looks = 0
        while silent_looks < LOOKS:
            self._heard = False
            await asyncio.sleep(silence_s / LOOKS)
            silent_looks = 0 if self._heard else silent_looks + 1
        raise PeerUnavailable(self._child, f"{self._lacking} for {silence_s:g} s")
