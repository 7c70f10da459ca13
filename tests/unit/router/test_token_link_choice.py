"""Which adapter of the token link a router takes to a worker, and where a worker says it has one."""

import asyncio

import pytest

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.config import RouterConfig, WorkerConfig
from prfaas.live.link import LinkParams
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.node.run import _link_address
from services.router.serving import connect


def node(link_address: str) -> Node:
    return Node(
        id=NodeId("d0"),
        region=RegionId("b"),
        kind=NodeKind.PD,
        role=Role.MIXED,
        incarnation=Incarnation(1),
        namespace=Namespace("n"),
        model="m",
        rpc_address="127.0.0.1:1",
        link_address=link_address,
        max_context_tokens=4096,
    )


@pytest.mark.parametrize(
    ("setting", "advertised", "adapter", "address"),
    [
        ("tcp", "127.0.0.1:2", TcpTokenLink, "127.0.0.1:2"),
        ("tcp", "", GrpcTokenLink, "127.0.0.1:1"),
        ("grpc", "127.0.0.1:2", GrpcTokenLink, "127.0.0.1:1"),
    ],
    ids=["both sides have TCP", "a worker of an older version", "as the router is set"],
)
async def test_a_router_takes_tcp_where_both_sides_have_it(setting: str, advertised: str, adapter: type, address: str):
    """Otherwise gRPC, which every worker has."""
    link = connect(LinkParams(), LinkCounters(), None, setting, node(advertised))
    assert isinstance(link, adapter)
    assert link.address == address
    await asyncio.wait_for(link.close(), 5.0)


def test_tcp_is_the_default():
    assert RouterConfig().token_link == "tcp"


@pytest.mark.parametrize(
    ("own", "address"),
    [
        (WorkerConfig(rpc_host="10.0.0.1"), "10.0.0.1:7"),
        (WorkerConfig(link_advertise="relay:9"), "relay:9"),
        (WorkerConfig(rpc_advertise="relay:8", link_advertise="relay:9"), "relay:9"),
        (WorkerConfig(rpc_advertise="relay:8"), ""),
    ],
    ids=["as bound", "as told", "behind a relay", "behind a relay for gRPC alone"],
)
def test_a_worker_advertises_no_link_that_would_lead_nowhere(own: WorkerConfig, address: str):
    """Behind a relay that knows of gRPC only, the bound address is one that routers cannot reach."""
    assert _link_address(own, 7) == address
