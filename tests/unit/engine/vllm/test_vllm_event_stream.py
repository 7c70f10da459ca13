"""Cache events over ZMQ, from a publisher that does as vLLM's does: numbered batches, and the latest ones again for
those who ask."""

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from prfaas.engine.vllm.kv_events import Endpoints

pytest.importorskip("zmq", reason="pyzmq comes with the extra vllm")

import zmq
import zmq.asyncio

from prfaas.engine.vllm.event_stream import batches

PATIENCE_S = 20.0
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    def __init__(self, context: zmq.asyncio.Context, endpoints: Endpoints, kept: int) -> None:
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._pub.bind(endpoints.events)
        self._router.bind(endpoints.replay)
        self._kept, self.number, self.asked = deque[tuple[int, bytes]](maxlen=kept), 0, list[int]()

    async def subscribed(self) -> None:
        await self._pub.recv()

    async def publish(self, payload: bytes, *, lost: bool = False) -> None:
        sequence = self.number.to_bytes(8, "big")
        if not lost:
            await self._pub.send_multipart([b"", sequence, payload])
        self._kept.append((self.number, payload))
        self.number += 1

    async def run(self) -> None:
        while True:
            who, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in self._kept:
                if number >= self.asked[-1]:
                    await self._router.send_multipart([who, b"", b"", number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, b"", b"", END, b""])


@asynccontextmanager
async def publishing(kept: int = 100) -> AsyncIterator[tuple[Publisher, Endpoints]]:
    with tempfile.TemporaryDirectory(prefix="zmq-") as folder:
        endpoints = Endpoints(f"ipc://{Path(folder)}/events", f"ipc://{Path(folder)}/replay")
        context = zmq.asyncio.Context()
        publisher = Publisher(context, endpoints, kept)
        task = asyncio.create_task(publisher.run())
        try:
            yield publisher, endpoints
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)


async def test_batches_come_once_and_in_order():
    """Those from before, those from now, and those that were lost on the way."""
    async with publishing() as (publisher, endpoints):
        await publisher.publish(b"0", lost=True)
        await publisher.publish(b"1", lost=True)
        async with aclosing(batches(endpoints)) as stream, asyncio.timeout(PATIENCE_S):
            assert [await anext(stream), await anext(stream)] == [b"0", b"1"]
            await publisher.subscribed()
            await publisher.publish(b"2")
            await publisher.publish(b"3", lost=True)
            await publisher.publish(b"4", lost=True)
            await publisher.publish(b"5")
            await publisher.publish(b"6")
            assert [await anext(stream) for _ in range(5)] == [b"2", b"3", b"4", b"5", b"6"]
        assert publisher.asked == [0, 3]


async def test_what_is_missed_for_good_is_told():
    """Before whatever follows; the server keeps so many batches and no more."""
    async with publishing(kept=2) as (publisher, endpoints):
        for payload in (b"0", b"1", b"2"):
            await publisher.publish(payload, lost=True)
        async with aclosing(batches(endpoints)) as stream, asyncio.timeout(PATIENCE_S):
            assert [await anext(stream) for _ in range(3)] == [None, b"1", b"2"]
            await publisher.subscribed()
            for payload in (b"3", b"4", b"5"):
                await publisher.publish(payload, lost=True)
            await publisher.publish(b"6")
            assert [await anext(stream) for _ in range(3)] == [None, b"5", b"6"]


async def test_without_a_place_to_ask_what_was_before_is_missed():
    async with publishing() as (publisher, endpoints):
        await publisher.publish(b"0", lost=True)
        async with aclosing(batches(Endpoints(endpoints.events))) as stream, asyncio.timeout(PATIENCE_S):
            first = asyncio.ensure_future(anext(stream))
            await publisher.subscribed()
            await publisher.publish(b"1")
            assert [await first, await anext(stream)] == [None, b"1"]
