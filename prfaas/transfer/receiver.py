"""Incoming transfers of one pump: which offers are accepted, and when an attempt's KV is complete.

OfferAnnounced -> Admit -> OfferArrived -> Accept -> PartArrived... -> SealArrived -> Acknowledge and Complete. What
must come is derived here, never taken from the offer, so that nothing can be left out without a name.
"""

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
    Opened,
    Phase,
    Release,
    Stop,
    Tick,
)
from prfaas.transfer.frames import NOT_THE_FRAMES_FAULT, Cause, ProtocolError
from prfaas.transfer.grant import Grant
from prfaas.transfer.offer import Offer, Seal, expected_parts, part_name, seal_for


@dataclass(frozen=True, slots=True)
class OfferAnnounced:
    """The header of an OFFER has come; its payload has not been read."""

    lane: LaneId
    attempt: str
    generation: int


@dataclass(frozen=True, slots=True)
class OfferArrived:
    lane: LaneId
    attempt: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class PartArrived:
    """Checked and in its place."""

    lane: LaneId
    attempt: str
    index: int
    crc: int


@dataclass(frozen=True, slots=True)
class SealArrived:
    lane: LaneId
    attempt: str
    seal: Seal


@dataclass(frozen=True, slots=True)
class Turned:
    """A connection ended before it belonged to an attempt."""

    cause: Cause


FromLane = OfferAnnounced | OfferArrived | PartArrived | SealArrived | Drained | Turned
Event = FromLane | Opened | Release | Tick


@dataclass(frozen=True, slots=True)
class Admit:
    """Command: the lane may read the offer."""

    lane: LaneId


@dataclass(frozen=True, slots=True)
class Accept:
    """Command: the lane may receive what the grant allows into the attempt's span."""

    lane: LaneId
    attempt: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Command: tell the sender that everything was applied and checked. The lane's work is then done."""

    lane: LaneId


@dataclass(frozen=True, slots=True)
class Complete:
    """Command: tell the node that the KV is all there."""

    attempt: str
    payload_bytes: int


Command = LifeCommand | Admit | Accept | Acknowledge | Complete


@dataclass(slots=True, kw_only=True)
class Inbound(Attempt):
    parts: tuple[Part, ...] = ()
    crcs: dict[int, int] = field(default_factory=dict)


class Receiver:
    """`refused_frames` counts frames and connections that were not acceptable, whoever sent them."""

    def __init__(self, layout: KvLayout, tombstones: int = TOMBSTONES) -> None:
        self._layout = layout
        self._attempts: Attempts[Inbound] = Attempts(tombstones)
        self.refused_frames = 0
        self.received_bytes = 0

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
            case OfferAnnounced():
                return [self._announced(event)]
            case OfferArrived():
                return self._offered(event)
            case PartArrived():
                return self._arrived(event)
            case SealArrived():
                return self._sealed(event)
            case Drained():
                return self._drained(event)
            case Turned():
                self._count(event.cause)
                return []
            case Release():
                return [*self._attempts.release(event.attempt)]
            case Tick():
                return [*self._attempts.expire(event.now)]
            case _:
                assert_never(event)

    def check(self) -> None:
        self._attempts.check()
        for attempt in self._attempts:
            assert attempt.crcs.keys() <= {part.index for part in attempt.parts}
            complete = len(attempt.crcs) == len(attempt.parts)
            assert attempt.phase not in (Phase.SEALED, Phase.HANDED) or complete, (
                f"sealed with parts missing: {attempt}"
            )

    def _opened(self, event: Opened) -> list[Command]:
        inbound = Inbound(
            id=event.attempt,
            tokens=event.tokens,
            generation=event.generation,
            expires_at=event.expires_at,
            awaited=True,
        )
        self._attempts.open(inbound)
        return []

    def _announced(self, event: OfferAnnounced) -> Command:
        attempt = self._attempts.get(event.attempt)
        refusal = self._refusal(attempt, event)
        if attempt is None or refusal is not None:
            assert refusal is not None
            self._count(refusal.cause)
            return refusal
        self._attempts.bind(attempt, event.lane)
        return Admit(event.lane)

    def _refusal(self, attempt: Inbound | None, event: OfferAnnounced) -> Stop | None:
        """Why a lane may not offer this attempt. Nothing of it is an offence of the attempt itself, which goes on."""
        if attempt is None:
            closed = self._attempts.was_closed(event.attempt)
            return Stop(event.lane, Cause.CLOSED_ATTEMPT if closed else Cause.UNKNOWN_ATTEMPT, event.attempt)
        if event.generation != attempt.generation:
            detail = f"ours {attempt.generation}, theirs {event.generation}"
            return Stop(event.lane, Cause.STALE_GENERATION, detail)
        if attempt.phase is not Phase.RESERVED:
            return Stop(event.lane, Cause.ALREADY_OFFERED, attempt.phase.value)
        return None

    def _offered(self, event: OfferArrived) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None or attempt.phase is not Phase.OFFERED:
            return []
        try:
            attempt.parts = expected_parts(self._layout, attempt.tokens, event.offer)
        except ProtocolError as error:
            return self._refuse(attempt, error.cause, error.detail)
        attempt.move(Phase.STREAMING)
        return [Accept(event.lane, attempt.id, Grant(attempt.id, attempt.generation, attempt.parts))]

    def _arrived(self, event: PartArrived) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None or attempt.phase is not Phase.STREAMING:
            return []
        assert event.index not in attempt.crcs, f"part {event.index} was claimed twice"
        attempt.crcs[event.index] = event.crc
        self.received_bytes += attempt.parts[event.index].nbytes
        return []

    def _sealed(self, event: SealArrived) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None or attempt.phase is not Phase.STREAMING:
            return []
        missing = [part for part in attempt.parts if part.index not in attempt.crcs]
        if missing:
            names = ", ".join(part_name(self._layout, part) for part in missing[:4])
            return self._refuse(attempt, Cause.MISSING_PART, f"{len(missing)} of {len(attempt.parts)}: {names}")
        ours = seal_for(attempt.tokens, attempt.parts, [attempt.crcs[part.index] for part in attempt.parts])
        if event.seal != ours:
            return self._refuse(attempt, Cause.SEAL_MISMATCH, f"arrived {ours}, sealed {event.seal}")
        attempt.move(Phase.SEALED)
        attempt.awaited = False
        return [Complete(attempt.id, ours.payload_bytes), Acknowledge(event.lane)]

    def _drained(self, event: Drained) -> list[Command]:
        attempt = self._attempts.held_by(event.lane, event.attempt)
        if attempt is None:
            return []
        if attempt.awaited and event.cause is not None:
            self._count(event.cause)
        return [*self._attempts.drained(attempt, event.cause, event.detail)]

    def _refuse(self, attempt: Inbound, cause: Cause, detail: str) -> list[Command]:
        self._count(cause)
        return [*self._attempts.fail(attempt, cause, detail)]

    def _count(self, cause: Cause) -> None:
        self.refused_frames += cause not in NOT_THE_FRAMES_FAULT
