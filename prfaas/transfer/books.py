"""What a sending pump keeps of its attempts and its lanes, and the moves that leave it consistent.

`Sender` gives lanes their work, `Wishes` does what the node says, `Answers` what the lanes say; all of them move the
same attempts by what is here. Whatever a lane has of an attempt, the attempt has with that lane; every byte that could
leave is counted as waiting until it has left.
"""

from prfaas.transfer.attempts import OPEN, Attempts, LaneId, Phase
from prfaas.transfer.egress import EgressMeter
from prfaas.transfer.fleet import Fleet, Params
from prfaas.transfer.frames import Cause
from prfaas.transfer.line import Lane
from prfaas.transfer.offer import seal_for
from prfaas.transfer.outbound import Outbound
from prfaas.transfer.outgoing import AbortWork, Command, OfferWork, SealWork, Urgency, Work
from prfaas.transfer.pieces import Run


class Books:
    def __init__(self, params: Params, fleet: Fleet) -> None:
        self.params, self.fleet = params, fleet
        self.attempts: Attempts[Outbound] = Attempts(params.tombstones)
        self.egress = EgressMeter()
        self.now = 0.0

    def check(self) -> None:
        self.attempts.check()
        self.egress.check()
        queued: dict[str, int] = {}
        for line in self.fleet.lines.values():
            line.outbox.check()
            assert all(lane.line is line and self.fleet.lanes[lane_id] is lane for lane_id, lane in line.lanes.items())
            for attempt in line.attempts.values():
                assert self.attempts.get(attempt.id) is attempt and attempt.awaited
                queued[line.region] = queued.get(line.region, 0) + attempt.waiting_bytes
            assert line.outbox.waiting_bytes == sum(attempt.sendable_bytes for attempt in line.attempts.values())
        for attempt in self.attempts:
            attempt.check()
            touching = [lane for lane in self.fleet.lanes.values() if lane.touching is attempt]
            assert attempt.touches == len(touching), f"{attempt}"
            for first, (run, lane_id) in attempt.flight.items():
                assert self.fleet.lanes[lane_id].flight[attempt.id, first] == (attempt, run), "on no lane"
        for lane in self.fleet.lanes.values():
            assert lane.acked_bytes <= lane.left_bytes <= lane.taken_bytes
            queued[lane.line.region] = queued.get(lane.line.region, 0) + lane.taken_bytes - lane.left_bytes
            assert all(lane.line.attempts[attempt_id].asks == lane.id for attempt_id in lane.asks)
            assert all(attempt.flight[first] == (run, lane.id) for (_, first), (attempt, run) in lane.flight.items())
        for sent in self.egress.readings(self.now):
            assert sent.queued_bytes == queued.get(sent.region, 0), f"{sent}: {queued}"

    def hear(self, lane_id: LaneId) -> Lane:
        lane = self.fleet.lanes[lane_id]
        lane.heard_at = self.now
        return lane

    def ask(self, attempt: Outbound) -> None:
        """The offer until it is accepted, then the seal until the transfer is complete."""
        attempt.asks = None
        work: Work = SealWork(attempt.id, attempt.to, seal_for(attempt.extent, attempt.pieces))
        if attempt.phase is Phase.OFFERED:
            assert attempt.offer is not None
            work = OfferWork(attempt.id, attempt.to, attempt.offer)
        self.fleet.lines[attempt.to.peer].outbox.control.append(work)

    def answered(self, attempt: Outbound) -> None:
        if attempt.asks is not None:
            del self.fleet.lanes[attempt.asks].asks[attempt.id]
            attempt.asks = None

    def moved(self, attempt: Outbound) -> list[Command]:
        """More of the attempt can leave, or all of it has."""
        self.refresh(attempt)
        return self.fleet.stir(self.fleet.lines[attempt.to.peer], self.now)

    def refresh(self, attempt: Outbound) -> None:
        """Put the attempt where it belongs in the order of work; seal it when nothing is left to send."""
        if attempt.phase not in OPEN:
            return
        line = self.fleet.lines[attempt.to.peer]
        countable_bytes = min(attempt.ready_bytes, attempt.credit_bytes)
        if countable_bytes > attempt.counted_bytes:
            self.egress.queued(line.region, countable_bytes - attempt.counted_bytes, self.now)
            attempt.counted_bytes = countable_bytes
        sendable_bytes = attempt.sendable_bytes
        if attempt.id not in line.outbox:
            attempt.served_at = self.now
        line.outbox.put(attempt.id, self._urgency(attempt), attempt.tenant, attempt.weight, sendable_bytes, self.now)
        if attempt.phase is Phase.STREAMING and attempt.all_taken:
            attempt.move(Phase.SEALED)
            self.ask(attempt)

    def _urgency(self, attempt: Outbound) -> Urgency:
        """What a request waits for only a little longer is not held up by others that will wait long anyway."""
        if attempt.urgency is not Urgency.NORMAL:
            return attempt.urgency
        left_bytes, total_bytes = attempt.pieces.nbytes - attempt.taken_bytes, attempt.pieces.nbytes
        nearly_over = left_bytes <= self.params.finishing_bytes and left_bytes <= total_bytes // 8
        return Urgency.FINISHING if nearly_over else Urgency.NORMAL

    def let_go(self, lane: Lane) -> list[Command]:
        attempt, lane.touching = lane.touching, None
        return [*self.attempts.untouched(attempt)] if attempt is not None else []

    def landed(self, attempt: Outbound, run: Run, lane_id: LaneId | None) -> None:
        """A frame has reached the peer, if not by what we know of the socket then by its word."""
        if lane_id is None:
            self.requeue(attempt.to.region, -run.nbytes)
            return
        lane = self.fleet.lanes[lane_id]
        del lane.flight[attempt.id, run.first]
        lane.acked_bytes += run.nbytes
        self.left(lane, lane.acked_bytes)

    def left(self, lane: Lane, nbytes: int) -> None:
        """So many bytes in all have left by the lane, as far as we know."""
        if nbytes > lane.left_bytes:
            self.egress.sent(lane.line.region, nbytes - lane.left_bytes, self.now)
            lane.left_bytes = nbytes

    def requeue(self, region: str, nbytes: int) -> None:
        """So many bytes wait (again), or will not leave after all."""
        if nbytes > 0:
            self.egress.queued(region, nbytes, self.now)
        else:
            self.egress.dropped(region, -nbytes, self.now)

    def close(self, attempt: Outbound, cause: Cause, detail: str) -> list[Command]:
        return [*self.fail(attempt, cause, detail), *self.attempts.close(attempt, cause, detail)]

    def fail(self, attempt: Outbound, cause: Cause, detail: str, *, tell: bool = True) -> list[Command]:
        """The peer is told, if it knows of the attempt."""
        commands: list[Command] = [*self.attempts.fail(attempt, cause, detail)]
        line = self.fleet.lines.get(attempt.to.peer)
        if not commands or line is None or attempt.id not in line.attempts:
            return commands
        self.leave(attempt)
        if tell and attempt.offered and line.lanes:
            line.outbox.control.append(AbortWork(attempt.id, attempt.to, cause, detail))
            commands += line.wake(1)
        return commands

    def leave(self, attempt: Outbound) -> None:
        """Nothing of the attempt waits any longer; what lanes have of it they will not give back."""
        line = self.fleet.lines[attempt.to.peer]
        del line.attempts[attempt.id]
        line.outbox.put(attempt.id, attempt.urgency, attempt.tenant, attempt.weight, 0, self.now)
        self.requeue(line.region, -attempt.waiting_bytes)
        self.answered(attempt)
        for first, (_, lane_id) in attempt.flight.items():
            del self.fleet.lanes[lane_id].flight[attempt.id, first]
        attempt.forget()
