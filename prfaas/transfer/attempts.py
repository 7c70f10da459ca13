"""The life of an attempt in one pump, whichever way its bytes go.

An attempt holds a span of the pool. While a *lane* (a connection and its thread) is bound to it, that thread may touch
the span; the span goes back only after the lane has said that it let go: a time-out or an abort asks for that, it never
proves it. An attempt has exactly one outcome, and of several causes the first is kept. Closed attempts leave a
tombstone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, TypeVar

from prfaas.transfer.frames import Cause

LaneId = NewType("LaneId", int)

TOMBSTONES = 16384


class Phase(Enum):
    """SEALED: everything was sent (sender), everything has arrived and was checked (receiver). HANDED: the transfer is
    over and its lane is gone. DRAINED: it failed and its lane, if it had one, is gone."""

    RESERVED = "reserved"
    OFFERED = "offered"
    STREAMING = "streaming"
    SEALED = "sealed"
    HANDED = "handed"
    ABORTING = "aborting"
    DRAINED = "drained"
    RELEASED = "released"


NEXT = {
    Phase.RESERVED: {Phase.OFFERED, Phase.DRAINED, Phase.RELEASED},
    Phase.OFFERED: {Phase.STREAMING, Phase.ABORTING, Phase.DRAINED},
    Phase.STREAMING: {Phase.SEALED, Phase.ABORTING, Phase.DRAINED},
    Phase.SEALED: {Phase.HANDED, Phase.ABORTING, Phase.DRAINED},
    Phase.HANDED: {Phase.RELEASED},
    Phase.ABORTING: {Phase.DRAINED},
    Phase.DRAINED: {Phase.RELEASED},
    Phase.RELEASED: set(),
}
WITH_LANE = frozenset({Phase.OFFERED, Phase.STREAMING, Phase.SEALED, Phase.ABORTING})


@dataclass(slots=True, kw_only=True)
class Attempt:
    """`awaited`: the node was promised an outcome. `closing`: the span goes back as soon as no lane holds it; `asked`:
    and the node waits to hear so."""

    id: str
    tokens: int
    generation: int
    expires_at: float
    awaited: bool
    phase: Phase = Phase.RESERVED
    lane: LaneId | None = None
    closing: bool = False
    asked: bool = False

    def move(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.id}: {self.phase} -> {phase}"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Opened:
    """A span of `tokens` tokens was reserved for the attempt."""

    attempt: str
    tokens: int
    generation: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Last word of a lane about an attempt: its thread will not touch the span again. `cause` None: its work was done,
    which for a sender's lane means that the receiver has acknowledged everything."""

    lane: LaneId
    attempt: str
    now: float
    cause: Cause | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The node wants the attempt ended and its span back."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: make the lane let go of the span; tell the peer why."""

    lane: LaneId
    cause: Cause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """Command: tell the node that the transfer failed."""

    attempt: str
    cause: Cause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Command: nothing of this pump touches the span any more."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Command: tell the node that what it released is free."""

    attempt: str


LifeCommand = Stop | Lost | Free | Answer

A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """The open attempts of one direction, and the ids of those that were closed lately."""

    def __init__(self, tombstones: int = TOMBSTONES) -> None:
        self._open: dict[str, A] = {}
        self._closed: dict[str, None] = {}
        self._tombstones = tombstones
        self.failed = 0

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._open

    def __iter__(self) -> Iterator[A]:
        return iter(self._open.values())

    def get(self, attempt: str) -> A | None:
        return self._open.get(attempt)

    def held_by(self, lane: LaneId, attempt: str) -> A | None:
        """The attempt, if it is this lane that it is bound to. What other lanes say about it does not count."""
        found = self._open.get(attempt)
        return found if found is not None and found.lane == lane else None

    def was_closed(self, attempt: str) -> bool:
        return attempt in self._closed

    def open(self, attempt: A) -> None:
        assert attempt.id not in self._open, f"{attempt.id} is open"
        self._open[attempt.id] = attempt

    def bind(self, attempt: A, lane: LaneId) -> None:
        attempt.lane = lane
        attempt.move(Phase.OFFERED)

    def fail(self, attempt: A, cause: Cause, detail: str = "") -> list[LifeCommand]:
        """End the attempt. Does nothing to one that already has its outcome."""
        if not attempt.awaited:
            return []
        lost = self._lost(attempt, cause, detail)
        if attempt.lane is None:
            attempt.move(Phase.DRAINED)
            return lost
        attempt.move(Phase.ABORTING)
        return [Stop(attempt.lane, cause, detail), *lost]

    def drained(self, attempt: A, cause: Cause | None, detail: str = "") -> list[LifeCommand]:
        """The attempt's lane let go, on its own accord for `cause` (None: as the end of its work), or because it was
        told to."""
        attempt.lane = None
        failed = attempt.awaited or attempt.phase is Phase.ABORTING
        attempt.move(Phase.DRAINED if failed else Phase.HANDED)
        lost = self._lost(attempt, cause or Cause.ABORTED, detail) if attempt.awaited else []
        return [*lost, *self._settle(attempt)]

    def release(self, attempt_id: str) -> list[LifeCommand]:
        attempt = self._open.get(attempt_id)
        if attempt is None:
            return [Answer(attempt_id)]
        attempt.asked = True
        return self._close(attempt, Cause.ABORTED, "released")

    def expire(self, now: float) -> list[LifeCommand]:
        late = [attempt for attempt in self._open.values() if attempt.expires_at <= now and not attempt.closing]
        return [command for attempt in late for command in self._close(attempt, Cause.EXPIRED, "")]

    def check(self) -> None:
        for attempt in self._open.values():
            assert (attempt.lane is not None) == (attempt.phase in WITH_LANE), f"{attempt}"
            assert not (attempt.awaited and attempt.phase in (Phase.HANDED, Phase.ABORTING, Phase.DRAINED)), (
                f"{attempt}"
            )
            assert not attempt.closing or attempt.lane is not None, f"{attempt} holds its span for nothing"
        assert len(self._closed) <= self._tombstones
        assert not self._open.keys() & self._closed.keys()

    def _close(self, attempt: A, cause: Cause, detail: str) -> list[LifeCommand]:
        attempt.closing = True
        return [*self.fail(attempt, cause, detail), *self._settle(attempt)]

    def _settle(self, attempt: A) -> list[LifeCommand]:
        if not attempt.closing or attempt.lane is not None:
            return []
        attempt.move(Phase.RELEASED)
        del self._open[attempt.id]
        self._closed[attempt.id] = None
        if len(self._closed) > self._tombstones:
            del self._closed[next(iter(self._closed))]
        return [Free(attempt.id), *([Answer(attempt.id)] if attempt.asked else [])]

    def _lost(self, attempt: A, cause: Cause, detail: str) -> list[LifeCommand]:
        attempt.awaited = False
        self.failed += cause is not Cause.ABORTED
        return [Lost(attempt.id, cause, detail)]
