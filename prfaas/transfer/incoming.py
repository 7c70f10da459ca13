"""The words of the receiving side: what the node and the lanes tell the `Receiver`, what it tells them, and what a lane
has to answer.

A lane asks for its `replies` after it has told or claimed something. Commands go to the control thread, except
Answerable, which says that lanes that have not just asked have something to write too: whoever gets it may make them
ask.
"""

from dataclasses import dataclass

from prfaas.transfer.attempts import LaneId, LifeCommand, Opened, Release, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import Offer, Seal

# From the lanes. After LaneGone nothing may come from a lane, and it touches nothing.


@dataclass(frozen=True, slots=True)
class Greeted:
    """A lane was welcomed. `peer` names the process at the other end: two lanes with the same name are of one process.
    Frames of an attempt are only taken from lanes of the peer that offered it."""

    lane: LaneId
    peer: str
    now: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A KEEPALIVE has come. Every other frame's event says it too."""

    lane: LaneId
    now: float


@dataclass(frozen=True, slots=True)
class OfferArrived:
    """Its ticket was verified and its body opened. An offer that was accepted before is accepted again."""

    lane: LaneId
    attempt: str
    generation: int
    offer: Offer
    now: float


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """Its ticket is not good for it. The lane may be another attempt's too, and goes on."""

    lane: LaneId
    attempt: str
    cause: Cause
    detail: str
    now: float


@dataclass(frozen=True, slots=True)
class SealArrived:
    lane: LaneId
    attempt: str
    generation: int
    seal: Seal
    now: float


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The sender will send no more of the attempt."""

    lane: LaneId
    attempt: str
    generation: int
    cause: Cause
    detail: str
    now: float


@dataclass(frozen=True, slots=True)
class LaneGone:
    """Last word of a lane."""

    lane: LaneId
    now: float


@dataclass(frozen=True, slots=True)
class Turned:
    """A connection or a frame was refused before it got here (greeting, lengths). Only counted."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Stop:
    """The node wants no more of the attempt than what has come; it fails unless it has its outcome. Its memory
    stays."""

    attempt: str


FromLane = Greeted | Heard | OfferArrived | OfferRefused | SealArrived | PeerAborted | LaneGone | Turned
Event = FromLane | Opened | Release | Stop | Tick


# What becomes of a DATA frame's payload.


@dataclass(frozen=True, slots=True)
class Place:
    """Read it to these places (offset, bytes) of the pool, check it, and say `landed` or `missed`. Until then
    nothing else touches them."""

    attempt: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Read it to nowhere and go on; nothing is to be said. `cause` None: we have it already."""

    cause: Cause | None


# Replies: what a lane writes back.


@dataclass(frozen=True, slots=True)
class Accept:
    attempt: str
    applied: tuple[tuple[int, int], ...]
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Ack:
    attempt: str
    ranges: tuple[tuple[int, int], ...]
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The COMPLETE frame."""

    attempt: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Abort:
    attempt: str
    cause: Cause
    detail: str


Reply = Accept | Ack | Done | Abort


# Commands.


@dataclass(frozen=True, slots=True)
class Complete:
    """Tell the node that the KV is all there."""

    attempt: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Answerable:
    """There is something for these lanes to write."""

    lanes: tuple[LaneId, ...]


Command = LifeCommand | Complete | Answerable
