"""Nodes and regions as the live page shows them: sums for each region, and of the nodes those that need a look first.

One pass over the cluster each time somebody asks; what is told is bounded, however many nodes there are.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind, Role
from prfaas.membership.records import NodeRecord

SERVING, DRAINING, SILENT, GONE = "serving", "draining", "silent", "gone"
#: In this order, before all that serve.
ATTENTION = {SILENT: 0, "converting": 1, DRAINING: 2}
QUIET = len(ATTENTION)
#: Role changes that are told one by one, and nodes that are remembered after they have gone, for so long.
MAX_FLIPS, MAX_GONE, GONE_S = 50, 50, 600.0


class Records(Protocol):
    def record(self, node: NodeId) -> NodeRecord | None: ...

    def report_age_s(self, node: NodeId) -> float | None: ...

    def silent(self) -> Set[NodeId]: ...


@dataclass(slots=True)
class _Region:
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    states: Counter[str] = field(default_factory=Counter)
    queued_prefill_tokens: int = 0
    decoding: int = 0
    waiting_decodes: int = 0
    max_batch: int = 0
    kv_free_bytes: int = 0
    kv_total_bytes: int = 0
    shards: int = 0

    def described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "nodes": self.prefill + self.decode + self.mixed,
            "roles": {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed},
            "states": dict(self.states),
            "queued_prefill_tokens": self.queued_prefill_tokens,
            "decoding": self.decoding,
            "waiting_decodes": self.waiting_decodes,
            "max_batch": self.max_batch,
            "kv_free_bytes": self.kv_free_bytes,
            "kv_total_bytes": self.kv_total_bytes,
            "shards": self.shards,
        }


@dataclass(frozen=True, slots=True)
class Gone:
    node: Node
    since: float


class Departures:
    """Nodes that were there when somebody last looked and are not any more: a table in which a row is missing says
    nothing. Who looks for the first time finds nobody gone."""

    def __init__(self) -> None:
        self._before: Mapping[NodeId, Node] = {}
        self._gone: deque[Gone] = deque(maxlen=MAX_GONE)

    def look(self, nodes: Mapping[NodeId, Node], now: float) -> list[Gone]:
        """The latest first."""
        left = sorted(self._before.keys() - nodes.keys())
        gone = [each for each in self._gone if each.node.id not in nodes and now - each.since < GONE_S]
        gone.extend(Gone(self._before[name], now) for name in left)
        self._before, self._gone = nodes, deque(gone, MAX_GONE)
        return list(reversed(self._gone))


def described_nodes(
    view: ClusterView, records: Records, gone: Iterable[Gone], now: float, *, limit: int, find: str, busiest: bool
) -> dict[str, Any]:
    """`regions`, `nodes` and `flips` of the page. With `find` only the nodes in which all its words occur."""
    regions: dict[str, _Region] = {}
    words = find.lower().split()
    matching: list[tuple[Node, str]] = []
    flips: list[NodeId] = []
    silent = records.silent()
    for name, node in view.nodes.items():
        record = records.record(name)
        state = SILENT if name in silent else _state(node, record)
        region = regions.get(node.region)
        if region is None:
            region = regions[node.region] = _Region()
        _count(region, node, state)
        if _flips(view, node, record):
            flips.append(name)
        if not words or _matches(words, node, state):
            matching.append((node, state))
    for pool in view.pools.values():
        regions.setdefault(pool.region, _Region()).shards += 1
    left = [each for each in gone if not words or _matches(words, each.node, GONE)][:limit]
    order = _busiest_first if busiest else _as_named
    first = heapq.nsmallest(limit - len(left), matching, key=order)
    rows = [*_gone_rows(left, now), *(_row(view, records, node, state) for node, state in first)]
    return {
        "regions": [regions[name].described(name) for name in sorted(regions)],
        "nodes": {"total": len(view.nodes), "matching": len(matching), "gone": len(left), "shown": rows},
        "flips": {
            "total": len(flips),
            "shown": [_flip(view, records, view.nodes[name]) for name in heapq.nsmallest(MAX_FLIPS, flips)],
        },
    }


def _state(node: Node, record: NodeRecord | None) -> str:
    if record is not None and record.phase != SERVING:
        return record.phase
    return DRAINING if node.load.draining else SERVING


def _count(region: _Region, node: Node, state: str) -> None:
    load = node.load
    match node.role:
        case Role.PREFILL:
            region.prefill += 1
        case Role.DECODE:
            region.decode += 1
        case Role.MIXED:
            region.mixed += 1
    region.states[state] += 1
    region.queued_prefill_tokens += load.queued_prefill_tokens
    region.decoding += load.decoding
    region.waiting_decodes += load.waiting_decodes
    region.max_batch += load.max_batch
    region.kv_free_bytes += load.kv_free_bytes
    region.kv_total_bytes += load.kv_total_bytes


def _flips(view: ClusterView, node: Node, record: NodeRecord | None) -> bool:
    """It changes its role, or the plan in force wants it to."""
    if node.kind is not NodeKind.PD:
        return False
    planned = view.plan.shares.get(node.id) if view.plan is not None else None
    phase = record.phase if record is not None else SERVING
    return phase != SERVING or (planned is not None and abs(planned - node.share) > 1e-3)


def _matches(words: list[str], node: Node, state: str) -> bool:
    text = f"{node.id} {node.region} {node.role.value} {state} {node.model} {node.hardware}".lower()
    return all(word in text for word in words)


def _as_named(one: tuple[Node, str]) -> tuple[int, str, str]:
    node, state = one
    return ATTENTION.get(state, QUIET), node.region, node.id


def _busiest_first(one: tuple[Node, str]) -> tuple[float, str]:
    load = one[0].load
    return -(max(load.prefill_busy_ratio or 0.0, load.decode_busy_ratio or 0.0)), one[0].id


def _gone_rows(gone: Iterable[Gone], now: float) -> Iterator[dict[str, Any]]:
    for each in gone:
        node = each.node
        what = {"id": node.id, "region": node.region, "kind": node.kind.value, "role": node.role.value}
        yield {**what, "model": node.model, "hardware": node.hardware, "state": GONE, "gone_seconds": now - each.since}


def _row(view: ClusterView, records: Records, node: Node, state: str) -> dict[str, Any]:
    load, record = node.load, records.record(node.id)
    return {
        "id": node.id,
        "region": node.region,
        "kind": node.kind.value,
        "role": node.role.value,
        "state": state,
        "prefill_share": node.share,
        "planned_share": view.plan.shares.get(node.id) if view.plan is not None else None,
        "epoch": record.epoch if record is not None else None,
        "model": node.model,
        "hardware": node.hardware,
        "report_age_seconds": records.report_age_s(node.id),
        "queued_prefill_tokens": load.queued_prefill_tokens,
        "decoding": load.decoding,
        "waiting_decodes": load.waiting_decodes,
        "max_batch": load.max_batch,
        "prefill_busy_ratio": load.prefill_busy_ratio,
        "decode_busy_ratio": load.decode_busy_ratio,
        "kv_free_bytes": load.kv_free_bytes,
        "kv_total_bytes": load.kv_total_bytes,
        "sent_bytes_per_s": sum(egress.sent_bytes_per_s for egress in load.egress),
    }


def _flip(view: ClusterView, records: Records, node: Node) -> dict[str, Any]:
    record = records.record(node.id)
    return {
        "id": node.id,
        "region": node.region,
        "role": node.role.value,
        "phase": record.phase if record is not None else None,
        "prefill_share": node.share,
        "planned_share": view.plan.shares.get(node.id) if view.plan is not None else None,
        "epoch": record.epoch if record is not None else None,
        "plan_epoch": view.plan.epoch if view.plan is not None else None,
    }
