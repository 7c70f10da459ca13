"""The check that a worker's advertised addresses lead back to it, made before it joins the cluster.

An address that others cannot reach, or behind which somebody else answers, would otherwise show itself as transfers
that hang (the worker behind a NAT, the port of a node that was replaced).
"""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import structlog

from prfaas.cluster import Incarnation, Node
from prfaas.errors import ConfigError
from prfaas.node.pump_client import PumpClient
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.translate import unpack_description
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub
from prfaas.security import role_of

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
    for region, address in node.kv_addresses.items():
        checks[f"kv.advertise[{region!r}]"] = (address, _kv_probe(pump, address))
    try:
        async with asyncio.TaskGroup() as group:
            for setting, (address, ask) in checks.items():
                group.create_task(_until_here(setting, address, ask, node.incarnation, patience_s), name=setting)
    except* ConfigError as failed:
        raise failed.exceptions[0] from None


async def _until_here(setting: str, address: str, ask: Ask, ours: Incarnation, patience_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience_s
    while (found := await ask()) != ours:
        if found is not None:
            raise ConfigError(setting, f"{address} leads to another worker")
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
