"""Folds what the store tells into the `ClusterView` that decisions are made from.

Per node the fold keeps the last readable record and the last readable telemetry. What must hold: whatever the order of
repeated events and listings, the view ends as the last listing alone would make it; nothing that the store contains can
make the fold fail. Time enters as an argument and changes two things only:

- *Stale*: telemetry older than `stale_s`, or none of the registered incarnation. Such a node stays, ordered after all
  others: it may serve yet, but its load is not known. When the store is lost every node becomes stale alike, and the
  order among them stays.
- *Unconfirmed*: a key that a new listing does not have, or that has become unreadable. It is kept for `grace_s`, so
  that a store that comes back empty does not empty the cluster before the nodes have registered again. A deletion is a
  fact and removes at once.

The shards of the prefix caches are folded in the same way; their telemetry says what they send. How fresh what is
known of a shard's index is, its own feed says. What the control plane says (plan, pin, drains) is folded beside the
nodes, in `direction`.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from prfaas.cluster import ClusterView, Egress, Node, NodeId, NodeLoad, Pool, RegionId
from prfaas.membership.direction import Direction
from prfaas.membership.ranking import Classes
from prfaas.membership.records import (
    Kind,
    NodeRecord,
    PoolRecord,
    TelemetryRecord,
    key_of,
    parse_key,
    read_node,
    read_pool,
    read_telemetry,
)
from prfaas.membership.store import Deleted, Entry, Put, Resync, StoreEvent

K = TypeVar("K")


class MembershipView:
    def __init__(self, cluster: str, pd_region: RegionId, *, stale_s: float = 10.0, grace_s: float = 30.0) -> None:
        self._cluster = cluster
        self._stale_s, self._grace_s = stale_s, grace_s
        #: Values skipped because they could not be read.
        self.malformed = 0
        self.direction = Direction(cluster, self._highest_seen)
        self._revision = 0
        self._records: dict[NodeId, NodeRecord] = {}
        self._telemetry: dict[NodeId, TelemetryRecord] = {}
        self._pools: dict[NodeId, PoolRecord] = {}
        #: The same object until they change, because who follows them looks often.
        self._pools_now: Mapping[NodeId, Pool] = MappingProxyType({})
        # Both in the order in which they fall due, because what they wait for is equally long for all.
        self._fresh_since: dict[NodeId, float] = {}
        self._unconfirmed_until: dict[str, float] = {}
        self._reports: dict[NodeId, float] = {}
        self._nodes: dict[NodeId, Node] = {}
        self._classes = Classes(pd_region)
        self._view: ClusterView | None = None

    def apply(self, events: Iterable[StoreEvent], now: float) -> None:
        for event in events:
            match event:
                case Resync(snapshot):
                    self._resync(snapshot.entries, now)
                    self._revision = snapshot.revision
                case Put(entry) if entry.mod_revision >= self._revision:
                    self._put(entry, now)
                    self._revision = entry.mod_revision
                case Deleted(key, revision) if revision >= self._revision:
                    self._drop(key)
                    self._revision = revision
                case Put() | Deleted():
                    pass  # repeated, and overtaken by what came since

    def view(self, now: float) -> ClusterView:
        """The same object until something has changed."""
        self._let_time_pass(now)
        if self._view is None:
            self._view = ClusterView(
                nodes=MappingProxyType(self._nodes.copy()),
                remote_prefill=self._classes.remote_prefill.ids(),
                local_prefill=self._classes.local_prefill.ids(),
                decode=self._classes.decode.ids(),
                plan=self.direction.plan_in_force,
                highest_epoch=self.direction.highest_epoch(),
                pools=self._pools_now,
                pool_egress=self._pool_egress(),
            )
        return self._view

    def record(self, node: NodeId) -> NodeRecord | None:
        return self._records.get(node)

    def take_reports(self) -> Mapping[NodeId, float]:
        """Nodes that have reported since this was last asked, and when the last report of each came."""
        reports, self._reports = self._reports, {}
        return reports

    def telemetry(self, node: NodeId) -> TelemetryRecord | None:
        """The last report of the registered incarnation, of a node or of a shard."""
        record, telemetry = self._records.get(node) or self._pools.get(node), self._telemetry.get(node)
        return telemetry if record and telemetry and telemetry.incarnation == record.incarnation else None

    def report_age_s(self, node: NodeId, now: float) -> float | None:
        """Since the last report of the registered incarnation; None when it is stale, or when there is none."""
        since = self._fresh_since.get(node)
        return None if since is None or self.telemetry(node) is None else now - since

    def silent(self) -> Set[NodeId]:
        """Nodes whose load is not known, because they have not reported lately."""
        return self._records.keys() - self._fresh_since.keys()

    def next_due(self) -> float | None:
        """When time alone will change the view next."""
        oldest, doubtful = _first(self._fresh_since), _first(self._unconfirmed_until)
        dues = [oldest[1] + self._stale_s] if oldest else []
        return min([*dues, doubtful[1]] if doubtful else dues, default=None)

    def check(self) -> None:
        assert list(self._fresh_since.values()) == sorted(self._fresh_since.values())
        assert list(self._unconfirmed_until.values()) == sorted(self._unconfirmed_until.values())
        assert self._fresh_since.keys() <= self._telemetry.keys()
        assert self._nodes.keys() == self._records.keys()
        for node in self._nodes.values():
            node.check()
        assert self._pools_now == {name: record.to_pool() for name, record in self._pools.items()}
        self._classes.check()
        self.direction.check()

    def _resync(self, entries: Sequence[Entry], now: float) -> None:
        for entry in entries:
            self._put(entry, now)
        listed = {entry.key for entry in entries}
        known = ((Kind.NODE, self._records), (Kind.TELEMETRY, self._telemetry), (Kind.POOL, self._pools))
        for kind, nodes in known:
            for key in (key_of(self._cluster, kind, node) for node in nodes):
                if key not in listed:
                    self._unconfirm(key, now)
        for key in self.direction.known_keys():
            if key not in listed:
                self._unconfirm(key, now)
                self.direction.unlisted(key)

    def _put(self, entry: Entry, now: float) -> None:
        match parse_key(self._cluster, entry.key):
            case Kind.NODE, node:
                readable = self._put_record(node, entry.value)
            case Kind.TELEMETRY, node:
                readable = self._put_telemetry(node, entry.value, now)
            case Kind.POOL, pool:
                readable = self._put_pool(pool, entry.value)
            case _:
                said = self._put_direction(entry)
                if said is None:
                    return  # whatever newer versions keep beside
                readable = said
        if readable:
            self._unconfirmed_until.pop(entry.key, None)
        else:
            self.malformed += 1
            self._unconfirm(entry.key, now)

    def _put_record(self, node: NodeId, value: bytes) -> bool:
        record = read_node(node, value)
        if record is not None and record != self._records.get(node):
            self._records[node] = record
            self._place(node)
        return record is not None

    def _put_telemetry(self, node: NodeId, value: bytes, now: float) -> bool:
        telemetry = read_telemetry(value)
        # A listing repeats what is known; only another report is news.
        if telemetry is not None and telemetry != self._telemetry.get(node):
            self._telemetry[node] = telemetry
            self._fresh_since.pop(node, None)
            self._fresh_since[node] = self._reports[node] = now
            self._place(node)
        return telemetry is not None

    def _put_pool(self, pool: NodeId, value: bytes) -> bool:
        record = read_pool(pool, value)
        if record is not None and record != self._pools.get(pool):
            self._pools[pool] = record
            self._show_pools()
        return record is not None

    def _pool_egress(self) -> Mapping[NodeId, tuple[Egress, ...]]:
        fresh = {name: self.telemetry(name) for name in self._pools if name in self._fresh_since}
        return MappingProxyType({name: report.load().egress for name, report in fresh.items() if report is not None})

    def _show_pools(self) -> None:
        self._pools_now = MappingProxyType({name: self._pools[name].to_pool() for name in sorted(self._pools)})
        self._view = None

    def _put_direction(self, entry: Entry) -> bool | None:
        readable = self.direction.put(entry.key, entry.value)
        if readable:
            self._direct(entry.key)
        return readable

    def _direct(self, key: str) -> None:
        """The view after the control plane has said something else."""
        node = self.direction.drained_node(key)
        if node is not None:
            self._place(node)
        elif not self.direction.concerns_one_router(key):
            self._view = None

    def _unconfirm(self, key: str, now: float) -> None:
        """The grace begins with the first doubt; further listings without the key do not prolong it."""
        self._unconfirmed_until.setdefault(key, now + self._grace_s)

    def _drop(self, key: str) -> None:
        self._unconfirmed_until.pop(key, None)
        match parse_key(self._cluster, key):
            case Kind.NODE, node if self._records.pop(node, None):
                self._place(node)
            case Kind.TELEMETRY, node if self._telemetry.pop(node, None):
                self._fresh_since.pop(node, None)
                self._place(node)
            case Kind.POOL, pool if self._pools.pop(pool, None):
                self._show_pools()
            case None:
                self.direction.drop(key)
                self._direct(key)

    def _let_time_pass(self, now: float) -> None:
        while (first := _first(self._unconfirmed_until)) and first[1] <= now:
            self._drop(first[0])
        while (oldest := _first(self._fresh_since)) and oldest[1] + self._stale_s <= now:
            del self._fresh_since[oldest[0]]
            self._place(oldest[0])

    def _place(self, node_id: NodeId) -> None:
        """Bring the node and its place in each class up to date with its record and telemetry."""
        self._view = None
        record, telemetry = self._records.get(node_id), self.telemetry(node_id)
        if record is None:
            self._nodes.pop(node_id, None)
            self._classes.remove(node_id)
        else:
            load = telemetry.load() if telemetry else NodeLoad()
            drain = self.direction.drains.get(node_id)
            if not record.accepting or (drain is not None and drain.incarnation == record.incarnation):
                load = replace(load, draining=True)
            node = self._nodes[node_id] = record.to_node(load)
            self._classes.place(node, load_known=telemetry is not None and node_id in self._fresh_since)

    def _highest_seen(self) -> int:
        return max((record.epoch for record in self._records.values()), default=0)


def _first(due: Mapping[K, float]) -> tuple[K, float] | None:
    return next(iter(due.items()), None)
