"""What each simulated node tells the store about itself: that it is there, and once a report period what it measures.

By the rules of `membership.registration`: one lease for both keys, a record that is put again when the store lost it
or when the node has changed, and no report while the store cannot be reached. A dead node goes silent, and its keys go
with its lease.
"""

from prfaas.cluster import Egress, NodeLoad
from prfaas.errors import PeerUnavailable
from prfaas.membership.records import Kind, Measured, NodeRecord, TelemetryRecord, encode, key_of
from prfaas.membership.store import Lease, LeaseExpired
from prfaas.sim.cluster import SimCluster
from prfaas.sim.store import SimStore
from prfaas.sim.worker import SimWorker

LEASE_TTL_S = 30
#: A backlog shorter than this, within one report, says nothing about the line.
LEAST_BACKLOG_S = 0.05


class Reporter:
    """Of one life of a node. It registers at once, and then reports at each period, `offset_s` into it."""

    def __init__(
        self, cluster: SimCluster, store: SimStore, name: str, worker: SimWorker, period_s: float, offset_s: float
    ) -> None:
        self._cluster, self._store, self._worker = cluster, store, worker
        self._node_key = key_of(name, Kind.NODE, worker.node.id)
        self._telemetry_key = key_of(name, Kind.TELEMETRY, worker.node.id)
        self._period_s = period_s
        self.record = NodeRecord.of(worker.node)
        self._published: NodeRecord | None = None
        self._lease: Lease | None = None
        self._seq = 0
        self._meter = Meter(cluster, worker)
        self.update(self.record)
        cluster.kernel.call_later(offset_s, self._report)

    @property
    def draining(self) -> bool:
        return self.record.phase == "draining"

    def _report(self) -> None:
        if self._worker.died.is_set:
            return
        self._cluster.kernel.call_later(self._period_s, self._report)
        if self._cluster.cut_off(self._worker) or self._cluster.is_frozen(self._worker):
            return
        try:
            self._publish()
        except PeerUnavailable:
            pass  # the next report comes soon
        except LeaseExpired:
            self._lease = self._published = None

    def _publish(self) -> None:
        store = self._store
        if self._lease is None:
            self._lease = store.grant_now(LEASE_TTL_S)
        else:
            store.renew_now(self._lease)
        if self._published != self.record:
            store.put_now(self._node_key, encode(self.record), self._lease)
            self._published = self.record
        self._seq += 1
        telemetry = TelemetryRecord.of(Measured(self._meter.load()), self.record, self._seq)
        store.put_now(self._telemetry_key, encode(telemetry), self._lease)

    def update(self, record: NodeRecord) -> None:
        """Tell of a change at once, if the store can be reached."""
        self.record = record
        if not self._worker.died.is_set and not self._cluster.cut_off(self._worker):
            try:
                self._publish()
            except (PeerUnavailable, LeaseExpired):
                self._published = None


class Meter:
    """Rates and ratios since the last report."""

    def __init__(self, cluster: SimCluster, worker: SimWorker) -> None:
        self._cluster, self._worker = cluster, worker
        self._at_s = cluster.kernel.now()
        self._prefill_busy_s = 0.0
        self._sent: dict[tuple[str, str], tuple[float, float, float]] = {}

    def load(self) -> NodeLoad:
        now = self._cluster.kernel.now()
        elapsed_s, self._at_s = now - self._at_s, now
        busy_s = self._worker.engine.prefill_busy_s
        prefill_s, self._prefill_busy_s = busy_s - self._prefill_busy_s, busy_s
        busy_ratio = min(1.0, prefill_s / elapsed_s) if elapsed_s > 0 else None
        return self._worker.load(tuple(self._egress(elapsed_s)), busy_ratio)

    def _egress(self, elapsed_s: float) -> list[Egress]:
        node, told = self._worker.node, []
        for (source, target), line in self._cluster.lines.items():
            if source != node.region:
                continue
            sender = line.sender(node.id)
            now = (sender.sent_bytes, sender.backlogged_bytes, sender.backlogged_s)
            before = self._sent.get((source, target), (0.0, 0.0, 0.0))
            self._sent[source, target] = now
            sent, backlogged, seconds = (a - b for a, b in zip(now, before, strict=True))
            queued = line.queued_bytes(node.id)
            told.append(
                Egress(
                    region=target,
                    queued_bytes=queued,
                    sent_bytes_per_s=sent / elapsed_s if elapsed_s > 0 else 0.0,
                    backlogged_bytes_per_s=backlogged / seconds if seconds >= LEAST_BACKLOG_S else None,
                    stalled_s=(0.0 if sent else seconds) if queued else None,
                )
            )
        return told
