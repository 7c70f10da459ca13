"""What an operator can ask of the cluster and do to it, by way of one router."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind, Plan, Role
from prfaas.errors import InvalidRequest
from prfaas.flows.control import current_threshold, planned_shares
from prfaas.live.control_ports import LiveControlPorts
from prfaas.live.pools import CachePools
from prfaas.live.steering import Steering
from prfaas.membership import direct
from prfaas.membership.election import Election
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.plans import PinRecord, plain
from prfaas.membership.records import EgressRecord
from prfaas.membership.store import Store
from prfaas.request import Mode
from prfaas.scheduling.rebalance import Hold, Proposal
from services.router.explain import described_caches, described_links, described_situation, explanation


class Flip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    prefill_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`force`: even if nobody is left to decode."""

    force: bool = False


#: What a mixed node gives to prefill when nothing is said.
HALF = 0.5


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    mode: Mode | None = None


class Operator:
    """Raises InvalidRequest for what makes no sense, StaleEpoch when somebody was faster, PeerUnavailable without a
    store."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        router: str,
        follower: ClusterFollower,
        election: Election,
        steering: Steering,
        ports: LiveControlPorts,
        threshold_tokens: int,
        caches: CachePools | None = None,
    ) -> None:
        #: Why this router keeps requests from nodes, by node.
        self.shunned: Callable[[], Mapping[NodeId, str]] = dict
        self._caches = caches
        self._store, self._cluster, self._router = store, cluster, router
        self._follower, self._election, self._steering, self._ports = follower, election, steering, ports
        self._threshold_tokens = threshold_tokens

    def workers(self) -> dict[str, Any]:
        view = self._follower.view()
        return {"workers": [self._worker(view, name) for name in sorted(view.nodes)]}

    async def flip(self, name: str, flip: Flip) -> dict[str, Any]:
        """Publish a plan in which this node has the role, and nothing else is changed."""
        view = self._follower.view()
        node = self._node(view, name)
        if node.kind is not NodeKind.PD:
            raise InvalidRequest(f"{name} is a prefill worker: it has one role", param="node")
        if flip.prefill_share is not None and flip.role is not Role.MIXED:
            raise InvalidRequest("prefill_share goes with the role mixed only", param="prefill_share")
        share = {Role.PREFILL: 1.0, Role.DECODE: 0.0, Role.MIXED: flip.prefill_share or HALF}[flip.role]
        if share >= 1 and not _others_decode(view, node):
            raise InvalidRequest(f"{name} is the last node that decodes {node.model}", param="role")
        plan = Plan(
            epoch=1 + view.highest_epoch,
            threshold_tokens=current_threshold(view, self._threshold_tokens),
            shares=planned_shares(view) | {node.id: share},
            reason=f"operator: {name} to {flip.role.value}",
        )
        await direct.publish_plan(self._store, self._cluster, plan, self._router)
        return {"node": name, "role": flip.role.value, "prefill_share": share, "epoch": plan.epoch}

    async def drain(self, name: str, drain: Drain) -> dict[str, Any]:
        view = self._follower.view()
        node = self._node(view, name)
        if not drain.force and node.id in view.decode and not _others_decode(view, node):
            raise InvalidRequest(
                f"{name} is the last node that decodes {node.model}: drained, it leaves none; force it if so meant",
                param="force",
            )
        await direct.drain(self._store, self._cluster, node, self._router)
        return {"node": name, "draining": True}

    async def undrain(self, name: str) -> dict[str, Any]:
        await direct.undrain(self._store, self._cluster, name)
        return {"node": name, "draining": False}

    def threshold(self) -> dict[str, Any]:
        pin, plan = self._follower.direction.pin, self._follower.direction.plan
        situation = described_situation(self._steering.situation)
        return {
            "threshold_tokens": self._steering.routing.threshold_tokens,
            "mode": self._steering.routing.mode.value,
            "decision": situation["threshold"],
            "pinned": plain(pin) if pin is not None else None,
            "plan_threshold_tokens": plan.threshold_tokens if plan is not None else None,
        }

    async def pin(self, pin: Pin) -> dict[str, Any]:
        """Of threshold and mode, what is not given stays as it is pinned."""
        if pin.threshold_tokens is None and pin.mode is None:
            raise InvalidRequest("nothing to pin: give threshold_tokens or mode")
        longest = max((node.max_context_tokens for node in self._follower.view().nodes.values()), default=math.inf)
        if pin.threshold_tokens is not None and pin.threshold_tokens > longest:
            raise InvalidRequest(f"no prompt is longer than {longest} tokens", param="threshold_tokens")
        mode = pin.mode.value if pin.mode is not None else None
        record = PinRecord(threshold_tokens=pin.threshold_tokens, mode=mode, made_by=self._router)
        return {"pinned": plain(await direct.pin(self._store, self._cluster, record))}

    async def unpin(self) -> dict[str, Any]:
        await direct.unpin(self._store, self._cluster)
        return {"pinned": None}

    def scheduler(self) -> dict[str, Any]:
        direction, view = self._follower.direction, self._follower.view()
        demand = self._ports.demand()
        return {
            "router": self._router,
            "leads": self._election.leads,
            "view_age_seconds": self._follower.age_s(),
            "plan": plain(direction.plan) if direction.plan is not None else None,
            "plan_lost": direction.plan_lost,
            "highest_epoch": view.highest_epoch,
            "refused_plans": direction.refused_plans,
            "last_round": _last_round(self._ports.outcome),
            "routers": [plain(record) | {"lengths": None} for record in direction.routers.values()],
            "demand": {
                "arrivals_per_s": demand.arrivals_per_s,
                "requests": demand.counts.total,
                "output_tokens": demand.output_tokens,
            },
            "links": described_links(self._steering.situation.links),
            "cache_index": self.caches(),
        }

    def explain(self, request_id: str) -> dict[str, Any]:
        decided = self._steering.decisions.find(request_id)
        if decided is None:
            raise InvalidRequest(f"no recent request of this router is known as {request_id}", code="not_found")
        return {**explanation(decided), "cache_index": self.caches()}

    def caches(self) -> dict[str, Any] | None:
        """What this router's index has of the cache pools now; None where caching is off."""
        return described_caches(self._caches) if self._caches is not None else None

    def _node(self, view: ClusterView, name: str) -> Node:
        node = view.nodes.get(NodeId(name))
        if node is None:
            raise InvalidRequest(f"there is no worker {name}", param="node", code="not_found")
        return node

    def _worker(self, view: ClusterView, name: NodeId) -> dict[str, Any]:
        node, record, telemetry = view.nodes[name], self._follower.record(name), self._follower.telemetry(name)
        load = node.load
        return {
            "id": name,
            "region": node.region,
            "kind": node.kind.value,
            "role": node.role.value,
            "prefill_share": node.share,
            "planned_share": view.plan.shares.get(name) if view.plan is not None else None,
            "phase": record.phase if record is not None else None,
            "epoch": record.epoch if record is not None else None,
            "draining": load.draining,
            "shunned": self.shunned().get(name),
            "model": node.model,
            "hardware": node.hardware,
            "queued_prefill_tokens": load.queued_prefill_tokens,
            "active_sequences": load.active_sequences,
            "decoding": load.decoding,
            "max_batch": load.max_batch,
            "prefill_busy_ratio": load.prefill_busy_ratio,
            "decode_busy_ratio": load.decode_busy_ratio,
            "kv_free_bytes": load.kv_free_bytes,
            "engine_kv_ratio": load.engine_kv_ratio,
            "egress": [plain(EgressRecord.of(each)) for each in load.egress],
            "counters": telemetry.counters if telemetry is not None else {},
        }


def _others_decode(view: ClusterView, node: Node) -> bool:
    return any(each != node.id and view.nodes[each].model == node.model for each in view.decode)


def _last_round(outcome: Proposal | Hold | None) -> dict[str, Any] | None:
    shares = {"shares": dict(outcome.shares)} if isinstance(outcome, Proposal) else {}
    told = described_outcome(outcome)
    return {**told, **shares} if told is not None else None


def described_outcome(outcome: Proposal | Hold | None) -> dict[str, Any] | None:
    """Of a round of the slow loop, but for what it would have each node do."""
    match outcome:
        case None:
            return None
        case Proposal():
            return {"outcome": "proposal", "reason": outcome.reason}
        case Hold():
            return {"outcome": "hold", "reason": outcome.reason.value, "detail": outcome.detail}
