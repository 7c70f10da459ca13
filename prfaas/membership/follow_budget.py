"""What a node may send to each other region, as its leader has written it.

Only what is news keeps a budget alive: one that is not repeated lapses, also while the store is lost, so that nobody is
held back for ever by a leader that is gone. A budget of an earlier epoch than the one in force was late, and is
ignored, unless the store itself has started again.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from prfaas.cluster import NodeId, RegionId
from prfaas.membership.budgets import BudgetRecord, budgets_prefix
from prfaas.membership.plans import read
from prfaas.membership.store import Deleted, Entry, Put, Resync, Store

log = structlog.get_logger(__name__)

#: Several times what the leader takes to repeat a budget or to be succeeded.
LAPSE_S = 30.0


@dataclass(slots=True)
class _Followed:
    epoch: int = 0
    allowed: float | None = None
    lapse: asyncio.TimerHandle | None = None


class BudgetFollower:
    """`run` in a task of its own. `allow` is told what may leave for a region whenever that changes; None: as much as
    the line takes."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        region: RegionId,
        node: NodeId,
        allow: Callable[[str, float | None], None],
        *,
        lapse_s: float = LAPSE_S,
    ) -> None:
        self._store, self._node, self._allow, self._lapse_s = store, node, allow, lapse_s
        self._prefix = budgets_prefix(cluster, region)
        self._followed: dict[str, _Followed] = {}

    async def run(self) -> None:
        try:
            async with aclosing(self._store.watch(self._prefix)) as batches:
                async for batch in batches:
                    for event in batch:
                        match event:
                            case Put(entry):
                                self._read(entry, restarted=False)
                            case Deleted(key):
                                self._lift(key)
                            case Resync(snapshot):
                                for key in self._followed.keys() - {entry.key for entry in snapshot.entries}:
                                    self._lift(key)
                                for entry in snapshot.entries:
                                    self._read(entry, restarted=True)
        finally:
            for followed in self._followed.values():
                if followed.lapse is not None:
                    followed.lapse.cancel()

    def _read(self, entry: Entry, *, restarted: bool) -> None:
        record = read(BudgetRecord, entry.value)
        if record is None:
            log.warning("unreadable_budget", key=entry.key)
            return
        followed = self._followed.setdefault(entry.key, _Followed())
        if record.epoch == followed.epoch or (record.epoch < followed.epoch and not restarted):
            return
        followed.epoch = record.epoch
        if followed.lapse is not None:
            followed.lapse.cancel()
        followed.lapse = asyncio.get_running_loop().call_later(self._lapse_s, self._lift, entry.key)
        self._set(entry.key, followed, record.allowed(self._node))

    def _lift(self, key: str) -> None:
        """The epoch stays known: what comes late does not come back into force."""
        if (followed := self._followed.get(key)) is not None:
            if followed.lapse is not None:
                followed.lapse.cancel()
                followed.lapse = None
            self._set(key, followed, None)

    def _set(self, key: str, followed: _Followed, allowed: float | None) -> None:
        if allowed != followed.allowed:
            followed.allowed = allowed
            log.info("allowance", target=key.removeprefix(self._prefix), bytes_per_s=allowed)
            self._allow(key.removeprefix(self._prefix), allowed)
