"""What workers count reaches the profiles that a router plans by: registration, store, follower, loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.live.control_ports import LiveControlPorts
from prfaas.live.pace import MICROSECONDS, SEQUENCES, STEPS
from prfaas.live.steering import Steering
from prfaas.membership.election import Election
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.memory import MemoryStore
from prfaas.membership.records import Measured
from prfaas.membership.registration import Registration
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.profile import CASE_STUDY, shipped
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.rule import RoutingParams

LIMIT_S, INTERVAL_S = 30.0, 0.02
PD = RegionId("b")
H20 = shipped(CASE_STUDY, "h20")
NODE = Node(
    id=NodeId("d0"),
    region=PD,
    kind=NodeKind.PD,
    role=Role.DECODE,
    incarnation=Incarnation(7),
    namespace=Namespace("n"),
    model="m",
    rpc_address="127.0.0.1:1",
    max_context_tokens=1000,
    hardware="h20",
)


class SlowDecoder:
    """Its steps take three times as long as the profile says."""

    def __init__(self) -> None:
        self._reports, self._steps, self._sequences, self._seconds = 0, 0, 0, 0.0

    def measure(self) -> Measured:
        assert H20.decode is not None
        batch, self._reports = 1 + self._reports % 20, self._reports + 1
        self._steps += 40
        self._sequences += 40 * batch
        self._seconds += 40 * 3 * H20.decode.step_s(batch)
        counters = {STEPS: self._steps, SEQUENCES: self._sequences, MICROSECONDS: round(1e6 * self._seconds)}
        return Measured(NodeLoad(), counters)


@asynccontextmanager
async def two_clients() -> AsyncIterator[tuple[EtcdStore, EtcdStore]]:
    server = EmbeddedStoreServer(MemoryStore(), "127.0.0.1", 0)
    await server.start()
    clients = (EtcdStore([f"127.0.0.1:{server.port}"]), EtcdStore([f"127.0.0.1:{server.port}"]))
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()
        await server.stop()


async def test_a_router_learns_how_long_decode_steps_take():
    """From what their nodes count, by way of the store."""
    async with two_clients() as (theirs, ours):
        follower = ClusterFollower(ours, "c", PD, reported=lambda node, at: ports.report(node, at))
        steering = Steering(PD, RoutingParams(1000, profiles={"h20": H20}), 0.0, DemandParams())
        election = Election(ours, "c", "r0", lambda: 0)
        ports = LiveControlPorts(ours, "c", "r0", follower, election, steering, "auto")
        worker = Registration(theirs, "c", NODE, SlowDecoder().measure, lease_ttl_s=30.0, interval_s=INTERVAL_S)
        tasks = [asyncio.create_task(story) for story in (follower.run(), worker.run())]
        try:
            async with asyncio.timeout(LIMIT_S):
                while ports.profiles()["h20"] is H20:
                    ports.reports()
                    await asyncio.sleep(INTERVAL_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found = ports.profiles()["h20"]
        assert found.decode is not None and H20.decode is not None and found.prefill is H20.prefill
        assert 2.5 < found.decode.step_s(10) / H20.decode.step_s(10) < 3.5
