"""What lanes tell the sending side: that they are up or lost, what the receiver has answered on them, and what the
kernel knows of what they wrote."""

from prfaas.transfer.attempts import OPEN, Phase
from prfaas.transfer.books import Books
from prfaas.transfer.frames import Cause, ProtocolError
from prfaas.transfer.outbound import Outbound
from prfaas.transfer.outgoing import Aborted, Accepted, Acked, Command, Completed, Delivered, LaneDown, LaneUp, Sampled
from prfaas.transfer.pieces import Run

#: A peer that says this of itself is not the one we mean, now or later.
ANOTHER_PEER = frozenset({Cause.WIRE, Cause.NAMESPACE, Cause.INCARNATION})


class Answers:
    def __init__(self, books: Books) -> None:
        self._books = books

    def lane_up(self, event: LaneUp) -> list[Command]:
        lane = self._books.fleet.lanes[event.lane]
        lane.up, lane.heard_at = True, self._books.now
        return []

    def lane_down(self, event: LaneDown) -> list[Command]:
        lane = self._books.fleet.drop(event.lane)
        line = lane.line
        lane.work = None
        commands = self._books.let_go(lane)
        lost: dict[Outbound, list[Run]] = {}
        for attempt, run in lane.flight.values():
            lost.setdefault(attempt, []).append(run)
        back_bytes = 0
        for attempt, runs in lost.items():
            attempt.give_back(runs)
            back_bytes += sum(run.nbytes for run in runs)
        self._books.requeue(line.region, back_bytes - (lane.taken_bytes - lane.left_bytes))
        for attempt_id in list(lane.asks):
            self._books.ask(line.attempts[attempt_id])
        # That we closed it for reasons of our own says nothing about the peer.
        if event.cause is not None and lane.hung in (None, Cause.NO_PROGRESS):
            line.rest.failed(event.cause, event.detail, self._books.now)
        if event.cause in ANOTHER_PEER:
            for attempt in list(line.attempts.values()):
                commands += self._books.fail(attempt, event.cause, event.detail)
        for attempt in lost:
            if attempt.phase in OPEN:
                self._books.refresh(attempt)
        return [*commands, *self._books.fleet.stir(line, self._books.now)]

    def accepted(self, event: Accepted) -> list[Command]:
        lane = self._books.hear(event.lane)
        attempt = lane.line.attempts.get(event.attempt)
        if attempt is None or attempt.phase is not Phase.OFFERED:
            return []
        self._books.answered(attempt)
        attempt.move(Phase.STREAMING)
        attempt.moved_at = attempt.served_at = self._books.now
        lane.line.rest.recovered()
        # Before anything was sent nothing can have been applied; what is said of it is not needed.
        attempt.credit_bytes = event.credit_bytes
        return self._books.moved(attempt)

    def acked(self, event: Acked) -> list[Command]:
        lane = self._books.hear(event.lane)
        attempt = lane.line.attempts.get(event.attempt)
        if attempt is None or attempt.phase not in OPEN:
            return []
        try:
            runs = [found for first, stop in event.ranges for found in attempt.acknowledge(first, stop)]
        except ProtocolError as error:
            return self._books.fail(attempt, error.cause, error.detail)
        limited = attempt.credit_bytes < attempt.ready_bytes
        for run, lane_id in runs:
            self._books.landed(attempt, run, lane_id)
            limited |= lane_id is None
        if runs:
            attempt.moved_at = self._books.now
            lane.line.rest.recovered()
        attempt.credit_bytes = max(attempt.credit_bytes, event.credit_bytes)
        # Else all that is ready could leave before, and what has arrived had left.
        return self._books.moved(attempt) if limited else []

    def completed(self, event: Completed) -> list[Command]:
        lane = self._books.hear(event.lane)
        attempt = lane.line.attempts.get(event.attempt)
        if attempt is None:
            return []
        if attempt.phase is not Phase.SEALED or event.payload_bytes != attempt.pieces.nbytes:
            detail = f"complete with {event.payload_bytes} bytes while {attempt.phase.value}"
            return self._books.fail(attempt, Cause.MALFORMED, detail)
        for run, lane_id in list(attempt.flight.values()):
            attempt.acknowledge(run.first, run.stop)
            self._books.landed(attempt, run, lane_id)
        for run in list(attempt.again.values()):
            attempt.acknowledge(run.first, run.stop)
            self._books.landed(attempt, run, None)
        attempt.awaited = False
        attempt.move(Phase.HANDED)
        lane.line.rest.recovered()
        self._books.leave(attempt)
        exposed_s = self._books.now - attempt.ready_at
        return [Delivered(attempt.id, attempt.pieces.nbytes, exposed_s, attempt.lost_bytes, attempt.resent_bytes)]

    def aborted(self, event: Aborted) -> list[Command]:
        lane = self._books.hear(event.lane)
        attempt = lane.line.attempts.get(event.attempt)
        return self._books.fail(attempt, event.cause, event.detail, tell=False) if attempt is not None else []

    def sampled(self, event: Sampled) -> list[Command]:
        for lane_id, nbytes in event.unacknowledged.items():
            if (lane := self._books.fleet.lanes.get(lane_id)) is not None:
                left_bytes = min(lane.taken_bytes, lane.written_bytes - nbytes)
                if left_bytes > lane.left_bytes:
                    lane.heard_at = self._books.now
                    for attempt, _ in lane.flight.values():  # a slow line takes its time until a frame is acknowledged
                        attempt.moved_at = self._books.now
                self._books.left(lane, left_bytes)
        for lane_id, rtt_s in event.rtt_s.items():
            if (lane := self._books.fleet.lanes.get(lane_id)) is not None:
                lane.line.rtt_s = rtt_s if lane.line.rtt_s is None else min(rtt_s, lane.line.rtt_s)
        return []
