"""Three members of a real etcd, as workers and routers use them: one of them dies, is silent, or is cut off."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.errors import PeerUnavailable
from prfaas.membership.election import Election
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.etcd_calls import EtcdCalls
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.records import Kind, Measured, key_of
from prfaas.membership.registration import Registration
from prfaas.membership.store import Entry
from prfaas.rpc.v1 import etcd_pb2 as pb
from tests.etcd_process import ETCD, EtcdCluster, EtcdProcess, start_etcd_cluster

LIMIT_S = 40.0
INTERVAL_S = 0.1
PD = RegionId("pd")

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd on this machine: install etcd-server")


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = start_etcd_cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def everybody_asks(members: EtcdCluster) -> tuple[EtcdProcess, tuple[str, ...]]:
    """The leader, and the endpoints in the order in which they are used: its own first."""
    leader = members.leader()
    return leader, (leader.endpoint, *(other.endpoint for other in members.others(leader)))


class Users:
    """A worker, and a router that may lead, each with a connection of its own."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self.stores = [EtcdStore(endpoints) for _ in range(3)]
        mine, theirs, self.aside = self.stores
        node = Node(
            id=NodeId("d"),
            region=PD,
            kind=NodeKind.PD,
            role=Role.DECODE,
            incarnation=Incarnation(7),
            namespace=Namespace("ns"),
            model="tiny",
            rpc_address="d:1",
            max_context_tokens=4096,
        )
        self.active = 3
        self.worker = Registration(mine, "c", node, self._measure, interval_s=INTERVAL_S)
        self.follower = ClusterFollower(theirs, "c", PD)
        self.election = Election(theirs, "c", "r0", lambda: 0)
        self.tasks: list[asyncio.Task[None]] = []

    def _measure(self) -> Measured:
        return Measured(NodeLoad(active_sequences=self.active))

    async def entry(self) -> Entry | None:
        return await self.aside.get(key_of("c", Kind.NODE, "d"))

    async def hears(self, active: int) -> ClusterView:
        """What the worker says now reaches the router."""
        self.active = active
        return await self.follower.wait_for(
            lambda view: NodeId("d") in view.nodes and view.nodes[NodeId("d")].load.active_sequences == active, LIMIT_S
        )

    def check(self) -> None:
        """Nobody has given up, and the worker is as it was."""
        assert not any(task.done() for task in self.tasks)
        node = self.follower.view().nodes[NodeId("d")]
        assert (node.incarnation, node.role) == (7, Role.DECODE)


@asynccontextmanager
async def users(endpoints: tuple[str, ...]) -> AsyncIterator[Users]:
    async with AsyncExitStack() as stack:
        used = Users(endpoints)
        for store in used.stores:
            stack.push_async_callback(store.close)
        used.tasks = [
            asyncio.create_task(each.run(), name=type(each).__name__)
            for each in (used.worker, used.follower, used.election)
        ]
        try:
            await used.hears(3)
            await until(lambda: used.election.leads)
            yield used
        finally:
            for task in used.tasks:
                task.cancel()
            await asyncio.gather(*used.tasks, return_exceptions=True)


async def ended(answers: AsyncGenerator[pb.WatchResponse, None]) -> None:
    """As a watch that follows it finds out: the stream breaks, or says that it is canceled."""
    async for answer in answers:
        if answer.canceled:
            raise PeerUnavailable("store", answer.cancel_reason)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(0.01)


async def test_field_K1_the_leader_of_the_store_is_killed(everybody_asks: tuple[EtcdProcess, tuple[str, ...]]):
    """The others elect one, and all go on with them: under the same lease, with the same incarnation and the same
    leading router, and what the worker says is heard again. The member comes back as if nothing had been."""
    leader, endpoints = everybody_asks
    async with users(endpoints) as used:
        before = await used.entry()
        leader.kill()
        await used.hears(4)
        used.check()
        assert before is not None and await used.entry() == before
        await until(lambda: used.election.leads)
        await asyncio.to_thread(leader.start_again)
        await used.hears(5)
        used.check()


@pytest.mark.slow
async def test_a_member_that_is_cut_off_says_so(
    members: EtcdCluster, everybody_asks: tuple[EtcdProcess, tuple[str, ...]]
):
    """Alone it could be silent for ever: a watch on it would never end, and look like a store in which nothing happens.
    It ends, and when there is a majority again everybody has what they had, and hears what is new."""
    leader, endpoints = everybody_asks
    cut_off = members.others(leader)[0]
    calls = EtcdCalls([cut_off.endpoint], None, None)
    create = pb.WatchCreateRequest(key=b"/", range_end=b"0")
    request = pb.WatchRequest(create_request=create)
    async with users(endpoints) as used:
        watching = aclosing(calls.stream("/etcdserverpb.Watch/Watch", request, pb.WatchResponse))
        try:
            async with watching as answers, asyncio.timeout(LIMIT_S):
                assert (await anext(answers)).created
                before = await used.entry()
                silent = members.others(cut_off)
                for member in silent:
                    member.pause()
                with pytest.raises(PeerUnavailable, match="no leader"):
                    await ended(answers)
        finally:
            await calls.close()
        used.check()
        for member in silent:
            member.resume()
        await used.hears(4)
        used.check()
        assert before is not None and await used.entry() == before


@pytest.mark.slow
async def test_a_member_that_falls_silent_is_left(everybody_asks: tuple[EtcdProcess, tuple[str, ...]]):
    """It keeps all connections and answers nothing. Calls go to another member at once, and so, after the time for a
    ping, do watches; it hears of what it has missed when it is back."""
    leader, endpoints = everybody_asks
    async with users(endpoints) as used:
        leader.pause()
        await used.hears(4)
        used.check()
        await until(lambda: used.election.leads)
        leader.resume()
        await used.hears(5)
        used.check()
