"""A worker whose node stands still: its router finds out by itself, and that it is back, too."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import PeerUnavailable
from prfaas.live.link import LinkParams, LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.request import AttemptId

PARAMS = LinkParams(connect_s=0.5, keepalive_s=0.3, keepalive_timeout_s=0.3, backoff_s=0.05, max_backoff_s=0.2)
LIVENESS_S = 20.0
WORKER = NodeId("d0")


def node(port: int, incarnation: int = 1) -> Node:
    return Node(
        id=WORKER,
        region=RegionId("b"),
        kind=NodeKind.PD,
        role=Role.DECODE,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("n"),
        model="m",
        rpc_address="",
        link_address=f"127.0.0.1:{port}",
        max_context_tokens=1000,
    )


@asynccontextmanager
async def worker(port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    script = Path(__file__).with_name("scripted_worker.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(script), WORKER, "1", str(port), "--link", "tcp"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        yield process, int(await asyncio.wait_for(process.stdout.readline(), LIVENESS_S))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@pytest_asyncio.fixture
async def links() -> AsyncIterator[LinkPool]:
    counters = LinkCounters()
    links = LinkPool(lambda to: TcpTokenLink(to.link_address, to.id, to.incarnation, params=PARAMS, counters=counters))
    mending = asyncio.create_task(links.mend())
    yield links
    mending.cancel()
    await asyncio.gather(mending, return_exceptions=True)
    await links.close()


async def until(links: LinkPool, broken: frozenset[NodeId]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while links.broken() != broken:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def test_field_C12_a_node_that_stands_still_is_shunned_until_it_goes_on(links: LinkPool):
    """SIGSTOP leaves its sockets open and its connection accepted. The open attempt fails in time, the node counts as
    broken without another request having to find out, and it is back by itself once it goes on."""
    async with worker() as (process, port):
        leg = await links.link(node(port)).open(AttemptId("ab" * 16), 8)
        waiting = asyncio.create_task(leg.next())
        assert links.broken() == frozenset()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerUnavailable, match="no sign of life"):
            await asyncio.wait_for(waiting, LIVENESS_S)
        await until(links, frozenset({WORKER}))
        # Attempts to reach it go on, and none of them is taken for success.
        with pytest.raises(PeerUnavailable):
            await links.link(node(port)).open(AttemptId("cd" * 16), 8)
        process.send_signal(signal.SIGCONT)
        await until(links, frozenset())
        await links.link(node(port)).open(AttemptId("ef" * 16), 8)


async def test_a_node_that_has_died_stays_broken_until_its_next_life(links: LinkPool):
    """The link to an earlier life is dropped with it, before anybody asks for the next one."""
    async with worker() as (process, port):
        await links.link(node(port)).open(AttemptId("ab" * 16), 8)
        process.kill()
        await process.wait()
        await until(links, frozenset({WORKER}))
    links.retain(ClusterView(nodes={WORKER: node(port, incarnation=2)}))
    assert links.broken() == frozenset()
