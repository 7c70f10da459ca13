"""Keeps one worker, or one shard of the cache, registered: its record and its telemetry in the store, under one lease
that only this task renews.

The incarnation never changes while the process lives. An outage of the store costs nothing but time: the worker
serves on, and once the store is back - with its data, without, or after the lease has run out - the same record is
put again. A restarted worker takes its id over at once, without waiting for the lease of its predecessor; a
predecessor that is still alive finds that out and ends with `NodeReplaced`, and never takes the id back.
"""

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog

from prfaas.cluster import Node, NodeId, Pool, Role
from prfaas.errors import DeadlineExceeded, PeerUnavailable, PrfaasError
from prfaas.membership.records import (
    Kind,
    Measured,
    NodeRecord,
    PoolRecord,
    TelemetryRecord,
    encode,
    key_of,
    read_node,
    read_pool,
)
from prfaas.membership.store import Entry, Lease, LeaseExpired, Store

log = structlog.get_logger(__name__)

STOP_S = 2.0


class NodeReplaced(PrfaasError):
    """Another process has registered under this node's id since. `incarnation` is the other's, as hex."""

    def __init__(self, node: str, incarnation: str) -> None:
        super().__init__(f"node {node} has been taken over by incarnation {incarnation}")
        self.node, self.incarnation = node, incarnation


class Registration:
    """`run` in a task of its own. `measure`, if there is something to report, is called about once per `interval_s`, in
    the event loop."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        node: Node | Pool,
        measure: Callable[[], Measured] | None = None,
        *,
        lease_ttl_s: float = 30.0,
        interval_s: float = 1.0,
    ) -> None:
        self._store = store
        self._record: NodeRecord | PoolRecord
        if isinstance(node, Node):
            kind, self._record = Kind.NODE, NodeRecord.of(node)
        else:
            kind, self._record = Kind.POOL, PoolRecord.of(node)
        self._node_key = key_of(cluster, kind, node.id)
        self._telemetry_key = key_of(cluster, Kind.TELEMETRY, node.id)
        self._measure = measure
        self._lease_ttl_s, self._interval_s = lease_ttl_s, interval_s
        self._lease: Lease | None = None
        self._renew_at = self._report_at = 0.0
        self._seq = 0
        #: The record as it stands in the store under our lease.
        self._published: NodeRecord | PoolRecord | None = None
        #: Whether the id has been taken over; from then on it is only defended.
        self._took_over = False
        self._settled, self._woken = asyncio.Event(), asyncio.Event()
        self._stopping = self._cut_off = False

    async def run(self) -> None:
        """Until `stop` or cancellation, both of which remove the node from the store at once. Raises NodeReplaced."""
        try:
            while not self._stopping:
                try:
                    await self._turn()
                    self._cut_off = False
                except LeaseExpired:
                    log.warning("lease_lost", node=self._record.id)
                    self._lease = None
                    self._unsettle()
                except PeerUnavailable as error:
                    if not self._cut_off:
                        log.warning("store_lost", node=self._record.id, detail=error.detail)
                    self._cut_off = True
                await self._pause()
        finally:
            await self._leave()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()

    def update(
        self,
        role: Role,
        *,
        prefill_share: float | None = None,
        epoch: int = 0,
        phase: str = "serving",
        accepting: bool = True,
    ) -> None:
        """Write what the worker has become, as soon as the store can be reached."""
        changed = {"role": role, "prefill_share": prefill_share, "epoch": epoch, "phase": phase, "accepting": accepting}
        record = msgspec.structs.replace(self._record, **changed)
        if record != self._record:
            self._record = record
            self._unsettle()
            self._woken.set()

    async def wait_published(self, timeout_s: float) -> None:
        """Until the store has the node as it is now, and a report of it. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            raise DeadlineExceeded("registration", timeout_s) from None

    async def _turn(self) -> None:
        """Whatever is due, in the order in which one needs the other."""
        now = asyncio.get_running_loop().time
        if self._lease is None:
            ttl_s = math.ceil(self._lease_ttl_s * random.uniform(1.0, 1.2))
            self._lease = await self._store.grant(ttl_s)
            self._renew_at = now() + _renewal_s(ttl_s)
        elif now() >= self._renew_at:
            self._renew_at = now() + _renewal_s(await self._store.keep_alive(self._lease))
            await self._look_after_record(self._lease)
        if self._published != self._record:
            await self._publish(self._lease)
        if self._measure is not None and now() >= self._report_at:
            await self._report(self._lease, self._measure())
            self._report_at = now() + self._interval_s
        if self._published == self._record:
            self._settled.set()

    async def _look_after_record(self, lease: Lease) -> None:
        """Notice who has replaced or deleted it."""
        entry = await self._defended()
        if entry is None or entry.lease != lease:
            self._unsettle()

    async def _publish(self, lease: Lease) -> None:
        record = self._record
        if not self._took_over:
            await self._store.put(self._node_key, encode(record), lease)
            self._took_over = True
        else:
            entry = await self._defended()
            expected = entry.mod_revision if entry else 0
            if await self._store.compare_and_put(self._node_key, encode(record), expected, lease) is None:
                return  # changed while we looked: look again next turn
        self._published = record

    async def _defended(self) -> Entry | None:
        """The node's entry, unless another incarnation has written it since: NodeReplaced."""
        entry = await self._store.get(self._node_key)
        read = read_node if isinstance(self._record, NodeRecord) else read_pool
        other = read(NodeId(self._record.id), entry.value) if entry else None
        if other is not None and other.incarnation != self._record.incarnation:
            raise NodeReplaced(self._record.id, other.incarnation)
        return entry

    async def _report(self, lease: Lease, measured: Measured) -> None:
        self._seq += 1
        telemetry = TelemetryRecord.of(measured, self._record, self._seq)
        await self._store.put(self._telemetry_key, encode(telemetry), lease)

    def _unsettle(self) -> None:
        self._published = None
        self._settled.clear()

    async def _pause(self) -> None:
        """At least the interval, unless woken; a little more at random, so that nodes do not write in step."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s * random.uniform(1.0, 1.2)):
                await self._woken.wait()
        if not self._stopping:
            self._woken.clear()

    async def _leave(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(PeerUnavailable, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._store.revoke(lease)


def _renewal_s(ttl_s: int) -> float:
    """When to renew: early enough for two more tries."""
    return ttl_s / 3 * random.uniform(0.8, 1.0)
