"""A vLLM engine process, driven as its node drives it, with a pool that the test may look into."""

import asyncio
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prfaas.cluster import NodeId
from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Event,
    Failed,
    Finished,
    Load,
    Prefill,
    Prefilled,
    Prefixes,
    Ready,
    Tokens,
)
from prfaas.engine.messages import RowsReady as RowsReady
from prfaas.engine.port import EngineInfo
from prfaas.ipc import AsyncChannel
from prfaas.kvcache.hashing import unit_keys
from prfaas.kvcache.prefix import PrefixIndex
from prfaas.process import ended
from prfaas.request import TOKEN_BYTES, Match
from tests.vllm.prompts import packed

POOL_BYTES = 64 << 20
SELF = NodeId("")
START_S, ANSWER_S, STOP_S = 900.0, 120.0, 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """All that was said of an attempt up to its end."""

    end: Event
    events: tuple[Event, ...]

    @property
    def tokens(self) -> list[int]:
        packed = b"".join(event.tokens for event in self.events if isinstance(event, Tokens))
        return [int(token) for token in np.frombuffer(packed, "<u4")]


class Engine:
    def __init__(self, info: EngineInfo, channel: AsyncChannel[Event], pool: mmap.mmap) -> None:
        self.info, self.pool, self._channel = info, pool, channel
        #: What it has in its own cache by its own word, and its latest load.
        self.prefixes = PrefixIndex()
        self.load: Load | None = None

    async def told(self, command: Prefill | Decode | Cancel) -> Told:
        """Send a command and hear it out."""
        [told] = await self.all_told([command])
        return told

    async def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        """The tokens that follow, all of it computed here."""
        attempt = f"alone {ids[:3]} {len(ids)}"
        told = await self.told(Decode(attempt=attempt, prompt=packed(ids), tokens=0, max_tokens=max_tokens))
        assert isinstance(told.end, Finished), told.end
        return told.tokens

    async def all_told(self, commands: Sequence[Prefill | Decode | Cancel]) -> list[Told]:
        """Send commands of different attempts together and hear them out. One call at a time."""
        for command in commands:
            self._channel.send(command)
        events: dict[str, list[Event]] = {command.attempt: [] for command in commands}
        told: dict[str, Told] = {}
        async with asyncio.timeout(ANSWER_S):
            while len(told) < len(commands):
                event = await self._heard()
                assert event is not None, "the engine process is gone"
                attempt = getattr(event, "attempt", "")
                if attempt in events:
                    events[attempt].append(event)
                    if isinstance(event, Prefilled | Finished | Failed | Cancelled):
                        told[attempt] = Told(event, tuple(events[attempt]))
        return [told[command.attempt] for command in commands]

    async def until(self, true: Callable[[], bool]) -> None:
        """Hear what it says of itself meanwhile."""
        async with asyncio.timeout(ANSWER_S):
            while not true():
                assert await self._heard() is not None, "the engine process is gone"

    def finds(self, prompt: bytes, salt: bytes) -> Match:
        keys = unit_keys(prompt, self.info.namespace, salt)
        return self.prefixes.match(keys, len(prompt) // TOKEN_BYTES).get(SELF) or Match()

    async def _heard(self) -> Event | None:
        event = await self._channel.receive()
        match event:
            case Prefixes():
                for change in event.changes:
                    self.prefixes.apply(SELF, change)
            case Load():
                self.load = event
        return event


def engine(python: str, vllm_python: str, model_dir: Path, words: Sequence[str]) -> AbstractAsyncContextManager[Engine]:
    """With a server of its own, started with these words."""
    return process(python, model_dir, ("--python", vllm_python, *(f"--argument={word}" for word in words)))


@asynccontextmanager
async def process(python: str, model_dir: Path, options: Sequence[str]) -> AsyncIterator[Engine]:
    """An engine process that has said that it is ready."""
    ours, theirs = socket.socketpair()
    pool_fd = os.memfd_create("test-pool")
    os.ftruncate(pool_fd, POOL_BYTES)
    child = await asyncio.create_subprocess_exec(
        *(python, "-m", "prfaas.engine.vllm.process", "--fd", str(theirs.fileno()), "--pool-fd", str(pool_fd)),
        *("--model", str(model_dir), *options),
        pass_fds=(theirs.fileno(), pool_fd),
    )
    theirs.close()
    channel = await AsyncChannel[Event].over(ours, Event)
    try:
        async with asyncio.timeout(START_S):
            while isinstance(ready := await channel.receive(), Load):
                pass
        assert isinstance(ready, Ready), "the engine process ended while it started"
        yield Engine(ready.info, channel, mmap.mmap(pool_fd, POOL_BYTES))
    finally:
        channel.close()
        await ended(child, STOP_S)
        os.close(pool_fd)
