"""Outgoing transfers of one pump: what is offered, and which parts may leave when.

Opened -> Begin -> Dial -> Accepted -> Stream... -> Seal -> Drained with the receiver's acknowledgement -> Delivered.
Parts may become ready before the transfer begins; they leave in the order in which they became ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from prfaas.kvcache.layout import KvLayout, Part
from prfaas.transfer.attempts import (
    TOMBSTONES,
    Attempt,
    Attempts,
    Drained,
    LaneId,
    LifeCommand,
    Lost,
    Opened,
    Phase,
    Release,
    Tick,
)
from prfaas.transfer.egress import EgressMeter
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import Offer, offer_for


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an attempt's KV goes: the span that the receiver's `incarnation` holds for it under `generation`. What is
    sent is counted by `region`."""

    address: str
    incarnation: int
    generation: int
    region: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """The node wants the span sent, through `lane`, which is new."""

    lane: LaneId
    attempt: str
    to: Destination
    chunk_ends: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class PartsReady:
    """These parts are complete in the span and will not change."""

    attempt: str
    parts: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver has compared the offer and waits for the parts."""

    lane: LaneId
    attempt: str
    now: float


@dataclass(frozen=True, slots=True)
class PartSent:
    lane: LaneId
    attempt: str
    index: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """So many bytes of what these lanes were given to send have not reached the peer."""

    unacknowledged: Mapping[LaneId, int]
    now: float


FromLane = Accepted | PartSent | Drained
Event = FromLane | Sampled | Opened | Begin | PartsReady | Release | Tick


@dataclass(frozen=True, slots=True)
class Dial:
    """Command: connect the lane and make the offer."""

    lane: LaneId
    attempt: str
    to: Destination
    offer: Offer


@dataclass(frozen=True, slots=True)
class Stream:
    """Command: send these parts after those sent before; with `last`, send the seal after them and await the answer."""

    lane: LaneId
    parts: tuple[Part, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    """Command: tell the node that the receiver has everything."""

    attempt: str
    payload_bytes: int
    exposed_s: float


Command = LifeCommand | Dial | Stream | Delivered


@dataclass(slots=True, kw_only=True)
class Outbound(Attempt):
    """`ready`: every part that became so, at `ready_at` the last; `waiting`: those that the lane has not got, in that
    order. Of the `queued_bytes` that the lane has got `handed_bytes` were written to its socket and `left_bytes` have
    left."""

    parts: tuple[Part, ...] = ()
    ready: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    ready_at: float = 0.0
    region: str = ""
    queued_bytes: int = 0
    handed_bytes: int = 0
    left_bytes: int = 0


class Sender:
    def __init__(self, layout: KvLayout, tombstones: int = TOMBSTONES) -> None:
        self._layout = layout
        self._attempts: Attempts[Outbound] = Attempts(tombstones)
        self.sent_bytes = 0
        self.egress = EgressMeter()

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._attempts

    @property
    def failed(self) -> int:
        return self._attempts.failed

    def was_closed(self, attempt: str) -> bool:
        return self._attempts.was_closed(attempt)

    def phase(self, attempt: str) -> Phase | None:
        """None for an attempt that is not known, or no longer."""
        found = self._attempts.get(attempt)
        return found.phase if found else None

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Opened():
                return self._opened(event)
            case Begin():
                return self._begin(event)
            case PartsReady():
                return self._ready(event)
            case Accepted():
                return self._accepted(event)
            case PartSent():
                return self._sent(event)
            case Sampled():
                return self._sampled(event)
            case Drained():
                return self._drained(event)
            case Release():
                return [*self._attempts.release(event.attempt)]
            case Tick():
                return [*self._attempts.expire(event.now)]
            case _:
                assert_never(event)

    def check(self) -> None:
        self._attempts.check()
        self.egress.check()
        for attempt in self._attempts:
            assert attempt.ready.issuperset(attempt.waiting)
            sealed = attempt.phase in (Phase.SEALED, Phase.HANDED)
            assert not sealed or len(attempt.ready) == len(attempt.parts), f"sealed with parts missing: {attempt}"
            assert not sealed or not attempt.waiting, f"sealed before all was sent: {attempt}"

    def _opened(self, event: Opened) -> list[Command]:
        outbound = Outbound(
            id=event.attempt,
            tokens=event.tokens,
            generation=event.generation,
            expires_at=event.expires_at,
            awaited=False,
        )
        self._attempts.open(outbound)
        return []

    def _begin(self, event: Begin) -> list[Command]:
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return [Lost(event.attempt, Cause.UNKNOWN_ATTEMPT, "nothing is reserved")]
        if attempt.phase is not Phase.RESERVED:
            return []
        attempt.awaited = True
        if not attempt.ready:
            attempt.ready_at = event.now
        try:
            offer, attempt.parts = offer_for(self._layout, attempt.tokens, event.chunk_ends)
        except ValueError as error:
            return [*self._attempts.fail(attempt, Cause.OFFER_MISMATCH, str(error))]
        attempt.region = event.to.region
        self._attempts.bind(attempt, event.lane)
        return [Dial(event.lane, attempt.id, event.to, offer)]

    def _ready(self, event: PartsReady) -> list[Command]:
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return []
        fresh = [index for index in dict.fromkeys(event.parts) if index not in attempt.ready]
        attempt.ready.update(fresh)
        attempt.waiting += fresh
        attempt.ready_at = event.now
        return self._stream(attempt, event.now) if attempt.phase is Phase.STREAMING else []

    def _accepted(self, event: Accepted) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None or attempt.phase is not Phase.OFFERED:
            return []
        attempt.move(Phase.STREAMING)
        return self._stream(attempt, event.now)

    def _stream(self, attempt: Outbound, now: float) -> list[Command]:
        assert attempt.lane is not None
        unknown = [index for index in attempt.waiting if not 0 <= index < len(attempt.parts)]
        if unknown:
            return [*self._attempts.fail(attempt, Cause.UNEXPECTED_PART, f"part {unknown[0]} of {len(attempt.parts)}")]
        parts = tuple(attempt.parts[index] for index in attempt.waiting)
        last = len(attempt.ready) == len(attempt.parts)
        attempt.waiting.clear()
        nbytes = sum(part.nbytes for part in parts)
        attempt.queued_bytes += nbytes
        self.egress.queued(attempt.region, nbytes, now)
        if last:
            attempt.move(Phase.SEALED)
        return [Stream(attempt.lane, parts, last)] if parts or last else []

    def _sent(self, event: PartSent) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is not None:
            nbytes = attempt.parts[event.index].nbytes
            self.sent_bytes += nbytes
            attempt.handed_bytes += nbytes
        return []

    def _sampled(self, event: Sampled) -> list[Command]:
        left: dict[str, int] = {}
        for attempt in self._attempts:
            if attempt.lane is not None and attempt.lane in event.unacknowledged:
                reached = attempt.handed_bytes - event.unacknowledged[attempt.lane]
                fresh = max(0, reached - attempt.left_bytes)
                attempt.left_bytes += fresh
                left[attempt.region] = left.get(attempt.region, 0) + fresh
        for region, nbytes in left.items():
            self.egress.sent(region, nbytes, event.now)
        return []

    def _drained(self, event: Drained) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None:
            return []
        rest = attempt.queued_bytes - attempt.left_bytes
        if event.cause is None:
            self.egress.sent(attempt.region, rest, event.now)
        else:
            self.egress.dropped(attempt.region, rest, event.now)
        attempt.left_bytes += rest
        delivered: list[Command] = []
        if event.cause is None and attempt.awaited:
            assert attempt.phase is Phase.SEALED, f"acknowledged before it was sealed: {attempt}"
            attempt.awaited = False
            payload_bytes = sum(part.nbytes for part in attempt.parts)
            delivered = [Delivered(attempt.id, payload_bytes, event.now - attempt.ready_at)]
        return [*delivered, *self._attempts.drained(attempt, event.cause, event.detail)]
