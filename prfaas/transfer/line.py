"""What a sender has to do with one peer: its lanes, what each of them carries, the order of work, and when to dial.

The machine knows a lane from Dial to LaneDown. `flight` is what the lane must give back when it is lost.
"""

from dataclasses import dataclass, field

from prfaas.transfer.attempts import Hang, LaneId
from prfaas.transfer.frames import Cause
from prfaas.transfer.lanes import NEAR_LANES, NEAR_RTT_S, Rest
from prfaas.transfer.outbound import Outbound
from prfaas.transfer.outbox import Outbox
from prfaas.transfer.outgoing import Peer, Wake, Work
from prfaas.transfer.pieces import Run


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """`work` is being written, since `taken_at`; `touching`: and it is from this attempt's span. `idle_since`: it asked
    and found nothing, and was not woken since. `asks`: attempts whose offer or seal it carried and that still wait for
    the answer. `hung`: why we shut it; its last word is due. Of the `taken_bytes` that it was given, `written_bytes`
    were written, `left_bytes` have left this machine, `acked_bytes` were acknowledged."""

    id: LaneId
    line: "Line"
    heard_at: float
    up: bool = False
    hung: Cause | None = None
    work: Work | None = None
    touching: Outbound | None = None
    taken_at: float = 0.0
    idle_since: float | None = None
    flight: dict[tuple[str, int], tuple[Outbound, Run]] = field(default_factory=dict)
    asks: dict[str, None] = field(default_factory=dict)
    taken_bytes: int = 0
    written_bytes: int = 0
    left_bytes: int = 0
    acked_bytes: int = 0

    @property
    def free(self) -> bool:
        """It could take work now, or will ask for some at once."""
        return self.work is None and self.hung is None

    @property
    def busy(self) -> bool:
        """It has work, or asks for some as soon as it can."""
        return self.up and self.hung is None and self.idle_since is None

    @property
    def owed(self) -> bool:
        """An answer is to come on it."""
        return bool(self.flight or self.asks)

    @property
    def last(self) -> bool:
        """The only one of attempts that are under way."""
        return bool(self.line.attempts) and len(self.line.lanes) == 1

    def hang(self, cause: Cause, detail: str) -> Hang:
        self.hung = cause
        return Hang(self.id, cause, detail)


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """`attempts` have it for their destination."""

    peer: Peer
    region: str
    outbox: Outbox
    rest: Rest
    lanes: dict[LaneId, Lane] = field(default_factory=dict)
    attempts: dict[str, Outbound] = field(default_factory=dict)
    rtt_s: float | None = None

    @property
    def up(self) -> bool:
        return any(lane.up and lane.hung is None for lane in self.lanes.values())

    def room(self, beside: Lane | None = None) -> int:
        """How many lanes may be busy that are not yet, `beside` apart."""
        if self.rtt_s is None or self.rtt_s >= NEAR_RTT_S:
            return len(self.lanes)
        return NEAR_LANES - sum(lane.busy for lane in self.lanes.values() if lane is not beside)

    def frames(self, frame_bytes: int) -> int:
        """About how many lanes could be busy now."""
        return len(self.outbox.control) + -(-self.outbox.waiting_bytes // frame_bytes)

    def wake(self, frames: int) -> list[Wake]:
        """The lanes that sleep, as far as there is work for them."""
        found = [lane for lane in self.lanes.values() if lane.idle_since is not None and lane.free]
        found = found[: max(0, min(frames, self.room()))]
        for lane in found:
            lane.idle_since = None
        return [Wake(tuple(lane.id for lane in found))] if found else []

    def missing(self, frames: int, wanted: int) -> int:
        """How many lanes more would have work."""
        ready = sum(lane.free for lane in self.lanes.values())
        return max(0, min(frames - ready, wanted - len(self.lanes)))
