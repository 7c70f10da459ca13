"""The part of the fold that comes from the control plane: plan, pin, drains, and what the routers report.

A plan older than the one in force, or than what any worker has seen, is refused: it was made without knowledge of the
later one, whoever wrote it.
"""

from collections.abc import Callable
from typing import TypeVar

from prfaas.cluster import NodeId, Plan
from prfaas.membership.plans import (
    DrainRecord,
    PinRecord,
    PlanRecord,
    RouterRecord,
    drains_prefix,
    pin_key,
    plan_key,
    read,
    routers_prefix,
)

K = TypeVar("K", bound=str)
R = TypeVar("R")


class Direction:
    """Keyed as in the store. `highest_seen` is the highest epoch that a registered worker reports."""

    def __init__(self, cluster: str, highest_seen: Callable[[], int]) -> None:
        self._plan_key, self._pin_key = plan_key(cluster), pin_key(cluster)
        self._routers, self._drains = routers_prefix(cluster), drains_prefix(cluster)
        self._highest_seen = highest_seen
        self.plan: PlanRecord | None = None
        #: The same as the view has it.
        self.plan_in_force: Plan | None = None
        #: A plan is in force that the store no longer has: it came back without it, or with an older one.
        self.plan_lost = False
        self.refused_plans = 0
        self.pin: PinRecord | None = None
        self.routers: dict[str, RouterRecord] = {}
        self.drains: dict[NodeId, DrainRecord] = {}

    def highest_epoch(self) -> int:
        return max(self.plan.epoch if self.plan else 0, self._highest_seen())

    def known_keys(self) -> list[str]:
        keys = [self._routers + router for router in self.routers] + [self._drains + node for node in self.drains]
        return [*keys, *([self._plan_key] if self.plan else ()), *([self._pin_key] if self.pin else ())]

    def put(self, key: str, value: bytes) -> bool | None:
        """Whether the value could be read; None for a key of another kind."""
        if key == self._plan_key:
            return self._put_plan(read(PlanRecord, value))
        if key == self._pin_key:
            pin = read(PinRecord, value)
            self.pin = pin or self.pin
            return pin is not None
        if key.startswith(self._routers):
            return _keep(self.routers, key.removeprefix(self._routers), read(RouterRecord, value))
        if key.startswith(self._drains):
            return _keep(self.drains, NodeId(key.removeprefix(self._drains)), read(DrainRecord, value))
        return None

    def drop(self, key: str) -> None:
        if key == self._plan_key:
            self.plan, self.plan_in_force, self.plan_lost = None, None, False
        elif key == self._pin_key:
            self.pin = None
        elif key.startswith(self._routers):
            self.routers.pop(key.removeprefix(self._routers), None)
        elif key.startswith(self._drains):
            self.drains.pop(NodeId(key.removeprefix(self._drains)), None)

    def unlisted(self, key: str) -> None:
        self.plan_lost |= key == self._plan_key

    def drained_node(self, key: str) -> NodeId | None:
        """The node that a drain's key is about."""
        return NodeId(key.removeprefix(self._drains)) if key.startswith(self._drains) else None

    def concerns_one_router(self, key: str) -> bool:
        return key.startswith(self._routers)

    def check(self) -> None:
        assert not (self.plan_lost and self.plan is None)
        assert self.plan_in_force == (self.plan.to_plan() if self.plan else None)

    def _put_plan(self, plan: PlanRecord | None) -> bool:
        if plan is None:
            return False
        if plan.epoch < self.highest_epoch():
            self.refused_plans += 1
            self.plan_lost = self.plan is not None
        else:
            self.plan, self.plan_in_force, self.plan_lost = plan, plan.to_plan(), False
        return True


def _keep(kept: dict[K, R], name: K, record: R | None) -> bool:
    if record is not None:
        kept[name] = record
    return record is not None
