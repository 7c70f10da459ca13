"""Several answers that come at once, as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """One source has nothing more."""


END = _End()


def interleaved(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What the sources yield, in the order in which it comes, each source's in its own. The first failure ends all.

    At most one thing of each source waits: a reader that is slow slows them all. When this ends, for whatever reason,
    every source is closed.
    """
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    arrived: asyncio.Queue[T | Exception | _End] = asyncio.Queue(maxsize=len(sources))
    tasks = [asyncio.create_task(_pump(source, arrived), name=f"answer {at}") for at, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            match await arrived.get():
                case _End():
                    running -= 1
                case Exception() as error:
                    raise error
                case piece:
                    yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], arrived: "asyncio.Queue[T | Exception | _End]") -> None:
    try:
        async with aclosing(source):
            async for piece in source:
                await arrived.put(piece)
    except Exception as error:
        await arrived.put(error)
    else:
        await arrived.put(END)
