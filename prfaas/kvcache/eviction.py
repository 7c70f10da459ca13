"""What a node's cache gives up first when room is short (R18).

In order: unproven states, the longest unused first; then KV at the ends of leaves and proven states, the least worth
first. Worth is the tokens that would have to be computed again, times hits, per byte. It counts from the level that
eviction had reached when the thing was last used, so that what is no longer used falls behind, whatever it was worth
(GreedyDual-Size-Frequency). Orphan states, which would go second, do not exist: a state goes with the KV under it.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.radix import Run


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one state and of the KV of one hash unit."""

    state: int
    unit: int


@dataclass(frozen=True, slots=True, order=True)
class Victim:
    """What can go at one boundary of one run: the state there and, at the end of a leaf, the KV behind `kept` with it.

    Where `kept == boundary` only the state goes. Ranks say who goes first, serials decide among equals.
    """

    rank: tuple[bool, float, int]
    serial: int
    run: Run = field(compare=False)
    boundary: int = field(compare=False)
    kept: int = field(compare=False)
    nbytes: int = field(compare=False)

    @property
    def proven(self) -> bool:
        return self.rank[0]

    @property
    def worth(self) -> float:
        return self.rank[1]


class Victims:
    """All that one owner, the only one of its index, could give up. Taking one out changes what others are worth, so
    each is appraised again when its turn comes."""

    def __init__(self, runs: Iterable[Run], owner: NodeId, sizes: Sizes) -> None:
        self._owner, self._sizes = owner, sizes
        self._serials = itertools.count()
        self._heap: list[Victim] = []
        for run in runs:
            for boundary in dict.fromkeys((*run.states, run.stop)):
                self.offer(run, boundary)

    def offer(self, run: Run, boundary: int) -> None:
        victim = self._appraise(run, boundary)
        if victim is not None:
            heapq.heappush(self._heap, victim)

    def pop(self) -> Victim | None:
        """The next to go. Whoever takes the end of a leaf offers the run's new end."""
        while self._heap:
            before = heapq.heappop(self._heap)
            now = self._appraise(before.run, before.boundary)
            if now is not None and now.rank <= before.rank:
                return now
            if now is not None:
                heapq.heappush(self._heap, now)
        return None

    def _appraise(self, run: Run, boundary: int) -> Victim | None:
        if run.parent is None or boundary > run.stop:
            return None  # It went, or became part of another run.
        state = run.states.get(boundary, {}).get(self._owner)
        if state is not None and not state.proven:
            rank = (False, 0.0, state.used.tick)
            return Victim(rank, next(self._serials), run, boundary, boundary, self._sizes.state)
        leaf_end = boundary == run.stop and not run.children
        if state is None and not leaf_end:
            return None
        kept = (run.checkpoint_before(boundary) or run.start) if leaf_end else boundary
        nbytes = (boundary - kept) * self._sizes.unit + (self._sizes.state if state is not None else 0)
        # KV that no state stands on saves no computing: it is worth what it was last used at, and no more.
        used, saved_tokens = run.used, 0
        if state is not None:
            used = state.used
            saved_tokens = (boundary - _resumed_at(run, boundary)) * HASH_UNIT_TOKENS * state.hits
        rank = (True, used.level + (saved_tokens / nbytes if saved_tokens else 0.0), used.tick)
        return Victim(rank, next(self._serials), run, boundary, kept, nbytes)


def _resumed_at(run: Run, boundary: int) -> int:
    """Where a prefill would resume if there were no state at `boundary`."""
    at: Run | None = run
    while at is not None:
        if (checkpoint := at.checkpoint_before(boundary)) is not None:
            return checkpoint
        at = at.parent
    return 0
