"""Where each piece of an outgoing attempt is: not ready, ready, on a lane, to be sent again, or acknowledged.

A frame keeps its bounds for life: what has to be sent again is sent as it was, so that the receiver can tell frames it
has from frames it needs. Costs do not grow with the number of pieces: they are counted in ranges and frames.
"""

from collections import deque
from dataclasses import dataclass, field

from prfaas.transfer.attempts import OPEN, Attempt, LaneId, Phase
from prfaas.transfer.frames import Cause, ProtocolError
from prfaas.transfer.offer import Offer
from prfaas.transfer.outgoing import Destination, Urgency
from prfaas.transfer.pieces import Pieces, Ranges, Run

NOTHING = Pieces(())
NOWHERE = Destination(address="", incarnation=0, generation=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Outbound(Attempt):
    """`parts`: those that are ready, before Begin in the order in which they became so. `fresh`: pieces that were never
    taken. `flight`, by first piece: frames that lanes have. `again`, by first piece: frames that lanes lost.
    `counted_bytes`: what the egress meter was told could leave. `lost_bytes`:
    what lanes had of it when they were lost; `resent_bytes`: what was sent again for it. `asks`: the lane that carried
    its offer or seal, until that is answered. Times: `begun_at`, `ready_at` of the last part, `asked_at` of that offer
    or seal, `moved_at` when the receiver last got anything, `served_at` when a lane last took anything, or could
    have."""

    to: Destination = NOWHERE
    offer: Offer | None = None
    pieces: Pieces = NOTHING
    urgency: Urgency = Urgency.NORMAL
    tenant: str = ""
    weight: float = 1.0
    offered: bool = False
    asks: LaneId | None = None
    parts: dict[int, None] = field(default_factory=dict)
    fresh: deque[tuple[int, int]] = field(default_factory=deque)
    flight: dict[int, tuple[Run, LaneId]] = field(default_factory=dict)
    again: dict[int, Run] = field(default_factory=dict)
    acked: Ranges = field(default_factory=Ranges)
    ready_bytes: int = 0
    flight_bytes: int = 0
    again_bytes: int = 0
    acked_bytes: int = 0
    credit_bytes: int = 0
    counted_bytes: int = 0
    lost_bytes: int = 0
    resent_bytes: int = 0
    begun_at: float = 0.0
    ready_at: float = 0.0
    asked_at: float = 0.0
    moved_at: float = 0.0
    served_at: float = 0.0

    @property
    def taken_bytes(self) -> int:
        """Of different pieces, and still with a lane or acknowledged."""
        return self.flight_bytes + self.acked_bytes

    @property
    def waiting_bytes(self) -> int:
        """Counted by the egress meter and not with a lane."""
        return self.counted_bytes - self.taken_bytes

    @property
    def sendable_bytes(self) -> int:
        """Ready and within the credit; nothing if not even one frame is."""
        if self.phase not in OPEN:
            return 0
        room = min(self.ready_bytes, self.credit_bytes) - self.taken_bytes
        if self.again or (self.fresh and (room >= self.pieces.piece_bytes or self._first_bytes() <= room)):
            return room
        return 0

    @property
    def owed(self) -> bool:
        """Of what was sent something is to be acknowledged, or sent again."""
        return bool(self.flight or self.again) or self.phase is Phase.SEALED

    @property
    def all_taken(self) -> bool:
        """Every piece was given to a lane and none came back."""
        return len(self.parts) == len(self.pieces.parts) and not self.fresh and not self.again

    def enqueue(self, index: int) -> None:
        """The part has become ready."""
        first, stop = self.pieces.of_part(index)
        if first == stop:
            return
        self.ready_bytes += self.pieces.parts[index].nbytes
        if self.fresh and self.fresh[-1][1] == first:
            first, _ = self.fresh.pop()
        self.fresh.append((first, stop))

    def take(self, lane: LaneId, max_bytes: int, apart_bytes: int | None = None, *, alone: bool) -> Run | None:
        """The next frame, of at most so many bytes (`apart_bytes`: see pieces.py); `alone`: of one piece at least, or
        as it was when it is sent again."""
        run = self._next(max_bytes, apart_bytes, alone=alone)
        if run is not None:
            self.flight[run.first] = (run, lane)
            self.flight_bytes += run.nbytes
        return run

    def acknowledge(self, first: int, stop: int) -> list[tuple[Run, LaneId | None]]:
        """Frames that are acknowledged now, and which lane had them. Raises ProtocolError when these pieces are no
        frames of ours."""
        found: list[tuple[Run, LaneId | None]] = []
        while first < stop:
            end = self.acked.end(first)
            if end is None:
                run, lane = self._settled(first)
                found.append((run, lane))
                end = run.stop
            first = end
        return found

    def give_back(self, runs: list[Run]) -> None:
        """A lane lost these frames."""
        for run in runs:
            del self.flight[run.first]
            self.flight_bytes -= run.nbytes
            self.again_bytes += run.nbytes
            self.lost_bytes += run.nbytes
        back = self.again | {run.first: run for run in runs}
        self.again = {first: back[first] for first in sorted(back)}

    def forget(self) -> None:
        """Nothing more will be sent or acknowledged."""
        self.fresh.clear()
        self.flight.clear()
        self.again.clear()
        self.ready_bytes = self.flight_bytes = self.again_bytes = 0

    def check(self) -> None:
        assert self.flight_bytes == sum(run.nbytes for run, _ in self.flight.values())
        assert self.again_bytes == sum(run.nbytes for run in self.again.values())
        assert self.resent_bytes + self.again_bytes <= self.lost_bytes, f"sent again without a loss: {self}"
        assert self.acked_bytes == sum(self.pieces.bytes_of(first, stop) for first, stop in self.acked)
        assert self.phase not in OPEN or self.taken_bytes <= self.credit_bytes, f"beyond the credit: {self}"
        if self.phase in OPEN:
            whole = Ranges()
            frames = [
                (run.first, run.stop) for run in (*(run for run, _ in self.flight.values()), *self.again.values())
            ]
            for first, stop in (*self.acked, *frames, *self.fresh):
                whole.add(first, stop)
            ready = [self.pieces.of_part(index) for index in self.parts]
            assert whole.count == sum(stop - first for first, stop in ready), f"a piece is lost: {self}"
            assert all(whole.covers(first, stop) for first, stop in ready)

    def _first_bytes(self) -> int:
        first = self.fresh[0][0]
        return self.pieces.bytes_of(first, first + 1)

    def _next(self, max_bytes: int, apart_bytes: int | None, *, alone: bool) -> Run | None:
        if self.again:
            run = next(iter(self.again.values()))
            if not alone and run.nbytes > max_bytes:
                return None
            del self.again[run.first]
            self.again_bytes -= run.nbytes
            self.resent_bytes += run.nbytes
            return run
        if not self.fresh:
            return None
        first, stop = self.fresh[0]
        room = self.credit_bytes - self.taken_bytes
        end = min(stop, max(first + 1, self.pieces.within(first, min(max_bytes, room))))
        run = self.pieces.run(first, end, apart_bytes=apart_bytes)
        if run.nbytes > room or (not alone and run.nbytes > max_bytes):
            return None
        if run.stop == stop:
            self.fresh.popleft()
        else:
            self.fresh[0] = (run.stop, stop)
        return run

    def _settled(self, first: int) -> tuple[Run, LaneId | None]:
        lane: LaneId | None = None
        if first in self.flight:
            run, lane = self.flight.pop(first)
            self.flight_bytes -= run.nbytes
        elif first in self.again:
            run = self.again.pop(first)
            self.again_bytes -= run.nbytes
        else:
            raise ProtocolError(Cause.MALFORMED, f"piece {first} is acknowledged and was not sent")
        self.acked.add(run.first, run.stop)
        self.acked_bytes += run.nbytes
        return run, lane
