"""What the leader lets nodes send from one region to another: a key per region pair, written by compare-and-put like
the plan, and read by the nodes of the source region.

Each new record of a pair has a higher epoch than the one before, so that a leader that is late does not overwrite what
its successor has written.
"""

from typing import Annotated, Self

import msgspec

from prfaas.cluster import Budget, NodeId, RegionId
from prfaas.errors import PeerUnavailable, StaleEpoch
from prfaas.membership.plans import Epoch, read, readable
from prfaas.membership.store import Store

Rate = Annotated[float, msgspec.Meta(gt=0)]


def budgets_prefix(cluster: str, source: RegionId) -> str:
    return f"/prfaas/{cluster}/budgets/{source}/"


def budget_key(cluster: str, source: RegionId, target: RegionId) -> str:
    return budgets_prefix(cluster, source) + target


class BudgetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and the router that made it. `bytes_per_s` is what a node that is not named may send."""

    epoch: Epoch
    bytes_per_s: Rate
    nodes: dict[str, Rate] = {}
    made_by: str = ""

    @classmethod
    def of(cls, budget: Budget, epoch: int, made_by: str) -> Self:
        nodes: dict[str, float] = {node: _written(rate) for node, rate in sorted(budget.nodes.items())}
        return cls(epoch=epoch, bytes_per_s=_written(budget.bytes_per_s), nodes=nodes, made_by=made_by)

    def allowed(self, node: NodeId) -> float:
        return self.nodes.get(node, self.bytes_per_s)


def _written(bytes_per_s: float) -> float:
    return max(1.0, round(bytes_per_s))


class BudgetWriter:
    """One per router. It knows the epochs that it has read or written, and overwrites nothing that it has not seen."""

    def __init__(self, store: Store, cluster: str, made_by: str) -> None:
        self._store, self._cluster, self._made_by = store, cluster, made_by
        self._epochs: dict[str, int] = {}

    async def publish(self, budget: Budget) -> None:
        """Put the budget in force. Raises StaleEpoch when somebody has written since this writer last looked (the next
        call knows), PeerUnavailable."""
        key = budget_key(self._cluster, budget.source, budget.target)
        entry = await self._store.get(key)
        there = read(BudgetRecord, entry.value) if entry is not None else None
        seen, current = self._epochs.get(key, 0), there.epoch if there is not None else 0
        if current > seen:
            self._epochs[key] = current
            raise StaleEpoch(seen=seen, current=current)
        record = BudgetRecord.of(budget, seen + 1, self._made_by)
        revision = entry.mod_revision if entry is not None else 0
        if await self._store.compare_and_put(key, readable(record), revision) is None:
            raise PeerUnavailable("store", "the budget changed while it was being written")
        self._epochs[key] = record.epoch
