"""What goes to a peer next: control frames, then attempts by urgency, tenants by weight, a tenant's attempts evenly.

Fairness is kept in virtual time: whoever has had the least for its weight is next, and who comes late, or comes back,
starts where the others are. Rank never starves anybody: an urgency that has waited for `ageing_s` gets one turn.
"""

import heapq
from collections import deque
from typing import Generic, TypeVar

from prfaas.transfer.outgoing import Urgency, Work

K = TypeVar("K", str, int)

RANKS = (Urgency.FINISHING, Urgency.NORMAL, Urgency.BACKGROUND)
#: Aborts are a courtesy; a peer that takes none does not make them pile up.
MAX_CONTROL = 4096


class Fair(Generic[K]):
    """Takers of one resource and what each has had."""

    def __init__(self) -> None:
        self._had: dict[K, float] = {}
        self._weights: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushes = 0
        self._clock = 0.0

    def __bool__(self) -> bool:
        return bool(self._weights)

    def __contains__(self, key: K) -> bool:
        return key in self._weights

    def add(self, key: K, weight: float) -> None:
        assert weight > 0, f"weight {weight}"
        self._weights[key] = weight
        self._had[key] = max(self._clock, self._had.get(key, 0.0))
        self._push(key)

    def remove(self, key: K) -> None:
        del self._weights[key]
        if self._had[key] <= self._clock or not self._weights:
            del self._had[key]
        if len(self._had) > 2 * len(self._weights) + 16:
            self._had = {k: had for k, had in self._had.items() if k in self._weights or had > self._clock}

    def first(self) -> K:
        while True:
            had, _, key = self._heap[0]
            if key in self._weights and self._had[key] == had:
                return key
            heapq.heappop(self._heap)

    def charge(self, key: K, nbytes: int) -> None:
        """To the one that is first."""
        had = self._had[key]
        assert self._heap[0][0] == had, "not its turn"
        if had > self._clock:
            self._clock = had
        self._had[key] = had = had + nbytes / self._weights[key]
        heapq.heapreplace(self._heap, (had, self._heap[0][1], key))

    def _push(self, key: K) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (self._had[key], self._pushes, key))
        if len(self._heap) > 4 * len(self._weights) + 16:
            self._heap = [
                entry for entry in self._heap if entry[2] in self._weights and self._had[entry[2]] == entry[0]
            ]
            heapq.heapify(self._heap)


class _Rank:
    """Who waits at one urgency, and since when nobody was served."""

    def __init__(self) -> None:
        self.tenants: Fair[str] = Fair()
        self.attempts: dict[str, Fair[str]] = {}
        self.since = 0.0


class Outbox:
    """Attempts are known by id. `waiting_bytes` could leave now."""

    def __init__(self, ageing_s: float) -> None:
        self.control: deque[Work] = deque(maxlen=MAX_CONTROL)
        self.waiting_bytes = 0
        self._ageing_s = ageing_s
        self._ranks = {urgency: _Rank() for urgency in RANKS}
        self._entries: dict[str, tuple[Urgency, str, int]] = {}

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._entries

    def put(self, attempt: str, urgency: Urgency, tenant: str, weight: float, nbytes: int, now: float) -> None:
        """So many bytes of the attempt could leave now; with none it is not in the way of others."""
        old = self._entries.get(attempt)
        self.waiting_bytes += nbytes - (old[2] if old else 0)
        if old and (old[0] is not urgency or not nbytes):
            self._remove(attempt, *old)
            old = None
        if not nbytes:
            return
        self._entries[attempt] = (urgency, tenant, nbytes)
        if old:
            return
        rank = self._ranks[urgency]
        if not rank.tenants:
            rank.since = now
        if tenant not in rank.tenants:
            rank.tenants.add(tenant, weight)
        rank.attempts.setdefault(tenant, Fair()).add(attempt, 1.0)

    def first(self, now: float) -> str | None:
        """The attempt whose turn it is."""
        if not self._entries:
            return None
        found: _Rank | None = None
        for rank in self._ranks.values():
            # The first that has anything, or the one that has waited longest of those that did for too long.
            if rank.tenants and (found is None or (now - rank.since >= self._ageing_s and rank.since <= found.since)):
                found = rank
        assert found is not None
        return found.attempts[found.tenants.first()].first()

    def charge(self, attempt: str, nbytes: int, now: float) -> None:
        """It has had its turn."""
        urgency, tenant, _ = self._entries[attempt]
        rank = self._ranks[urgency]
        rank.since = now
        rank.tenants.charge(tenant, nbytes)
        rank.attempts[tenant].charge(attempt, nbytes)

    def check(self) -> None:
        assert self.waiting_bytes == sum(nbytes for _, _, nbytes in self._entries.values())
        for attempt, (urgency, tenant, nbytes) in self._entries.items():
            assert nbytes > 0 and attempt in self._ranks[urgency].attempts[tenant]
        for rank in self._ranks.values():
            assert all((tenant in rank.tenants) == bool(attempts) for tenant, attempts in rank.attempts.items())

    def _remove(self, attempt: str, urgency: Urgency, tenant: str, _: int) -> None:
        del self._entries[attempt]
        rank = self._ranks[urgency]
        rank.attempts[tenant].remove(attempt)
        if not rank.attempts[tenant]:
            del rank.attempts[tenant]
            rank.tenants.remove(tenant)
