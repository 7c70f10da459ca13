"""Waiting for the worker's own children: they answer in time, or count as dead."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from prfaas.errors import PeerUnavailable

T = TypeVar("T")


async def answered(child: str, seconds: float, answer: Awaitable[T]) -> T:
    """The child's answer. A child that does not give it in time is stuck: PeerUnavailable."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise PeerUnavailable(child, f"no answer within {seconds:g} s") from None
