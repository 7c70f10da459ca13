"""What a cache gives up first when room is short (R18).

In order: unproven states, the longest unused first; then KV at the ends of leaves and proven states, the least worth
first. Worth is the tokens that would have to be computed again, times hits, per byte, and falls with the turns of the
cache since the last use. How fast it falls was measured on an hour of a chat service, as in bench/cache: with the first
power, or where fame fades with the worth of what is evicted (GreedyDual-Size-Frequency), large pools find less; with
the square, or with plain LRU, small ones do. Orphan states, which would go second, do not exist: a state goes with the
KV under it.

Worth falls for all with every turn, so no order of all candidates lasts. That of candidates that were worth about the
same when last used does: the longest unused of them is worth least. So they are kept by such levels, and the next to go
is the least of the first of each level.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.radix import Run

#: A token of KV that no state stands on is worth this part of one that is: it saves no computing, only a transfer.
_KV_ALONE = 0.1
#: To each doubling of worth.
_LEVELS = 4
#: Below all that is worth something.
_UNPROVEN = -(1 << 30)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one state and of the KV of one hash unit."""

    state: int
    unit: int


class Cause(Enum):
    """What kind of thing went. LEAF: KV at the end of a prompt, with the state there if it has one."""

    UNPROVEN = "unproven"
    STATE = "state"
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class Victim:
    """What can go at one boundary of one run: the state there and, at the end of a leaf, the KV behind `kept` with it.

    Where `kept == boundary` only the state goes. `worth` is as of the turn `used`.
    """

    run: Run
    boundary: int
    kept: int
    nbytes: int
    cause: Cause
    worth: float
    used: int

    @property
    def level(self) -> int:
        if self.cause is Cause.UNPROVEN:
            return _UNPROVEN
        fraction, exponent = math.frexp(self.worth)
        return exponent * _LEVELS + int((fraction - 0.5) * 2 * _LEVELS)


#: Whether something that ends at a boundary of a run has to stay: its state, or else its KV.
Held = Callable[[Run, int, bool], bool]


@dataclass(frozen=True, slots=True)
class _Offer:
    serial: int
    victim: Victim


class Victims:
    """All that one owner, the only one of its index, could give up.

    What is used again need not be offered again, nor what moved to another run: each is appraised when it comes up, and
    goes back when it has changed. What came to be, or became worth less, must be offered.
    """

    def __init__(self, owner: NodeId, sizes: Sizes) -> None:
        self._owner, self._sizes = owner, sizes
        self._serial = self._entries = 0
        #: By the key of the unit that ends there.
        self._offers: dict[bytes, _Offer] = {}
        #: By level: (used, serial, key), the longest unused first. What is not in `_offers` with that serial is void.
        self._levels: dict[int, list[tuple[int, int, bytes]]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._offers

    def offer(self, run: Run, boundary: int) -> None:
        """What ends at a boundary of what is, or was, this run."""
        home = _home(run, boundary)
        victim = self._appraise(home, boundary) if home is not None else None
        if home is not None and victim is not None:
            self._put(home.unit_key(boundary), victim)

    def pop(self, turn: int, held: Held | None, aside: list[Victim]) -> Victim | None:
        """The next to go. What has to stay is put `aside`, for the caller to offer again when done. Whoever takes the
        end of a leaf offers the run's new end."""
        while (key := self._next(turn)) is not None:
            before = self._offers.pop(key).victim
            run = _home(before.run, before.boundary)
            victim = self._appraise(run, before.boundary) if run is not None else None
            if run is None or victim is None or run.unit_key(before.boundary) != key:
                continue
            if (victim.level, victim.used) != (before.level, before.used):
                self._put(key, victim)
            elif held is None:
                return victim
            elif (free := self._without(victim, held)) is not None:
                return free
            else:
                aside.append(victim)
        return None

    def _next(self, turn: int) -> bytes | None:
        """The key of the least worth: of the first of each level."""
        least, first = (math.inf, 0, 0), None
        for level in [level for level, heap in self._levels.items() if self._settle(heap)]:
            used, serial, key = self._levels[level][0]
            worth = self._offers[key].victim.worth / _faded(turn - used) if level != _UNPROVEN else -1.0
            if (worth, used, serial) < least:
                least, first = (worth, used, serial), level
        if first is None:
            return None
        self._entries -= 1
        return heapq.heappop(self._levels[first])[2]

    def _settle(self, heap: list[tuple[int, int, bytes]]) -> bool:
        """Take what is void from the front."""
        while heap:
            _, serial, key = heap[0]
            offer = self._offers.get(key)
            if offer is not None and offer.serial == serial:
                return True
            heapq.heappop(heap)
            self._entries -= 1
        return False

    def _put(self, key: bytes, victim: Victim) -> None:
        self._serial += 1
        self._offers[key] = _Offer(self._serial, victim)
        heapq.heappush(self._levels.setdefault(victim.level, []), (victim.used, self._serial, key))
        self._entries += 1
        if self._entries > 2 * len(self._offers) + 64:
            self._tidy()

    def _tidy(self) -> None:
        """Forget what is void, so that it never is more than half."""
        self._levels.clear()
        for key, offer in self._offers.items():
            victim = offer.victim
            self._levels.setdefault(victim.level, []).append((victim.used, offer.serial, key))
        for heap in self._levels.values():
            heapq.heapify(heap)
        self._entries = len(self._offers)

    def _appraise(self, run: Run, boundary: int) -> Victim | None:
        state = run.states.get(boundary, {}).get(self._owner)
        if state is not None and not state.proven:
            return Victim(run, boundary, boundary, self._sizes.state, Cause.UNPROVEN, 0.0, state.used)
        leaf_end = boundary == run.stop and not run.children
        if state is None and not leaf_end:
            return None
        kept = (run.checkpoint_before(boundary) or run.start) if leaf_end else boundary
        nbytes = self._nbytes(boundary - kept, state is not None)
        cause = Cause.LEAF if leaf_end else Cause.STATE
        if state is None:
            saved_tokens = (boundary - kept) * HASH_UNIT_TOKENS * _KV_ALONE
            return Victim(run, boundary, kept, nbytes, cause, saved_tokens / nbytes, run.used)
        saved_tokens = float((boundary - _resumed_at(run, boundary)) * HASH_UNIT_TOKENS * state.hits)
        return Victim(run, boundary, kept, nbytes, cause, saved_tokens / nbytes, state.used)

    def _without(self, victim: Victim, held: Held) -> Victim | None:
        """What of a victim need not stay."""
        run, boundary = victim.run, victim.boundary
        state = boundary in run.states
        if state and held(run, boundary, True):
            return None
        kept = next((at for at in range(boundary, victim.kept, -1) if held(run, at, False)), victim.kept)
        if kept == victim.kept:
            return victim
        if kept == boundary and not state:
            return None
        nbytes = self._nbytes(boundary - kept, state)
        return replace(victim, kept=kept, nbytes=nbytes, cause=Cause.STATE if kept == boundary else Cause.LEAF)

    def _nbytes(self, kv_units: int, state: bool) -> int:
        return kv_units * self._sizes.unit + (self._sizes.state if state else 0)


def _home(run: Run, boundary: int) -> Run | None:
    """The run in which a boundary of what was `run` lies now: since then it may have become part of the only one below
    it, or given its upper part to another."""
    while run.parent is None:
        if not run.children:
            return None
        run = next(iter(run.children.values()))
    while boundary <= run.start and run.parent is not None:
        run = run.parent
    return run if run.start < boundary <= run.stop else None


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
