"""Writes what the control plane says into the store. The reading halves are `direction` (routers) and `follow_plan`
(workers).
"""

from prfaas.cluster import Node, Plan
from prfaas.errors import PeerUnavailable, StaleEpoch
from prfaas.membership.plans import (
    DrainRecord,
    PinRecord,
    PlanRecord,
    drains_prefix,
    pin_key,
    plan_key,
    read,
    readable,
)
from prfaas.membership.store import Store

#: A pin that others write at the same time, or whose answer is lost, is read again so often.
PIN_ATTEMPTS = 3


async def publish_plan(store: Store, cluster: str, plan: Plan, made_by: str) -> None:
    """Put the plan in force. Raises StaleEpoch when one of its epoch or a later one is there, PeerUnavailable."""
    key, record = plan_key(cluster), PlanRecord.of(plan, made_by)
    entry = await store.get(key)
    _check_newer(record, entry.value if entry else None)
    value = readable(record)
    if await store.compare_and_put(key, value, entry.mod_revision if entry else 0) is None:
        # Somebody was faster, or it was we and the answer was lost.
        entry = await store.get(key)
        if entry is None:
            raise PeerUnavailable("store", "the plan was deleted while it was being written")
        if entry.value != value:
            _check_newer(record, entry.value)
            raise PeerUnavailable("store", "the plan changed while it was being written")


def _check_newer(record: PlanRecord, value: bytes | None) -> None:
    there = read(PlanRecord, value) if value is not None else None
    if there is not None and there.epoch >= record.epoch:
        raise StaleEpoch(seen=record.epoch, current=there.epoch)


async def pin(store: Store, cluster: str, record: PinRecord) -> PinRecord:
    """Pin what the record says; what it leaves open stays as it is pinned. What is in force then. Raises
    PeerUnavailable."""
    key = pin_key(cluster)
    for _ in range(PIN_ATTEMPTS):
        entry = await store.get(key)
        there = (read(PinRecord, entry.value) if entry else None) or PinRecord()
        pinned = PinRecord(
            threshold_tokens=there.threshold_tokens if record.threshold_tokens is None else record.threshold_tokens,
            mode=there.mode if record.mode is None else record.mode,
            made_by=record.made_by,
        )
        if await store.compare_and_put(key, readable(pinned), entry.mod_revision if entry else 0) is not None:
            return pinned
    raise PeerUnavailable("store", "the pin changed whenever it was to be written")


async def unpin(store: Store, cluster: str) -> None:
    await store.delete(pin_key(cluster))


async def drain(store: Store, cluster: str, node: Node, made_by: str) -> None:
    """Let this life of the node take nothing new."""
    record = DrainRecord(incarnation=f"{node.incarnation:016x}", made_by=made_by)
    await store.put(drains_prefix(cluster) + node.id, readable(record))


async def undrain(store: Store, cluster: str, node: str) -> None:
    await store.delete(drains_prefix(cluster) + node)
