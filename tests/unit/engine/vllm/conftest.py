"""Both ends of the bridge, joined by a real socket and real memory, without a vLLM server between them."""

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.vllm.bridge import Hello, News
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.geometry import attention_layer, in_order, recurrent_layer

torch = pytest.importorskip("torch")

from prfaas.engine.vllm.copies import Copies  # noqa: E402
from prfaas.engine.vllm.rows import Rows  # noqa: E402

POOL_BYTES, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH, STATE_BYTES = 1 << 16, 8, 16, 2, 4, 96
ROW = 2 * HEADS * WIDTH
LIVENESS_S = 30.0
ATTENTION, RECURRENT = "model.layers.0.attn", "model.layers.1.mixer"
GEOMETRY = in_order(
    [
        attention_layer(ATTENTION, 0, BLOCK_TOKENS, "float32", HEADS, WIDTH, WIDTH),
        recurrent_layer(RECURRENT, 1, BLOCK_TOKENS, "mamba2", [("float32", (6, 4))], STATE_BYTES),
    ]
)


class Paused(Rows):
    """Rows that are read only when they may be. `reading`: one is being read now."""

    def __init__(self, cache: Any, order: Any) -> None:
        super().__init__(cache, order)
        self.may, self.reading = threading.Event(), threading.Event()
        self.may.set()

    def read(self, *args: Any) -> None:
        self.reading.set()
        assert self.may.wait(LIVENESS_S)
        super().read(*args)


@dataclass
class Joined:
    """The engine process's end, the connector's, and what it copies from and to. `gone`: the connector has seen the
    other end close. What it says is kept in `news`, and told to `heard`."""

    bridge: Bridge
    copies: Copies
    rows: Paused
    cache: Any
    states: Any
    pool: mmap.mmap
    running: asyncio.Task[None]
    gone: threading.Event
    news: list[News] = field(default_factory=list)
    heard: Callable[[News], None] = lambda news: None

    def close(self) -> None:
        """The connector's process ends."""
        channel = self.copies._line._channel
        assert channel is not None
        channel._sock.shutdown(socket.SHUT_RDWR)


async def until(condition: Callable[[], Any]) -> None:
    """It comes true; what it is about happens in another thread or task."""
    async with asyncio.timeout(LIVENESS_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


Join = Callable[[], AbstractAsyncContextManager[Joined]]


@pytest.fixture
def join(tmp_path: Path) -> Join:
    @asynccontextmanager
    async def begin() -> AsyncIterator[Joined]:
        order = torch.arange(BLOCK_TOKENS * ROW).view(BLOCK_TOKENS, ROW)
        cache = torch.randn(BLOCKS, BLOCK_TOKENS, HEADS, 2 * WIDTH)
        states = torch.randint(0, 255, (BLOCKS, STATE_BYTES), dtype=torch.uint8)
        memory = [os.memfd_create(name) for name in ("pool", "shelf")]
        for descriptor in memory:
            os.ftruncate(descriptor, POOL_BYTES)
        path, rows, gone, each = str(tmp_path / "bridge"), Paused(cache, order), threading.Event(), list[Joined]()

        def hear(news: News) -> None:
            each[0].news.append(news)
            each[0].heard(news)

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.setblocking(False)
            bridge, copies = await asyncio.gather(
                Bridge.accept(listener, memory, hear),
                asyncio.to_thread(Copies, path, Hello(GEOMETRY, "none"), {0: rows}, {1: states}, gone.set),
            )
        pool = mmap.mmap(memory[0], POOL_BYTES)
        for descriptor in memory:
            os.close(descriptor)
        running = asyncio.create_task(bridge.run())
        each.append(Joined(bridge, copies, rows, cache, states, pool, running, gone))
        try:
            yield each[0]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            bridge._channel.close()
            assert await asyncio.to_thread(gone.wait, LIVENESS_S)

    return begin
