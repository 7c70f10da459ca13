"""How much of the line between two regions KV may take, and which part of that is whose.

KV takes a share of the line that was bought, so that it does not fill the queue in front of it. Nodes that send at the
same time split that share in proportion to their backlog, none getting less than a floor; a node that sends alone, or
that has just begun, may use all of it. A new split is made only when it differs clearly from the one in force, and
repeated now and then, because a split that nobody repeats lapses. Where the line is not known nobody is held back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.cluster import Budget, ClusterView, Egress, NodeId
from prfaas.scheduling.readings import is_known, known
from prfaas.scheduling.rule import Pair

#: What was sent within this time counts as backlog too: it was there.
HORIZON_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetParams:
    """`line_share`: what of the line KV may take. Above it TCP fills the queue at the narrow point, and loses bytes."""

    line_share: float = 0.95
    #: Least part of a node that sends, while there are no more of them than parts.
    floor: float = 0.05
    #: A backlog counts at once, and is forgotten with this time constant.
    memory_s: float = 3.0
    #: A node sends from the first of these parts of what the line may carry within the horizon, until it is below the
    #: second.
    begins_above: float = 0.01
    ends_below: float = 0.002
    #: Parts that have changed by less stay as they are.
    least_change: float = 0.1
    repeat_s: float = 10.0


def split(total: float, backlogs: Mapping[NodeId, float], floor: float) -> dict[NodeId, float]:
    """Parts of `total` in proportion to the backlogs, but none below that part of it; evenly when nothing waits. They
    add up to the total."""
    if not backlogs:
        return {}
    least = total * min(floor, 1 / len(backlogs))
    parts: dict[NodeId, float] = {}
    free = dict(backlogs)
    while free:
        left, waiting = total - math.fsum(parts.values()), math.fsum(free.values())
        fair = {node: left * (each / waiting) if waiting > 0 else left / len(free) for node, each in free.items()}
        low = [node for node, part in fair.items() if part < least]
        if not low or len(low) == len(free):
            return {**parts, **fair}
        for node in low:
            parts[node] = least
            del free[node]
    return parts


class Budgeter:
    """One on the leader. `lines`: bytes per second bought, by region pair."""

    def __init__(self, lines: Mapping[Pair, float], params: BudgetParams = BudgetParams()) -> None:
        self._params = params
        self._pairs = {
            pair: _Pair(pair, line * params.line_share, params)
            for pair, line in sorted(lines.items())
            if is_known(line) and line > 0
        }

    def due(self, view: ClusterView, now: float) -> tuple[Budget, ...]:
        """The budgets to put in force now, because they have changed or have to be repeated."""
        return tuple(budget for each in self._pairs.values() if (budget := each.due(view, now)) is not None)

    def published(self, budget: Budget, now: float) -> None:
        self._pairs[budget.source, budget.target].published(budget, now)

    def check(self) -> None:
        for each in self._pairs.values():
            each.check()


class _Pair:
    def __init__(self, pair: Pair, total: float, params: BudgetParams) -> None:
        self._pair, self._total, self._params = pair, total, params
        self._backlogs: dict[NodeId, float] = {}
        self._senders: frozenset[NodeId] = frozenset()
        self._in_force: Budget | None = None
        self._looked_at = self._published_at = -math.inf

    def due(self, view: ClusterView, now: float) -> Budget | None:
        self._look(view, now)
        backlogs = {node: self._backlogs[node] for node in sorted(self._senders)}
        parts = split(self._total, backlogs, self._params.floor) if len(backlogs) > 1 else {}
        budget = Budget(*self._pair, self._total, parts)
        if self._differs(budget):
            return budget
        # What is repeated is what is in force: small changes do not add up unseen.
        return self._in_force if now - self._published_at >= self._params.repeat_s else None

    def published(self, budget: Budget, now: float) -> None:
        self._in_force, self._published_at = budget, now

    def check(self) -> None:
        assert self._senders <= self._backlogs.keys()
        assert all(is_known(backlog) for backlog in self._backlogs.values())

    def _look(self, view: ClusterView, now: float) -> None:
        fading = math.exp(-max(0.0, now - self._looked_at) / self._params.memory_s)
        before, self._looked_at = self._backlogs, now
        seen = _backlogs(view, self._pair)
        self._backlogs = {node: max(backlog, before.get(node, 0.0) * fading) for node, backlog in seen.items()}
        within_horizon = self._total * HORIZON_S
        self._senders = frozenset(
            node
            for node, backlog in self._backlogs.items()
            if backlog >= within_horizon * self._params.begins_above
            or (node in self._senders and backlog >= within_horizon * self._params.ends_below)
        )

    def _differs(self, budget: Budget) -> bool:
        if self._in_force is None or self._in_force.nodes.keys() != budget.nodes.keys():
            return True
        least = self._params.least_change * self._total
        return any(abs(part - self._in_force.nodes[node]) >= least for node, part in budget.nodes.items())


def _backlogs(view: ClusterView, pair: Pair) -> dict[NodeId, float]:
    """What each node of the source region had to send to the target. What is not a number is nothing."""
    source, target = pair
    found: dict[NodeId, float] = {}
    senders: list[tuple[NodeId, Sequence[Egress]]]
    senders = [(node.id, node.load.egress) for node in view.nodes.values() if node.region == source]
    pools = view.pools
    senders += [(name, egress) for name, egress in view.pool_egress.items() if pools[name].region == source]
    for name, reported in senders:
        for egress in reported:
            if egress.region == target:
                found[name] = (known(egress.queued_bytes) or 0.0) + HORIZON_S * (known(egress.sent_bytes_per_s) or 0)
    return found
