"""Keeps a `ClusterView` in step with the store. Reading it never waits and never asks the store; while the store is
lost the last view stands.
"""

import asyncio
import math
import time
from collections.abc import Callable, Set
from contextlib import aclosing, suppress

import structlog

from prfaas.cluster import ClusterView, NodeId, RegionId
from prfaas.errors import DeadlineExceeded
from prfaas.membership.direction import Direction
from prfaas.membership.records import NodeRecord, TelemetryRecord, cluster_prefix
from prfaas.membership.store import Store
from prfaas.membership.view import MembershipView

log = structlog.get_logger(__name__)

#: How often a view is worked out anew because time has passed.
LOOK_S = 0.05


class ClusterFollower:
    """`run` in a task of its own. `grace_s` is how long nodes may take to register again with a store that came back
    empty: their lease's time. `reported` is told of each node's report as it comes."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        pd_region: RegionId,
        *,
        stale_s: float = 10.0,
        grace_s: float = 30.0,
        now: Callable[[], float] = time.monotonic,
        reported: Callable[[NodeId, float], None] | None = None,
    ) -> None:
        self._store = store
        self._prefix = cluster_prefix(cluster)
        self._fold = MembershipView(cluster, pd_region, stale_s=stale_s, grace_s=grace_s)
        self._now, self._reported = now, reported
        self._heard_at = -math.inf
        self._changed = asyncio.Event()
        self._seen: ClusterView | None = None
        self._look_at = 0.0

    async def run(self) -> None:
        async with aclosing(self._store.watch(self._prefix)) as batches:
            async for batch in batches:
                malformed = self._fold.malformed
                self._heard_at = self._now()
                self._seen = None
                self._fold.apply(batch, self._heard_at)
                for node, at in self._fold.take_reports().items():
                    if self._reported is not None:
                        self._reported(node, at)
                if self._fold.malformed > malformed:
                    log.warning("unreadable_membership", keys=self._fold.malformed - malformed)
                self._changed.set()
                self._changed = asyncio.Event()

    def view(self) -> ClusterView:
        """The same object until something has changed. What only the passing of time has changed is seen `LOOK_S` late
        at most: every request asks several times."""
        now = self._now()
        if self._seen is None or now >= self._look_at:
            self._seen, self._look_at = self._fold.view(now), now + LOOK_S
        return self._seen

    @property
    def direction(self) -> Direction:
        """What the control plane has said: plan, pin, routers, drains."""
        return self._fold.direction

    def record(self, node: NodeId) -> NodeRecord | None:
        return self._fold.record(node)

    def telemetry(self, node: NodeId) -> TelemetryRecord | None:
        return self._fold.telemetry(node)

    def report_age_s(self, node: NodeId) -> float | None:
        """Since the node last reported; None when that is too long ago to count on."""
        return self._fold.report_age_s(node, self._now())

    def silent(self) -> Set[NodeId]:
        """Nodes that have not reported lately."""
        return self._fold.silent()

    def age_s(self) -> float:
        """Since the store last told anything; infinite before it first did."""
        return self._now() - self._heard_at

    async def wait_for(self, predicate: Callable[[ClusterView], bool], timeout_s: float) -> ClusterView:
        """The first view that satisfies the predicate. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(view := self.view()):
                    await self._next_change()
                return view
        except TimeoutError:
            raise DeadlineExceeded("cluster view", timeout_s) from None

    async def _next_change(self) -> None:
        """Something was told, or so much time has passed that the view may differ."""
        changed, due = self._changed, self._fold.next_due()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                await changed.wait()
