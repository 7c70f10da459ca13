"""The check that a node's advertised addresses lead back to it, made before it joins the cluster.

An address that others cannot reach, or behind which somebody else answers, would otherwise show itself as transfers
that hang (the worker behind a NAT, the port of a node that was replaced).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import grpc
import structlog

from prfaas.cluster import Incarnation, Node, Pool
from prfaas.errors import ConfigError
from prfaas.node.pump_client import PumpClient
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.link_connection import who_answers
from prfaas.rpc.translate import unpack_description
from prfaas.rpc.v1 import cache_pb2
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.cache_pb2_grpc import CachePoolStub
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub
from prfaas.security import PeerRole, role_of

#: Relays and load balancers in front of a worker may start later than it does.
PATIENCE_S = 60.0
PAUSE_S = 0.2
TRY_S = 5.0

Ask = Callable[[], Awaitable[Incarnation | None]]

log = structlog.get_logger()


async def check_addresses(
    node: Node, pump: PumpClient, patience_s: float = PATIENCE_S, identity: Identity | None = None
) -> None:
    """Returns when all addresses lead here. Raises ConfigError naming the one that does not."""
    checks: dict[str, tuple[str, Ask]] = {
        "worker.rpc_advertise": (node.rpc_address, lambda: _who_answers(node, identity))
    }
    if node.link_address:
        checks["worker.link_advertise"] = (node.link_address, lambda: _who_answers_the_link(node, identity))
    for region, address in node.kv_addresses.items():
        checks[f"kv.advertise[{region!r}]"] = (address, _kv_probe(pump, address))
    await _all_lead_to(checks, node.incarnation, patience_s)


async def check_pool_addresses(
    pool: Pool, pump: PumpClient, patience_s: float = PATIENCE_S, identity: Identity | None = None
) -> None:
    """The same for a shard of the cache pool."""
    checks: dict[str, tuple[str, Ask]] = {
        "pool.rpc_advertise": (pool.rpc_address, lambda: _which_shard_answers(pool, identity))
    }
    for region, address in pool.kv_addresses.items():
        checks[f"pool.kv_advertise[{region!r}]"] = (address, _kv_probe(pump, address))
    await _all_lead_to(checks, pool.incarnation, patience_s)


async def _all_lead_to(checks: Mapping[str, tuple[str, Ask]], ours: Incarnation, patience_s: float) -> None:
    wrong: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            for setting, (address, ask) in checks.items():
                group.create_task(_until_here(setting, address, ask, ours, patience_s), name=setting)
    except* ConfigError as failed:
        wrong += failed.exceptions
    # Not above: what is raised inside of `except*` may come out in a group.
    if wrong:
        raise wrong[0]


async def _until_here(setting: str, address: str, ask: Ask, ours: Incarnation, patience_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience_s
    while (found := await ask()) != ours:
        if found is not None:
            raise ConfigError(setting, f"{address} leads to another node")
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigError(setting, f"nobody answers at {address}")
        log.debug("advertised address does not answer yet", setting=setting, address=address)
        await asyncio.sleep(PAUSE_S)


def _kv_probe(pump: PumpClient, address: str) -> Ask:
    async def ask() -> Incarnation | None:
        incarnation = await pump.probe(address)
        return None if incarnation is None else Incarnation(incarnation)

    return ask


async def _who_answers(node: Node, identity: Identity | None) -> Incarnation | None:
    async with dial(identity, role_of(node.kind), node.rpc_address) as channel:
        try:
            answer = await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=TRY_S)
        except grpc.aio.AioRpcError:
            return None
        return unpack_description(answer).incarnation


async def _who_answers_the_link(node: Node, identity: Identity | None) -> Incarnation | None:
    try:
        async with asyncio.timeout(TRY_S):
            return await who_answers(node.link_address, identity, role_of(node.kind))
    except TimeoutError:
        return None


async def _which_shard_answers(pool: Pool, identity: Identity | None) -> Incarnation | None:
    """A shard says first of all which life of it this is."""
    async with dial(identity, PeerRole.CACHE_POOL, pool.rpc_address) as channel:
        watching = CachePoolStub(channel).Watch(cache_pb2.WatchRequest(router=pool.id), timeout=TRY_S)
        try:
            async for update in watching:
                return Incarnation(update.incarnation)
        except grpc.aio.AioRpcError:
            pass
        finally:
            watching.cancel()
        return None
