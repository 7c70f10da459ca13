"""Batches of a vLLM server's cache events over ZMQ, each once and in order.

vLLM numbers them from 0. Whoever listens hears nothing of what was published before and, when he is slow, not all of
what comes after; the server keeps the latest ones for those who ask again. What it has no more is missed for good, and
None stands for that: nothing of what was known then holds.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import structlog
import zmq
import zmq.asyncio

from prfaas.engine.vllm.kv_events import Endpoints

#: The publisher looks for who asks ten times a second, and between two batches.
REPLAY_S = 10.0
#: Batches that may wait here; what is beyond that is asked for again.
WAITING = 10_000

#: The number that ends a replay.
_END = (-1).to_bytes(8, "big", signed=True)

log = structlog.get_logger()


async def batches(endpoints: Endpoints) -> AsyncGenerator[bytes | None, None]:
    """Without end, from the first one that there was."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.rcvhwm = WAITING
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoints.events)
        expected = 0
        async with aclosing(_numbered(context, socket, endpoints)) as numbered:
            async for number, payload in numbered:
                if number > expected:
                    yield None
                if number >= expected:
                    expected = number + 1
                    yield payload
    finally:
        socket.close()
        context.destroy(linger=0)


async def _numbered(
    context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, endpoints: Endpoints
) -> AsyncGenerator[tuple[int, bytes], None]:
    """What was published so far, then what comes; before what follows on a hole, what fills it. Some come twice."""
    expected = 0
    async for number, payload in _replayed(context, endpoints, expected):
        expected = number + 1
        yield number, payload
    while True:
        frames = await socket.recv_multipart()
        if len(frames) != 3:  # of another publisher
            continue
        _, sequence, payload = frames
        number = int.from_bytes(sequence, "big")
        if number > expected:
            log.info("batches of cache events were missed", first=expected, stop=number)
            async for found, content in _replayed(context, endpoints, expected):
                expected = found + 1
                yield found, content
        expected = max(expected, number + 1)
        yield number, payload


async def _replayed(context: zmq.asyncio.Context, endpoints: Endpoints, first: int) -> AsyncIterator[tuple[int, bytes]]:
    """What the server still has from that number on; nothing, if it does not answer in time."""
    if not endpoints.replay:
        return
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        socket.connect(endpoints.replay)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            async with asyncio.timeout(REPLAY_S):
                *_, sequence, payload = await socket.recv_multipart()
            if sequence == _END:
                return
            yield int.from_bytes(sequence, "big"), payload
    except TimeoutError:
        log.warning("the server does not send its cache events again", endpoint=endpoints.replay)
    finally:
        socket.close()
