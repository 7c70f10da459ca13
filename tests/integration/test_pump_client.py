"""What a node asks of its pump for an extent, and what it hears of it."""

import asyncio
import mmap
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prfaas.errors import InvalidRequest, Overloaded, TransferFailed
from prfaas.kvcache.layout import Extent, Window, chunk_ends
from prfaas.node.children import pump_child
from prfaas.node.pump_client import PumpClient
from prfaas.request import AttemptId
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import LAYOUT, LIVENESS_S, NODE, POOL_BYTES, attempt_id, scattered, start_message

EXTENT, ENDS = Extent(64, 640), chunk_ends(640, 64)[1:]


@asynccontextmanager
async def client(incarnation: int) -> AsyncIterator[tuple[PumpClient, int, memoryview]]:
    async with pump_child("kv.pool_bytes", POOL_BYTES) as (child, fd), asyncio.timeout(3 * LIVENESS_S):
        pump = PumpClient(NODE, child.channel)
        running = asyncio.create_task(pump.run())
        try:
            yield pump, await pump.start(start_message(incarnation)), memoryview(mmap.mmap(fd, POOL_BYTES))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def send(attempt: str, port: int, there: m.Reserved, extent: Extent | None = None) -> m.Send:
    return m.Send(
        attempt=attempt,
        address=f"127.0.0.1:{port}",
        peer_incarnation=1,
        generation=there.generation,
        chunk_ends=ENDS,
        extent=extent,
        ticket=there.ticket,
        key_out=there.key_out,
        key_back=there.key_back,
    )


async def test_a_node_moves_an_extent_between_its_own_memory_and_a_span() -> None:
    """Of a span that holds more, into windows of the node's; bytes are counted by where they came from."""
    async with client(2) as (source, _, near), client(1) as (target, port, far):
        attempt, windows = AttemptId(attempt_id()), scattered(EXTENT, ENDS, 4096, random.Random(1))
        there = await target.bring(attempt, EXTENT, windows, 60.0, receive=True, source=NODE, source_region="east")
        here = await source.reserve(attempt, Extent(0, 640, (640,)), 60.0, receive=False)
        ours = LAYOUT.extent_parts(EXTENT, ENDS, (Window(0, 640, here.span, state=True),))
        theirs = LAYOUT.extent_parts(EXTENT, ENDS, windows)
        for part in ours:
            near[part.offset : part.offset + part.nbytes] = random.Random(part.index).randbytes(part.nbytes)
        source.send(send(attempt, port, there, EXTENT))
        source.parts_ready(attempt, range(len(ours)))
        sent, received = await source.moved(attempt), await target.moved(attempt)
        assert sent.payload_bytes == received.payload_bytes == LAYOUT.extent_bytes(EXTENT) == target.received["east"]
        for mine, other in zip(ours, theirs, strict=True):
            assert near[mine.offset : mine.offset + mine.nbytes] == far[other.offset : other.offset + other.nbytes]
        assert await target.stopped(attempt) == 640
        await source.release(attempt)
        await target.release(attempt)


async def test_a_get_that_is_stopped_says_up_to_where_it_is_good() -> None:
    """And one that is released ends for whoever waits for it."""
    async with client(1) as (target, _, _):
        for stop in (True, False):
            attempt = AttemptId(attempt_id())
            windows = scattered(EXTENT, ENDS, 0, random.Random(2))
            await target.bring(attempt, EXTENT, windows, 60.0, receive=True, source=NODE)
            waiting = asyncio.create_task(target.moved(attempt))
            await asyncio.sleep(0)
            if stop:
                assert await target.stopped(attempt) == EXTENT.first
            await target.release(attempt)
            with pytest.raises(TransferFailed):
                await waiting


async def test_memory_that_does_not_hold_the_extent_is_our_own_mistake() -> None:
    """It is told apart from a pool that has no room, which may have some later."""
    async with client(1) as (target, _, _):
        with pytest.raises(InvalidRequest, match="no window holds the rows 64:65"):
            await target.bring(AttemptId(attempt_id()), EXTENT, (Window(128, 640, 0),), 60.0, receive=True)
        with pytest.raises(Overloaded):
            await target.reserve(AttemptId(attempt_id()), Extent(0, 1 << 20), 60.0, receive=True)
