"""The words of the sending side: what the node and the lanes tell the `Sender`, what it tells them, and what it gives a
lane to write.

Commands go to the control thread, except Wake, which whoever gets it may carry out at once. Work goes to the lane that
took it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from prfaas.kvcache.layout import Extent
from prfaas.transfer.attempts import LaneId, LifeCommand, Opened, Release, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import Offer, Seal
from prfaas.transfer.pieces import Run
from prfaas.transfer.tickets import Keys


class Urgency(IntEnum):
    """Which work goes first. CONTROL: offers, seals and aborts, and nothing that a node asks for. FINISHING: what a
    request waits for, be it that the node says so or that its attempt is nearly over."""

    CONTROL = 0
    FINISHING = 1
    NORMAL = 2
    BACKGROUND = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """A listening pump. Another incarnation at the same address is another peer."""

    address: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where an attempt's KV goes: what the receiver holds for it under `generation`, which `ticket` allows us to fill,
    with frames under `keys` (None where frames travel in plain). What is sent is counted by `region`."""

    address: str
    incarnation: int
    generation: int
    region: str = ""
    ticket: bytes = field(default=b"", repr=False)
    keys: Keys | None = field(default=None, repr=False)

    @property
    def peer(self) -> Peer:
        return Peer(self.address, self.incarnation)


# From the node.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Send `extent` of what the attempt's memory holds; None: all of it. Tenants share by weight within an urgency,
    attempts of a tenant evenly."""

    attempt: str
    to: Destination
    chunk_ends: tuple[int, ...]
    now: float
    extent: Extent | None = None
    urgency: Urgency = Urgency.NORMAL
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PartsReady:
    """These parts are complete in memory and will not change."""

    attempt: str
    parts: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much may be sent to the region; None: as much as the line carries. Pacing is the pump's; here it says how
    many lanes are worth while."""

    region: str
    bytes_per_s: float | None


# From the lanes. After LaneDown nothing may come from a lane, and it touches nothing.


@dataclass(frozen=True, slots=True)
class LaneUp:
    """Connected and welcomed: the lane may take work."""

    lane: LaneId
    now: float


@dataclass(frozen=True, slots=True)
class LaneDown:
    """Last word of a lane, also of one that never came up. With `cause` None the end was in order."""

    lane: LaneId
    cause: Cause | None
    detail: str
    now: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A KEEPALIVE has come. Every other frame's event says it too."""

    lane: LaneId
    now: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver has compared the offer. `applied`: pieces (first, stop) that it has already. `credit_bytes`: how
    many bytes of different pieces may be sent in all."""

    lane: LaneId
    attempt: str
    applied: tuple[tuple[int, int], ...]
    credit_bytes: int
    now: float


@dataclass(frozen=True, slots=True)
class Acked:
    """The receiver has applied and checked these pieces (first, stop)."""

    lane: LaneId
    attempt: str
    ranges: tuple[tuple[int, int], ...]
    credit_bytes: int
    now: float


@dataclass(frozen=True, slots=True)
class Completed:
    lane: LaneId
    attempt: str
    payload_bytes: int
    now: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """The receiver will have no more of the attempt."""

    lane: LaneId
    attempt: str
    cause: Cause
    detail: str
    now: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """So many of the bytes written to these lanes have not reached the peer's kernel; and their round trips where
    known."""

    unacknowledged: Mapping[LaneId, int]
    now: float
    rtt_s: Mapping[LaneId, float] = field(default_factory=dict)


FromNode = Opened | Begin | PartsReady | Allowance | Release
FromLane = LaneUp | LaneDown | Heard | Accepted | Acked | Completed | Aborted
Event = FromNode | FromLane | Sampled | Tick


# Work: what a lane writes next.


@dataclass(frozen=True, slots=True)
class OfferWork:
    attempt: str
    to: Destination
    offer: Offer


@dataclass(frozen=True, slots=True)
class DataWork:
    """A DATA frame for each run. The attempt's memory stays as it is until the lane says `wrote`, or LaneDown."""

    attempt: str
    to: Destination
    runs: tuple[Run, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SealWork:
    attempt: str
    to: Destination
    seal: Seal


@dataclass(frozen=True, slots=True)
class AbortWork:
    """The attempt may be gone from here by now."""

    attempt: str
    to: Destination
    cause: Cause
    detail: str


Work = OfferWork | DataWork | SealWork | AbortWork


# Commands.


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection; answered by LaneUp or LaneDown."""

    lane: LaneId
    peer: Peer


@dataclass(frozen=True, slots=True)
class Wake:
    """These lanes found nothing to do when they asked last; now there is something."""

    lanes: tuple[LaneId, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Tell the node that the receiver has everything. `exposed_s` runs from the last part becoming ready. `lost_bytes`
    is what lanes that were lost had of it that was not acknowledged, what they were writing included; `resent_bytes` is
    what had to be sent again for it."""

    attempt: str
    payload_bytes: int
    exposed_s: float
    lost_bytes: int
    resent_bytes: int


Command = LifeCommand | Dial | Wake | Delivered
