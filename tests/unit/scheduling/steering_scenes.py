"""The case study's cluster, demand and links, as the loops see them."""

import random
from collections.abc import Mapping
from dataclasses import replace

from prfaas.cluster import (
    ClusterView,
    Egress,
    Incarnation,
    LinkState,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    Plan,
    RegionId,
    Role,
)
from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.scheduling.demand import Demand, DemandParams, DemandSnapshot
from prfaas.scheduling.lengths import Lengths

FAR, NEAR = RegionId("far"), RegionId("near")
PROFILES = {hardware: shipped(CASE_STUDY, hardware) for hardware in ("h200", "h20")}
PLAN_T = 19_400
WATCHED_S = 600.0
IDLE = NodeLoad()


def node(name: str, role: Role, *, far: bool = False, load: NodeLoad = IDLE, share: float | None = None) -> Node:
    return Node(
        id=NodeId(name),
        region=FAR if far else NEAR,
        kind=NodeKind.PREFILL_WORKER if far else NodeKind.PD,
        role=role,
        incarnation=Incarnation(1),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        max_context_tokens=1 << 20,
        hardware="h200" if far else "h20",
        prefill_share=share,
        load=load,
    )


def view_of(*nodes: Node, plan: Plan | None = None) -> ClusterView:
    """In the order of the ids: load does not matter to the loops."""
    serving = [each for each in nodes if not each.load.draining]
    pd = [each for each in serving if each.kind is NodeKind.PD]
    return ClusterView(
        nodes={each.id: each for each in nodes},
        remote_prefill=tuple(each.id for each in serving if each.kind is NodeKind.PREFILL_WORKER),
        local_prefill=tuple(each.id for each in pd if each.role.prefills),
        decode=tuple(each.id for each in pd if each.role.decodes),
        plan=plan,
    )


def case_study(n_p: int, n_d: int, *, loads: Mapping[str, NodeLoad] = {}, plan: Plan | None = None) -> ClusterView:
    """Four remote nodes p0.., and PD nodes d0.. of which the first `n_p` prefill."""
    remote = [node(f"p{index}", Role.PREFILL, far=True) for index in range(4)]
    pd = [node(f"d{index}", Role.PREFILL if index < n_p else Role.DECODE) for index in range(n_p + n_d)]
    return view_of(*(replace(each, load=loads.get(each.id, each.load)) for each in (*remote, *pd)), plan=plan)


def demand(
    arrivals_per_s: float, *, mu: float = 9.90, seed: int = 1, watched_s: float = WATCHED_S, output: int | None = 1024
) -> DemandSnapshot:
    """What a router knows after it has watched log-normal prompts for a while."""
    chance, lengths = random.Random(seed), Lengths.log_normal(mu, 1.0, 128, 131_072)
    seen = Demand(DemandParams(), now=0.0)
    for number in range(int(arrivals_per_s * watched_s)):
        at = number / arrivals_per_s
        seen.routed(round(lengths.quantile(chance.random())), at)
        if output is not None:
            seen.finished(output, at)
    seen.check()
    return seen.snapshot(watched_s)


def link(gbps: float | None, *, queued_bytes: int = 0, age_s: float = 0.0) -> LinkState:
    capacity = None if gbps is None else gbps * GBPS
    return LinkState(FAR, NEAR, capacity_bytes_per_s=capacity, queued_bytes=queued_bytes, age_s=age_s)


def sending(
    name: str, *, sent: float, backlogged: float | None = None, queued: int = 0, stalled_s: float | None = None
) -> Node:
    """A remote node and what it sends here, in bytes/s."""
    egress = Egress(
        NEAR, queued_bytes=queued, sent_bytes_per_s=sent, backlogged_bytes_per_s=backlogged, stalled_s=stalled_s
    )
    return node(name, Role.PREFILL, far=True, load=NodeLoad(egress=(egress,)))
