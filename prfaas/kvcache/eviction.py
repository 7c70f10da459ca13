"""What a node's cache gives up first when room is short (R18).

In order: unproven states, the longest unused first; then KV at the ends of leaves and proven states, the least worth
first. Worth is the tokens that would have to be computed again, times hits, per byte, and falls with the turns of the
cache since the last use. How fast it falls was measured on an hour of a chat service, as in bench/cache: with the first
power, or where fame fades with the worth of what is evicted (GreedyDual-Size-Frequency), large pools find less; with
the square, or with plain LRU, small ones do. Orphan states, which would go second, do not exist: a state goes with the
KV under it.
"""

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.radix import Run

#: A token of KV that no state stands on is worth this part of one that is: it saves no computing, only a transfer.
_KV_ALONE = 0.1


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


class Victims:
    """All that one owner, the only one of its index, could give up in this turn. Taking one out changes what others are
    worth, so each is appraised again when it comes up."""

    def __init__(self, runs: Iterable[Run], owner: NodeId, sizes: Sizes, turn: int) -> None:
        self._owner, self._sizes, self._turn = owner, sizes, turn
        self._serials = itertools.count()
        offered = (self._appraise(run, boundary) for run in runs for boundary in dict.fromkeys((*run.states, run.stop)))
        self._heap = [victim for victim in offered if victim is not None]
        heapq.heapify(self._heap)

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
            rank = (False, 0.0, state.used)
            return Victim(rank, next(self._serials), run, boundary, boundary, self._sizes.state)
        leaf_end = boundary == run.stop and not run.children
        if state is None and not leaf_end:
            return None
        kept = (run.checkpoint_before(boundary) or run.start) if leaf_end else boundary
        nbytes = (boundary - kept) * self._sizes.unit + (self._sizes.state if state is not None else 0)
        if state is not None:
            used, saved_tokens = (
                state.used,
                float((boundary - _resumed_at(run, boundary)) * HASH_UNIT_TOKENS * state.hits),
            )
        else:
            used, saved_tokens = run.used, (boundary - kept) * HASH_UNIT_TOKENS * _KV_ALONE
        rank = (True, saved_tokens / nbytes / _faded(self._turn - used), used)
        return Victim(rank, next(self._serials), run, boundary, kept, nbytes)


def _resumed_at(run: Run, boundary: int) -> int:
    """Where a prefill would resume if there were no state at `boundary`."""
    at: Run | None = run
    while at is not None:
        if (checkpoint := at.checkpoint_before(boundary)) is not None:
            return checkpoint
        at = at.parent
    return 0


def _faded(turns: int) -> float:
    """How many times less a thing is worth so many turns after its last use than right then: the power of one and a
    half, from a square root because only that is the same on all machines."""
    return (turns + 1) * math.sqrt(turns + 1)
