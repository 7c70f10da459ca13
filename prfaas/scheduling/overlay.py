"""A router's own work that no report shows yet, laid over the fold's view: otherwise all requests of one report period
would go to the node that was idle in the last report.

Per node the overlay keeps what this router has added and taken away since the node's last report. A report includes
what happened before it was made, so it wipes that out, but for what is younger than `settle_s`, the time that commands
and reports are under way. What must hold: once all attempts are over and all nodes have reported, the view is the
fold's; and while no reports come at all, own work still counts. Laying it over costs by the nodes that are touched, not
by the size of the cluster.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from prfaas.cluster import Busy, ClusterView, Node, NodeId, RegionId
from prfaas.membership.ranking import Classes, decode_place, prefill_place
from prfaas.request import AttemptId
from prfaas.scheduling.laid import HANDED_OVER, NOTHING, Known, Loads, Merged, Work


@dataclass(slots=True)
class _Unreported:
    """Of one node. `total` is the sum of the settled work and of the recent work."""

    total: Work = NOTHING
    recent: deque[tuple[float, Work]] = field(default_factory=deque)


@dataclass(slots=True)
class _Attempt:
    prefill: NodeId
    decode: NodeId
    prefilling: Work
    decoding: Work


class Overlay:
    """Driven by whoever carries routes out: one per router process."""

    def __init__(self, pd_region: RegionId, *, stale_s: float = 10.0, settle_s: float = 0.1) -> None:
        """`stale_s` is the fold's: nodes not heard of for so long come last."""
        self._stale_s, self._settle_s = stale_s, settle_s
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._unreported: dict[NodeId, _Unreported] = {}
        self._reported_at: dict[NodeId, float] = {}
        self._classes = Classes(pd_region)
        #: Of nodes with own work: how much, and how busy that makes them by their last report. Nodes are laid over
        #: again when own work or a report changes them, at the next decision.
        self._own: dict[NodeId, Work] = {}
        self._busy: dict[NodeId, Busy] = {}
        #: Nodes to be laid over again; a dict, because its order is that of the events.
        self._changed: dict[NodeId, None] = {}
        self._base: ClusterView | None = None
        self._laid: ClusterView | None = None

    def charge(
        self,
        attempt: AttemptId,
        prefill: NodeId,
        decode: NodeId,
        prefill_tokens: int,
        total_tokens: int,
        kv_bytes: int,
        now: float,
    ) -> None:
        """An attempt was routed. `total_tokens`: prompt and output, as the decode node commits them."""
        assert attempt not in self._attempts
        prefilling, reserved = Work(prefill_tokens), Work(0, 1, total_tokens, kv_bytes)
        self._attempts[attempt] = _Attempt(prefill, decode, prefilling, reserved)
        self._add(prefill, prefilling, now)
        self._add(decode, reserved, now)

    def prefilled(self, attempt: AttemptId, now: float) -> None:
        """Its prefill is over and it was handed to decode."""
        held = self._attempts.get(attempt)
        if held is None or held.prefilling is NOTHING:
            return
        self._add(held.prefill, held.prefilling.reversed(), now)
        self._add(held.decode, HANDED_OVER, now)
        held.prefilling, held.decoding = NOTHING, held.decoding.plus(HANDED_OVER)

    def discharge(self, attempt: AttemptId, now: float) -> None:
        """It is over, however it ended. Idempotent."""
        held = self._attempts.pop(attempt, None)
        if held is not None:
            if held.prefilling is not NOTHING:
                self._add(held.prefill, held.prefilling.reversed(), now)
            self._add(held.decode, held.decoding.reversed(), now)

    def reported(self, node: NodeId, now: float) -> None:
        """Telemetry of the node has arrived: it includes what was done to it until just before."""
        self._reported_at[node] = now
        own = self._unreported.get(node)
        if own is None:
            return
        self._settle(own, now)
        own.total = NOTHING
        for _, work in own.recent:
            own.total = own.total.plus(work)
        self._changed[node] = None

    def view(self, view: ClusterView, now: float) -> ClusterView:
        """The view with own work counted, in `loads` and in the order of the classes. The same object while nothing has
        changed."""
        if self._laid is not None and view is self._base and not self._changed:
            return self._laid
        if view is not self._base:
            self._base = view
            self._forget_departed(view)
        for name in self._changed:
            self._lay(name, view.nodes.get(name), now)
        self._changed.clear()
        self._laid = self._over(view, now) if self._busy else view
        return self._laid

    def check(self) -> None:
        assert self._busy.keys() == self._own.keys() <= self._unreported.keys()
        for name, work in self._own.items():
            assert name in self._changed or work == self._unreported[name].total, "laid over with other work"
        for own in self._unreported.values():
            assert list(own.recent) == sorted(own.recent, key=lambda entry: entry[0]), "work out of order"
        for held in self._attempts.values():
            assert min(*held.prefilling, *held.decoding) >= 0, "an attempt holds less than nothing"
        self._classes.check()

    def _add(self, node: NodeId, work: Work, now: float) -> None:
        own = self._unreported.get(node)
        if own is None:
            own = self._unreported[node] = _Unreported()
        self._settle(own, now)
        own.total = own.total.plus(work)
        own.recent.append((now, work))
        self._changed[node] = None

    def _settle(self, own: _Unreported, now: float) -> None:
        """From then on it counts only in the sum, which the next report wipes out."""
        while own.recent and own.recent[0][0] <= now - self._settle_s:
            own.recent.popleft()

    def _lay(self, name: NodeId, node: Node | None, now: float) -> None:
        own = self._unreported.get(name)
        if own is not None and (node is None or (own.total == NOTHING and not own.recent)):
            del self._unreported[name]
            own = None
        if own is None or node is None or own.total == NOTHING:
            if self._busy.pop(name, None) is not None:
                del self._own[name]
                self._classes.remove(name)
            return
        self._own[name] = own.total
        busy = self._busy[name] = own.total.busy(node.load)
        self._classes.place_as(node, busy, self._reported_at.get(name, -math.inf) > now - self._stale_s)

    def _over(self, view: ClusterView, now: float) -> ClusterView:
        classes, nodes = self._classes, view.nodes
        known = Known(self._reported_at, now - self._stale_s)
        # Own work goes on in a copy: see `Ranking.members`.
        own, self._own = self._own, self._own.copy()
        busy, self._busy = self._busy, self._busy.copy()
        far, near, decode = classes.remote_prefill, classes.local_prefill, classes.decode
        return ClusterView(
            nodes,
            Merged(view.remote_prefill, far, nodes, classes.standing, prefill_place, known),
            Merged(view.local_prefill, near, nodes, classes.standing, prefill_place, known),
            Merged(view.decode, decode, nodes, classes.standing, decode_place, known),
            view.plan,
            view.highest_epoch,
            Loads(nodes, own),
            busy,
            view.pools,
            view.pool_egress,
        )

    def _forget_departed(self, view: ClusterView) -> None:
        """So that the ids of a long life do not pile up."""
        if len(self._reported_at) > 2 * len(view.nodes) + 16:
            self._reported_at = {name: at for name, at in self._reported_at.items() if name in view.nodes}
            for name in [name for name in self._unreported if name not in view.nodes]:
                self._changed[name] = None
