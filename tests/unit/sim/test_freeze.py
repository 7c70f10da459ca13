"""A node that is stopped for a while: nothing is lost by it, and nothing happens before it goes on."""

import pytest

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import PeerUnavailable
from prfaas.request import AttemptId, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.routing import RoutingParams
from prfaas.sim.cluster import SimCluster
from prfaas.sim.instance import Costs
from prfaas.sim.kernel import Kernel
from prfaas.sim.serve_ports import SimServePorts

NODE, ATTEMPT = NodeId("d0"), AttemptId("a")
REQUEST = Request(id=RequestId("r"), model="m", prompt=bytes(40), sampling=Sampling(max_tokens=4))
ROUTE = Route(
    prefill=NODE, decode=NODE, path=Path.LOCAL, reason=Reason.SHORT_PROMPT, uncached_tokens=10, transfer_tokens=0,
    threshold_tokens=300,
)  # fmt: skip


class Desk:
    def __init__(self) -> None:
        self.kernel = Kernel(0)
        node = Node(
            id=NODE,
            region=RegionId("near"),
            kind=NodeKind.PD,
            role=Role.MIXED,
            incarnation=Incarnation(1),
            namespace=Namespace("ns"),
            model="m",
            rpc_address="",
            kv_addresses={"": "d0:7000"},
            max_context_tokens=100_000,
        )
        self.cluster = SimCluster(self.kernel, [node], Costs())
        self.ports = SimServePorts(self.cluster, RoutingParams(threshold_tokens=300))
        self.worker = self.cluster.workers[NODE]

    def reserve(self):
        return self.kernel.spawn(self.ports.reserve(ATTEMPT, REQUEST, ROUTE), "reserve")

    def run_for(self, seconds: float) -> None:
        self.kernel.run_until(self.kernel.now() + seconds)


def test_what_a_frozen_node_is_told_waits():
    """A command and what ends it, in that order."""
    desk = Desk()
    desk.cluster.freeze(desk.worker)
    reserving = desk.reserve()
    desk.run_for(5.0)
    assert not reserving.done and desk.worker.committed_tokens == 0
    desk.cluster.thaw(desk.worker)
    desk.run_for(1.0)
    assert reserving.result().attempt == ATTEMPT and desk.worker.committed_tokens == 14
    desk.cluster.freeze(desk.worker)
    desk.ports.release(NODE, ATTEMPT)
    desk.run_for(5.0)
    assert desk.worker.committed_tokens == 14
    desk.cluster.thaw(desk.worker)
    desk.cluster.check_idle()


def test_a_node_that_dies_frozen_never_answers():
    """Its callers find their connections broken, and its next life knows of nothing."""
    desk = Desk()
    desk.cluster.freeze(desk.worker)
    reserving = desk.reserve()
    desk.run_for(1.0)
    desk.cluster.kill(NODE)
    desk.cluster.restart(NODE)
    desk.cluster.thaw(desk.worker)
    with pytest.raises(PeerUnavailable):
        desk.run_for(1.0)
    assert reserving.done
    assert not desk.cluster.is_frozen(desk.cluster.workers[NODE])
    desk.cluster.check_idle()
