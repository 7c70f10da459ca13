"""Breakers of one router around prefills whose KV moves: of each source, of each pair of source and decode node, and of
each ordered pair of regions.

What counts against whom is said by `blame`. Where it may be the fault of several it counts against each, but a source
opens only when it fails toward several decode nodes, and a link only when several sources fail on it. An attempt that
is overdue counts at once, not when somebody gives up on it; and a link that takes nothing, as its senders report, opens
before anything on it is due.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prfaas.cluster import ClusterView, Incarnation, LinkState, NodeId, RegionId
from prfaas.errors import DeadlineExceeded, PrfaasError
from prfaas.request import AttemptId
from prfaas.scheduling.blame import BLAMED, Blame, Guard, blame
from prfaas.scheduling.breaker import Breaker, BreakerParams, Cause, Circuit, Outcome
from prfaas.scheduling.lanes import Pair
from prfaas.scheduling.shut import NOBODY, OPEN_TO_ALL, Shut
from prfaas.scheduling.source_rooms import SourceRooms

#: One guard and the two ends of what it is around; a source has no other end.
_Key = tuple[Guard, str, str]

#: From how many sources, toward how many decode nodes: see `Breaker`.
_WITNESSES = {Guard.SOURCE: (1, 2), Guard.PAIR: (1, 1), Guard.LINK: (2, 2)}


@dataclass(slots=True)
class _Flight:
    """An attempt under way. `counted`: it has had its outcome already, because it was overdue."""

    prefill: NodeId
    decode: NodeId
    keys: tuple[_Key, ...]
    began_at: float
    due_at: float | None
    counted: bool = False


class Breakers:
    """One per router process. Time never goes back."""

    def __init__(self, params: BreakerParams) -> None:
        self.params = params
        self._breakers: dict[_Key, Breaker] = {}
        #: Of these, the ones that are not closed.
        self._broken: dict[_Key, Breaker] = {}
        self._flights: dict[AttemptId, _Flight] = {}
        self._rooms = SourceRooms(params.in_flight, params.least_in_flight)
        self._due: list[tuple[float, AttemptId]] = []
        self._lives: dict[NodeId, Incarnation] = {}
        self._shut: Shut | None = OPEN_TO_ALL
        self._shut_of_rooms = 0
        self._swept_at = -math.inf
        #: Since the beginning: by what was opened and why, and by what came of a probe.
        self.opened: Counter[tuple[Guard, Cause]] = Counter()
        self.probes: Counter[tuple[Guard, str]] = Counter()

    def begin(
        self,
        attempt: AttemptId,
        source: tuple[NodeId, RegionId],
        decode: tuple[NodeId, RegionId],
        predicted_s: float | None,
        now: float,
    ) -> None:
        """A prefill whose KV has to move is about to be made. `predicted_s` is how long it should take."""
        (prefill, near), (target, far) = source, decode
        self._let_come_due(now)
        keys: tuple[_Key, ...] = (Guard.SOURCE, prefill, ""), (Guard.PAIR, prefill, target)
        if near != far:
            keys = (*keys, (Guard.LINK, near, far))
        due_at = None if predicted_s is None else now + self.params.due_s(predicted_s)
        self._flights[attempt] = _Flight(prefill, target, keys, now, due_at)
        for key in keys:
            if (breaker := self._broken.get(key)) is not None and breaker.begin(attempt, now):
                self._shut = None
        self._rooms.entered(prefill)
        if due_at is not None:
            heapq.heappush(self._due, (due_at, attempt))

    def done(self, attempt: AttemptId, now: float) -> None:
        """Its KV is complete where it should be. Late or not: what was overdue is counted by now."""
        self._let_come_due(now)
        if (flight := self._leave(attempt)) is None:
            return
        self._rooms.finished(flight.prefill, now, in_time=not flight.counted)
        if flight.counted:
            return
        outcome = Outcome(now, False, flight.prefill, flight.decode)
        for key in flight.keys:
            self._breaker(key).ended(attempt, outcome)
            if key in self._broken and self._broken[key].circuit is Circuit.CLOSED:
                del self._broken[key]
                self.probes[key[0], "closed"] += 1
                self._shut = None

    def failed(self, attempt: AttemptId, error: PrfaasError, now: float) -> None:
        """Its prefill came to nothing."""
        self._let_come_due(now)
        if (flight := self._leave(attempt)) is None or flight.counted:
            return
        cause = Cause.SLOW if isinstance(error, DeadlineExceeded) else Cause.FAILED
        self._count(attempt, flight, blame(error, flight.decode), cause, now)

    def forget(self, attempt: AttemptId, now: float) -> None:
        """It is over, and nothing is known of how it ended. Idempotent."""
        if (flight := self._leave(attempt)) is not None and not flight.counted:
            self._count(attempt, flight, None, Cause.FAILED, now)

    def heard(self, links: Mapping[Pair, LinkState], now: float) -> None:
        """What the senders on links report."""
        self._let_come_due(now)
        for (source, target), link in links.items():
            if link.stalled_s < self.params.stalled_s:
                continue
            key = (Guard.LINK, source, target)
            breaker = self._breaker(key)
            if breaker.stalled(now):
                self.opened[Guard.LINK, Cause.STALLED] += key not in self._broken
                self._broken[key], self._shut = breaker, None

    def due_at(self, attempt: AttemptId) -> float | None:
        """When it will be overdue; None when that is not known, or it is not under way."""
        flight = self._flights.get(attempt)
        return None if flight is None else flight.due_at

    def is_hopeless(self, attempt: AttemptId, now: float) -> bool:
        """It is overdue, and either something on its way is known to fail, or its source has finished nothing since it
        began: better begin anew elsewhere."""
        self._let_come_due(now)
        flight = self._flights.get(attempt)
        if flight is None or not flight.counted:
            return False
        stalled = self._rooms.finished_at(flight.prefill) < flight.began_at
        return stalled or any(key in self._broken for key in flight.keys)

    def shut(self, now: float) -> Shut:
        """The same object while nothing changes."""
        self._let_come_due(now)
        rooms = self._rooms.changes
        if self._shut is None or now >= self._shut.half_opens_at or rooms != self._shut_of_rooms:
            self._shut, self._shut_of_rooms = self._look(now), rooms
        return self._shut

    def retain(self, view: ClusterView, now: float) -> None:
        """Forget what has left the cluster, or is another life of itself."""
        if now < self._swept_at + self.params.rest_s:
            return
        self._swept_at = now
        lives = {name: node.incarnation for name, node in view.nodes.items()}
        gone = {name for name, life in self._lives.items() if lives.get(name) != life}
        self._lives = lives
        known = lives.keys() | {node.region for node in view.nodes.values()} | {""}
        for key in [key for key in self._breakers if self._is_past(key, gone, known, now)]:
            del self._breakers[key]
            if self._broken.pop(key, None) is not None:
                self._shut = None
        self._rooms.forget([name for name, *_ in self._rooms if name in gone or name not in lives])

    def states(self, now: float) -> Iterator[tuple[Guard, str, str, Circuit, float]]:
        """What is not closed: guard, both ends, and the seconds until a probe may be made."""
        for (guard, source, target), breaker in self._broken.items():
            breaker.lets_through(now)
            yield guard, source, target, breaker.circuit, max(0.0, breaker.half_opens_at - now)

    def in_flight(self) -> Iterator[tuple[NodeId, int, int]]:
        """Of each source that has or had attempts: how many are under way, of how many."""
        return iter(self._rooms)

    def check(self) -> None:
        for key, breaker in self._breakers.items():
            breaker.check()
            assert (breaker.circuit is not Circuit.CLOSED) == (key in self._broken)
        assert self._broken.keys() <= self._breakers.keys()
        self._rooms.check(Counter(flight.prefill for flight in self._flights.values()))
        assert len(self._due) <= 2 * len(self._flights) + 64

    def _leave(self, attempt: AttemptId) -> _Flight | None:
        flight = self._flights.pop(attempt, None)
        if flight is None:
            return None
        self._rooms.left(flight.prefill)
        if len(self._due) > 2 * len(self._flights) + 64:
            self._due = [each for each in self._due if each[1] in self._flights]
            heapq.heapify(self._due)
        return flight

    def _let_come_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, attempt = heapq.heappop(self._due)
            flight = self._flights.get(attempt)
            if flight is not None and not flight.counted:
                flight.counted = True
                self._count(attempt, flight, Blame.UNKNOWN, Cause.SLOW, now)

    def _count(self, attempt: AttemptId, flight: _Flight, whose: Blame | None, cause: Cause, now: float) -> None:
        blamed = BLAMED[whose] if whose is not None else ()
        outcome = Outcome(now, True, flight.prefill, flight.decode, certain=whose is not Blame.UNKNOWN)
        if Guard.SOURCE in blamed:
            self._rooms.fell_behind(flight.prefill)
        for key in flight.keys:
            if key[0] in blamed:
                self._fail(attempt, key, outcome, cause)
            elif (breaker := self._broken.get(key)) is not None and breaker.unknown(attempt, now):
                self.probes[key[0], "unknown"] += 1
                self._shut = None

    def _fail(self, attempt: AttemptId, key: _Key, outcome: Outcome, cause: Cause) -> None:
        if key[0] is Guard.LINK:
            outcome = outcome._replace(certain=False)  # One source that breaks its transfers is not the link.
        probing = key in self._broken
        breaker = self._breaker(key)
        if breaker.ended(attempt, outcome):
            self._broken[key] = breaker
            self._shut = None
            if probing:
                self.probes[key[0], "failed"] += 1
            else:
                self.opened[key[0], cause] += 1

    def _breaker(self, key: _Key) -> Breaker:
        if (found := self._breakers.get(key)) is None:
            found = self._breakers[key] = Breaker(self.params, _WITNESSES[key[0]])
        return found

    def _is_past(self, key: _Key, gone: set[NodeId], known: frozenset[str] | set[str], now: float) -> bool:
        guard, source, target = key
        breaker = self._breakers[key]
        if breaker.is_idle(now) or source in gone or target in gone:
            return True
        # Behind a link that is cut all nodes leave, and come back: what is known of the link stays for a while.
        kept_s = self.params.window_s if guard is Guard.LINK and breaker.circuit is not Circuit.CLOSED else 0.0
        return (source not in known or target not in known) and now >= breaker.half_opens_at + kept_s

    def _look(self, now: float) -> Shut:
        shut = [key for key, breaker in self._broken.items() if not breaker.lets_through(now)]
        full = frozenset(self._rooms.full)
        if not self._broken and not full:
            return OPEN_TO_ALL
        pairs: dict[NodeId, frozenset[NodeId]] = {}
        for guard, source, target in shut:
            if guard is Guard.PAIR:
                pairs[NodeId(target)] = pairs.get(NodeId(target), NOBODY) | {NodeId(source)}
        resting = (each.half_opens_at for each in self._broken.values() if each.circuit is Circuit.OPEN)
        return Shut(
            sources=full | {NodeId(source) for guard, source, _ in shut if guard is Guard.SOURCE},
            pairs=MappingProxyType(pairs),
            links=frozenset(
                (RegionId(source), RegionId(target)) for guard, source, target in shut if guard is Guard.LINK
            ),
            full=full,
            half_opens_at=min(resting, default=math.inf),
        )
