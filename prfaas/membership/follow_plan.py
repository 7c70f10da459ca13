"""What a worker follows in the store: the plan, and whether an operator wants this life of it to take nothing new.

Two keys of its own, never the whole cluster: a thousand workers that each read the telemetry of all others would be a
million messages a second. While the store is lost, and when it comes back without a plan, the last one stands.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from prfaas.cluster import Incarnation, NodeId, Plan
from prfaas.membership.plans import DrainRecord, PlanRecord, drains_prefix, plan_key, read
from prfaas.membership.store import Deleted, Put, Resync, Store

log = structlog.get_logger(__name__)


class PlanFollower:
    """`run` in a task of its own. `held` is told whether the node is to take nothing new."""

    def __init__(
        self, store: Store, cluster: str, node: NodeId, incarnation: Incarnation, held: Callable[[bool], None]
    ) -> None:
        self._store, self._held = store, held
        self._incarnation = f"{incarnation:016x}"
        self._plan_key, self._drain_key = plan_key(cluster), drains_prefix(cluster) + node
        self._plan: Plan | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._plan_key, self._read_plan), name="plan")
            tasks.create_task(self._follow(self._drain_key, self._read_drain), name="drain")

    async def plan_other_than(self, seen: Plan | None) -> Plan:
        while self._plan is None or self._plan == seen:
            changed = self._changed
            await changed.wait()
        return self._plan

    async def _follow(self, key: str, read_value: Callable[[bytes | None], None]) -> None:
        """Watches are for prefixes; other keys that begin alike are not meant."""
        async with aclosing(self._store.watch(key)) as batches:
            async for batch in batches:
                for event in batch:
                    match event:
                        case Resync(snapshot):
                            read_value(next((e.value for e in snapshot.entries if e.key == key), None))
                        case Put(entry) if entry.key == key:
                            read_value(entry.value)
                        case Deleted(gone) if gone == key:
                            read_value(None)

    def _read_plan(self, value: bytes | None) -> None:
        record = read(PlanRecord, value) if value is not None else None
        if record is None:
            if value is not None:
                log.warning("unreadable_plan")
            return
        self._plan = record.to_plan()
        self._changed.set()
        self._changed = asyncio.Event()

    def _read_drain(self, value: bytes | None) -> None:
        record = read(DrainRecord, value) if value is not None else None
        self._held(record is not None and record.incarnation == self._incarnation)
