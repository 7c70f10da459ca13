"""The life of an attempt in one pump, whichever way its bytes go.

An attempt holds windows of the pool. Lane threads *touch* them one frame at a time; they go back only when none
does, and a time-out or an abort does not change that. An attempt has exactly one outcome, and of several causes the
first is kept. Closed attempts leave a tombstone that remembers how they ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, TypeVar

from prfaas.kvcache.layout import Extent, Window
from prfaas.transfer.frames import Cause

LaneId = NewType("LaneId", int)

TOMBSTONES = 16384


class Phase(Enum):
    """OFFERED: an offer was sent (sender), has come (receiver). SEALED: the seal was sent or has come; pieces may still
    be on their way. HANDED: all was delivered. DRAINED: it failed and no lane touches its memory."""

    RESERVED = "reserved"
    OFFERED = "offered"
    STREAMING = "streaming"
    SEALED = "sealed"
    HANDED = "handed"
    ABORTING = "aborting"
    DRAINED = "drained"
    RELEASED = "released"


NEXT = {
    Phase.RESERVED: {Phase.OFFERED, Phase.STREAMING, Phase.DRAINED, Phase.RELEASED},
    Phase.OFFERED: {Phase.STREAMING, Phase.DRAINED},
    Phase.STREAMING: {Phase.SEALED, Phase.ABORTING, Phase.DRAINED},
    Phase.SEALED: {Phase.HANDED, Phase.ABORTING, Phase.DRAINED},
    Phase.HANDED: {Phase.RELEASED},
    Phase.ABORTING: {Phase.DRAINED},
    Phase.DRAINED: {Phase.RELEASED},
    Phase.RELEASED: set(),
}
OPEN = frozenset({Phase.STREAMING, Phase.SEALED})
OVER = frozenset({Phase.HANDED, Phase.ABORTING, Phase.DRAINED})


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """`extent`: what it carries, in `windows`. `awaited`: the node was promised an outcome. `touches`: lanes whose
    thread may touch the memory now. `closing`: it goes back as soon as there are none; `asked`: and the node waits to
    hear so. `why`: of a failed one."""

    id: str
    extent: Extent
    windows: tuple[Window, ...]
    generation: int
    expires_at: float
    awaited: bool
    phase: Phase = Phase.RESERVED
    touches: int = 0
    closing: bool = False
    asked: bool = False
    why: tuple[Cause, str] | None = None

    @property
    def ending(self) -> bool:
        """Somebody waits for the lanes to let go of the memory."""
        return self.closing or self.phase is Phase.ABORTING

    def move(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.id}: {self.phase} -> {phase}"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Opened:
    """The attempt may use these windows of the pool for the extent."""

    attempt: str
    extent: Extent
    windows: tuple[Window, ...]
    generation: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Release:
    """The node wants the attempt ended and its memory back."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Command: shut the lane's connection, whatever its thread is doing. Its last word then follows."""

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
    """Command: nothing of this pump touches the attempt's memory any more."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Command: tell the node that what it released is free."""

    attempt: str


LifeCommand = Hang | Lost | Free | Answer

A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """The open attempts of one direction, and how those ended that were closed lately."""

    def __init__(self, tombstones: int = TOMBSTONES) -> None:
        self._open: dict[str, A] = {}
        self._closed: dict[str, bool] = {}
        self._tombstones = tombstones
        self.failed = 0

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._open

    def __iter__(self) -> Iterator[A]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def get(self, attempt: str) -> A | None:
        return self._open.get(attempt)

    def was_closed(self, attempt: str) -> bool:
        return attempt in self._closed

    def ended_well(self, attempt: str) -> bool:
        """Whether it is closed, and everything was delivered before."""
        return self._closed.get(attempt, False)

    def open(self, attempt: A) -> None:
        assert attempt.id not in self._open, f"{attempt.id} is open"
        self._open[attempt.id] = attempt

    def fail(self, attempt: A, cause: Cause, detail: str = "") -> list[LifeCommand]:
        """End the attempt. Does nothing to one that already has its outcome."""
        if not attempt.awaited:
            return []
        attempt.awaited, attempt.why = False, (cause, detail)
        self.failed += cause is not Cause.ABORTED
        attempt.move(Phase.ABORTING if attempt.touches else Phase.DRAINED)
        return [Lost(attempt.id, cause, detail)]

    def untouched(self, attempt: A) -> list[LifeCommand]:
        """A lane let go of the memory."""
        attempt.touches -= 1
        if attempt.touches:
            return []
        if attempt.phase is Phase.ABORTING:
            attempt.move(Phase.DRAINED)
        return self._settle(attempt)

    def close(self, attempt: A, cause: Cause, detail: str = "") -> list[LifeCommand]:
        """The memory is to go back; an attempt without an outcome fails for it."""
        attempt.closing = True
        return [*self.fail(attempt, cause, detail), *self._settle(attempt)]

    def late(self, now: float) -> list[A]:
        """Those past their deadline that nobody closes yet."""
        return [attempt for attempt in self._open.values() if attempt.expires_at <= now and not attempt.closing]

    def check(self) -> None:
        for attempt in self._open.values():
            assert attempt.touches >= 0, f"{attempt}"
            assert not (attempt.awaited and attempt.phase in OVER), f"{attempt}"
            assert (attempt.phase is Phase.ABORTING) <= (attempt.touches > 0), f"{attempt} waits for nothing"
            assert not attempt.closing or attempt.touches, f"{attempt} holds its memory for nothing"
        assert len(self._closed) <= self._tombstones
        assert not self._open.keys() & self._closed.keys()

    def _settle(self, attempt: A) -> list[LifeCommand]:
        if not attempt.closing or attempt.touches:
            return []
        well = attempt.phase is Phase.HANDED
        attempt.move(Phase.RELEASED)
        del self._open[attempt.id]
        self._closed[attempt.id] = well
        if len(self._closed) > self._tombstones:
            del self._closed[next(iter(self._closed))]
        return [Free(attempt.id), *([Answer(attempt.id)] if attempt.asked else [])]
