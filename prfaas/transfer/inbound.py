"""Where each piece of an incoming attempt is: still to come, being written by a lane, or applied.

A frame that is sent again is the same frame, so no frame meets another in part; one that does is refused.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.attempts import Attempt, LaneId
from prfaas.transfer.frames import Cause, Header, ProtocolError
from prfaas.transfer.incoming import Reply
from prfaas.transfer.offer import Offer
from prfaas.transfer.pieces import Pieces, Ranges, Run

NOTHING = Pieces(())


@dataclass(slots=True, kw_only=True, eq=False)
class Inbound(Attempt):
    """`peer` has offered it. `lane` spoke of it last. `claimed` (first piece to stop): what lanes write now; `doubles`:
    lanes that threw the same pieces away meanwhile. `seal_lane` is owed a COMPLETE."""

    peer: str = ""
    lane: LaneId | None = None
    offer: Offer | None = None
    pieces: Pieces = NOTHING
    applied: Ranges = field(default_factory=Ranges)
    applied_bytes: int = 0
    claimed: dict[int, int] = field(default_factory=dict)
    claimed_bytes: int = 0
    doubles: dict[int, list[LaneId]] = field(default_factory=dict)
    seal_lane: LaneId | None = None

    def credit(self, window_bytes: int) -> int:
        """How many bytes of different pieces may be sent in all: room for one more at least."""
        return min(self.pieces.nbytes, self.applied_bytes + max(window_bytes, self.pieces.piece_bytes))

    def frame(self, header: Header) -> Run:
        """The pieces that a frame is about. Raises ProtocolError unless it describes them as they are."""
        first, stop = header.index, header.index + header.count
        if not first < stop <= self.pieces.count:
            raise ProtocolError(Cause.UNEXPECTED_PART, f"pieces {first}:{stop} of {self.pieces.count}")
        run = self.pieces.run(first, stop)
        if (run.count, run.offset, run.nbytes) != (header.count, header.offset, header.length):
            detail = f"pieces {first}:{stop} at {header.offset}+{header.length}, not {run.offset}+{run.nbytes}"
            raise ProtocolError(Cause.UNEXPECTED_PART, detail)
        return run

    def claim(self, run: Run, window_bytes: int, now: float) -> "Claim":
        """Raises ProtocolError unless all of the run is new and within the credit."""
        first, stop = run.first, run.stop
        if self.applied.meets(first, stop) or any(first < to and at < stop for at, to in self.claimed.items()):
            raise ProtocolError(Cause.DUPLICATE_PART, f"pieces {first}:{stop} have come in part")
        if self.applied_bytes + self.claimed_bytes + run.nbytes > self.credit(window_bytes):
            raise ProtocolError(Cause.UNEXPECTED_PART, f"pieces {first}:{stop} are beyond the credit")
        self.claimed[first] = stop
        self.claimed_bytes += run.nbytes
        self.touches += 1
        return Claim(attempt=self, first=first, stop=stop, nbytes=run.nbytes, since=now)

    def boundary(self, layout: KvLayout) -> int:
        """Up to which row of the extent all can be used: the greatest chunk end up to which every part was verified.
        With states it is all or nothing: rows are worth little to whoever waits for the state behind them."""
        first, stop = self.extent.first, self.extent.stop
        if self.offer is None:
            return first
        parts = enumerate(self.pieces.parts)
        missing = [part.stop for index, part in parts if not self.applied.covers(*self.pieces.of_part(index))]
        if not missing:
            return stop
        if layout.state_bytes and self.extent.states:
            return first
        return max((end for end in self.offer.chunk_ends if end < min(missing)), default=first)


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """A lane writes these pieces, since then."""

    attempt: Inbound
    first: int
    stop: int
    nbytes: int
    since: float


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """`acks`: ranges to acknowledge, per attempt; `replies`: the rest, at most one of a kind per attempt."""

    peer: str
    hung: bool = False
    claim: Claim | None = None
    acks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    replies: dict[tuple[str, type[Reply]], Reply] = field(default_factory=dict)

    def ack(self, attempt: str, first: int, stop: int) -> None:
        ranges = self.acks.setdefault(attempt, [])
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((first, stop))

    def reply(self, reply: Reply) -> None:
        self.replies[reply.attempt, type(reply)] = reply

    def let_go(self, lanes: Container[LaneId]) -> tuple[Claim, list[LaneId]]:
        """Its claim is over. And which of `lanes` threw the same pieces away meanwhile."""
        claim = self.claim
        assert claim is not None, "the lane claimed nothing"
        self.claim = None
        attempt = claim.attempt
        del attempt.claimed[claim.first]
        attempt.claimed_bytes -= claim.nbytes
        return claim, [double for double in attempt.doubles.pop(claim.first, ()) if double in lanes]
