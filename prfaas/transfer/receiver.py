"""Incoming transfers of one pump: which frames may write where, what is acknowledged, and when an attempt is complete.

OfferArrived -> Accept -> claim, landed... and SealArrived, in any order and on any lane of one peer -> Complete. What
must come is derived here, never taken from the offer. A piece is applied once: while one lane writes it, and ever
after, the same piece on another lane is discarded. A lane that is lost loses no more than what it was writing.
"""

from dataclasses import dataclass
from typing import assert_never

from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.attempts import (
    OPEN,
    TOMBSTONES,
    Answer,
    Attempts,
    Hang,
    LaneId,
    Opened,
    Phase,
    Release,
    Tick,
)
from prfaas.transfer.frames import NOT_THE_FRAMES_FAULT, Cause, Header, ProtocolError
from prfaas.transfer.inbound import Inbound, Lane
from prfaas.transfer.incoming import (
    Abort,
    Accept,
    Ack,
    Answerable,
    Command,
    Complete,
    Discard,
    Done,
    Event,
    Greeted,
    Heard,
    LaneGone,
    OfferArrived,
    OfferRefused,
    PeerAborted,
    Place,
    Reply,
    SealArrived,
    Stop,
    Turned,
)
from prfaas.transfer.offer import expected_pieces, seal_for
from prfaas.transfer.pieces import PIECE_BYTES
from prfaas.transfer.refusals import Refusals

#: So that every acknowledgement fits its frame.
MAX_RANGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`window_bytes`: how far a sender may run ahead of what has been applied. `no_progress_s`: after so long without a
    frame from a peer its attempts are lost. `abort_grace_s`: how long a lane may finish its frame of an attempt whose
    memory is wanted back."""

    window_bytes: int = 256 << 20
    no_progress_s: float = 10.0
    abort_grace_s: float = 1.0
    piece_bytes: int = PIECE_BYTES
    tombstones: int = TOMBSTONES


class Receiver:
    """`refused` counts by cause the frames and connections that were not acceptable, whoever sent them."""

    def __init__(self, layout: KvLayout, params: Params | None = None) -> None:
        self._layout, self._params = layout, params or Params()
        self._attempts: Attempts[Inbound] = Attempts(self._params.tombstones)
        self._lanes: dict[LaneId, Lane] = {}
        #: When each peer was last heard, on whichever lane.
        self._heard: dict[str, float] = {}
        self._refusals = Refusals(self._attempts)
        self.received_bytes = 0

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._attempts

    @property
    def failed(self) -> int:
        return self._attempts.failed

    @property
    def refused(self) -> dict[Cause, int]:
        return self._refusals.counts

    @property
    def refused_frames(self) -> int:
        return self._refusals.frames

    def was_closed(self, attempt: str) -> bool:
        return self._attempts.was_closed(attempt)

    def phase(self, attempt: str) -> Phase | None:
        """None for an attempt that is not known, or no longer."""
        found = self._attempts.get(attempt)
        return found.phase if found else None

    def boundary(self, attempt: str) -> int:
        """Up to which row of an open attempt's extent all can be used: the greatest chunk end up to which every part
        was verified. With states it is all or nothing."""
        found = self._attempts.get(attempt)
        return found.boundary(self._layout) if found is not None else 0

    def handle(self, event: Event) -> list[Command]:
        """Raises ProtocolError when what a lane says makes no sense; the lane is then to be refused."""
        match event:
            case Opened():
                return self._opened(event)
            case Greeted():
                self._lanes[event.lane] = Lane(peer=event.peer)
                self._heard[event.peer] = event.now
                return []
            case Heard():
                self._hear(event.lane, event.now)
                return []
            case OfferArrived():
                return self._offered(event)
            case OfferRefused():
                self._hear(event.lane, event.now).reply(
                    Abort(event.attempt, self._refusals.count(event.cause), event.detail)
                )
                return []
            case SealArrived():
                return self._sealed(event)
            case PeerAborted():
                return self._peer_aborted(event)
            case LaneGone():
                return self._lane_gone(event)
            case Turned():
                self._refusals.count(event.cause)
                return []
            case Release():
                return self._release(event.attempt)
            case Stop():
                attempt = self._attempts.get(event.attempt)
                return self._fail(attempt, Cause.ABORTED, "stopped") if attempt is not None else []
            case Tick():
                return self._tick(event.now)
            case _:
                assert_never(event)

    def claim(self, lane_id: LaneId, header: Header, now: float) -> Place | Discard:
        """Where the payload of a DATA frame goes. Raises ProtocolError: the lane is then to be refused."""
        lane = self._hear(lane_id, now)
        assert lane.claim is None, "a lane reads one frame at a time"
        admitted = self._refusals.admit_data(lane, header)
        if isinstance(admitted, Discard):
            return admitted
        try:
            return self._place(lane_id, admitted, header, now)
        except ProtocolError as error:
            self._refusals.count(error.cause)
            raise

    def _place(self, lane_id: LaneId, attempt: Inbound, header: Header, now: float) -> Place | Discard:
        lane = self._lanes[lane_id]
        run = attempt.frame(header)
        attempt.lane = lane_id
        if attempt.applied.covers(run.first, run.stop):
            lane.ack(attempt.id, run.first, run.stop)
            return Discard(None)
        if attempt.claimed.get(run.first) == run.stop:
            attempt.doubles.setdefault(run.first, []).append(lane_id)
            return Discard(None)
        lane.claim = attempt.claim(run, self._params.window_bytes, now)
        return Place(attempt.id, run.places)

    def landed(self, lane_id: LaneId, now: float) -> list[Command]:
        """What the lane claimed is in its place, and was checked."""
        lane = self._hear(lane_id, now)
        claim, doubles = lane.let_go(self._lanes)
        attempt, first, stop = claim.attempt, claim.first, claim.stop
        commands: list[Command] = [*self._attempts.untouched(attempt)]
        for told in (lane, *(self._lanes[double] for double in doubles)):
            if attempt.why is None:
                told.ack(attempt.id, first, stop)
            else:
                told.reply(Abort(attempt.id, *attempt.why))
        if doubles:
            commands.append(Answerable(tuple(doubles)))
        if attempt.phase not in OPEN:
            return commands
        attempt.applied.add(first, stop)
        attempt.applied_bytes += claim.nbytes
        self.received_bytes += claim.nbytes
        return [*commands, *self._complete(attempt)]

    def missed(self, lane_id: LaneId, cause: Cause, detail: str, now: float) -> list[Command]:
        """What the lane claimed did not come, or was not what it should have been, which ends the attempt."""
        lane = self._hear(lane_id, now)
        claim, doubles = lane.let_go(self._lanes)
        attempt = claim.attempt
        commands: list[Command] = []
        if cause not in NOT_THE_FRAMES_FAULT:
            commands += self._fail(attempt, self._refusals.count(cause), detail)
        commands += self._attempts.untouched(attempt)
        # They were told nothing, and the pieces that they threw away are needed after all.
        return [*commands, *(Hang(double, Cause.PEER_GONE, "a piece was lost with another lane") for double in doubles)]

    def replies(self, lane_id: LaneId) -> list[Reply]:
        """What the lane has to write now; it is owed no longer."""
        lane = self._lanes[lane_id]
        if not lane.acks and not lane.replies:
            return []
        acks = [Ack(attempt, tuple(ranges), self._credit(attempt)) for attempt, ranges in lane.acks.items()]
        rest = list(lane.replies.values())
        lane.acks.clear()
        lane.replies.clear()
        return [*acks, *rest]

    def check(self) -> None:
        self._attempts.check()
        for attempt in self._attempts:
            claims = [lane.claim for lane in self._lanes.values() if lane.claim and lane.claim.attempt is attempt]
            assert len(claims) == attempt.touches, f"{attempt}"
            assert {claim.first: claim.stop for claim in claims} == attempt.claimed
            assert sum(claim.nbytes for claim in claims) == attempt.claimed_bytes
            assert not any(attempt.applied.meets(first, stop) for first, stop in attempt.claimed.items())
            assert attempt.doubles.keys() <= attempt.claimed.keys(), "waits for nothing"
            applied_bytes = sum(attempt.pieces.bytes_of(first, stop) for first, stop in attempt.applied)
            assert applied_bytes == attempt.applied_bytes
            whole = attempt.applied.count == attempt.pieces.count
            assert attempt.phase is not Phase.HANDED or whole, f"complete with pieces missing: {attempt}"
            assert attempt.phase is not Phase.SEALED or not whole, f"nobody was told that it is complete: {attempt}"

    def _opened(self, event: Opened) -> list[Command]:
        inbound = Inbound(
            id=event.attempt,
            extent=event.extent,
            windows=event.windows,
            generation=event.generation,
            expires_at=event.expires_at,
            awaited=True,
        )
        self._attempts.open(inbound)
        return []

    def _offered(self, event: OfferArrived) -> list[Command]:
        lane = self._hear(event.lane, event.now)
        attempt = self._refusals.admit(lane, event.attempt, event.generation)
        if attempt is None:
            return []
        if attempt.phase is Phase.RESERVED:
            try:
                attempt.pieces = expected_pieces(
                    self._layout, attempt.extent, attempt.windows, event.offer, self._params.piece_bytes
                )
            except ProtocolError as error:
                attempt.peer, attempt.lane = lane.peer, event.lane
                return self._fail(attempt, self._refusals.count(error.cause), error.detail)
            attempt.move(Phase.STREAMING)
            attempt.peer, attempt.offer = lane.peer, event.offer
        elif (attempt.peer, attempt.offer) != (lane.peer, event.offer):
            lane.reply(Abort(attempt.id, self._refusals.count(Cause.ALREADY_OFFERED), "by another or otherwise"))
            return []
        attempt.lane = event.lane
        lane.reply(Accept(attempt.id, tuple(attempt.applied)[:MAX_RANGES], self._credit(attempt.id)))
        return []

    def _sealed(self, event: SealArrived) -> list[Command]:
        lane = self._hear(event.lane, event.now)
        if self._attempts.ended_well(event.attempt):
            lane.reply(Done(event.attempt, event.seal.payload_bytes))
            return []
        attempt = self._refusals.admit(lane, event.attempt, event.generation)
        if attempt is None:
            return []
        self._refusals.check_peer(lane, attempt)
        ours = seal_for(attempt.extent, attempt.pieces)
        if event.seal != ours:
            return self._fail(
                attempt, self._refusals.count(Cause.SEAL_MISMATCH), f"expected {ours}, sealed {event.seal}"
            )
        attempt.lane = attempt.seal_lane = event.lane
        if attempt.phase is Phase.HANDED:
            lane.reply(Done(attempt.id, ours.payload_bytes))
        elif attempt.phase is Phase.STREAMING:
            attempt.move(Phase.SEALED)
        return self._complete(attempt)

    def _complete(self, attempt: Inbound) -> list[Command]:
        if attempt.phase is not Phase.SEALED or attempt.applied.count < attempt.pieces.count:
            return []
        attempt.awaited = False
        attempt.move(Phase.HANDED)
        complete = Complete(attempt.id, attempt.pieces.nbytes)
        # A sender whose lane is gone will send its seal again.
        if attempt.seal_lane is None or (lane := self._lanes.get(attempt.seal_lane)) is None:
            return [complete]
        lane.reply(Done(attempt.id, attempt.pieces.nbytes))
        return [complete, Answerable((attempt.seal_lane,))]

    def _peer_aborted(self, event: PeerAborted) -> list[Command]:
        lane = self._hear(event.lane, event.now)
        attempt = self._attempts.get(event.attempt)
        if attempt is None or event.generation != attempt.generation or attempt.peer not in ("", lane.peer):
            return []
        return [*self._attempts.fail(attempt, event.cause, event.detail)]

    def _lane_gone(self, event: LaneGone) -> list[Command]:
        lane = self._lanes.get(event.lane)
        if lane is None:
            return []
        commands = self.missed(event.lane, Cause.PEER_GONE, "", event.now) if lane.claim else []
        del self._lanes[event.lane]
        return commands

    def _release(self, attempt_id: str) -> list[Command]:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return [Answer(attempt_id)]
        attempt.asked = True
        return self._close(attempt, Cause.ABORTED, "released")

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        patience_s = self._params.no_progress_s
        peers = {lane.peer for lane in self._lanes.values()}
        for attempt in self._attempts:
            if attempt.phase in OPEN and now - self._heard[attempt.peer] > patience_s:
                cause = Cause.NO_PROGRESS if attempt.peer in peers else Cause.PEER_GONE
                commands += self._fail(attempt, cause, f"nothing from its sender for {patience_s:g} s")
        for attempt in self._attempts.late(now):
            commands += self._close(attempt, Cause.EXPIRED, "")
        commands += [hang for lane_id, lane in self._lanes.items() for hang in self._stuck(lane_id, lane, now)]
        peers |= {attempt.peer for attempt in self._attempts}
        self._heard = {peer: at for peer, at in self._heard.items() if peer in peers}
        return commands

    def _stuck(self, lane_id: LaneId, lane: Lane, now: float) -> list[Hang]:
        """A lane that keeps others waiting by what it claimed. Who sends a frame again has given up the lane on which
        he sent it first."""
        claim = lane.claim
        if claim is None or lane.hung:
            return []
        late = claim.attempt.ending and now - claim.since > self._params.abort_grace_s
        if not late and claim.first not in claim.attempt.doubles:
            return []
        lane.hung = True
        return [Hang(lane_id, Cause.ABORTED, "stuck in a frame that is not wanted from it any more")]

    def _close(self, attempt: Inbound, cause: Cause, detail: str) -> list[Command]:
        return [*self._fail(attempt, cause, detail), *self._attempts.close(attempt, cause, detail)]

    def _fail(self, attempt: Inbound, cause: Cause, detail: str) -> list[Command]:
        """Tells the sender too, if there is a lane to tell it on."""
        commands: list[Command] = [*self._attempts.fail(attempt, cause, detail)]
        to = attempt.lane if attempt.lane in self._lanes else self._lane_of(attempt.peer)
        if commands and to is not None:
            self._lanes[to].reply(Abort(attempt.id, cause, detail))
            commands.append(Answerable((to,)))
        return commands

    def _credit(self, attempt_id: str) -> int:
        attempt = self._attempts.get(attempt_id)
        return attempt.credit(self._params.window_bytes) if attempt is not None else 0

    def _lane_of(self, peer: str) -> LaneId | None:
        return next((lane_id for lane_id, lane in self._lanes.items() if peer and lane.peer == peer), None)

    def _hear(self, lane_id: LaneId, now: float) -> Lane:
        lane = self._lanes[lane_id]
        self._heard[lane.peer] = now
        return lane
