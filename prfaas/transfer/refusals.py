"""Which frames of an attempt go no further, what their sender hears of it, and how many there were.

None of it harms the attempt: who sends a frame that is too late, for somebody else's span or of somebody else's attempt
does not end what others do.
"""

from prfaas.transfer.attempts import Attempts
from prfaas.transfer.frames import NOT_THE_FRAMES_FAULT, Cause, Header, ProtocolError
from prfaas.transfer.inbound import Inbound, Lane
from prfaas.transfer.incoming import Abort, Discard


class Refusals:
    """`counts` by cause the frames and connections that were not acceptable, whoever sent them."""

    def __init__(self, attempts: Attempts[Inbound]) -> None:
        self._attempts = attempts
        self.counts: dict[Cause, int] = {}

    @property
    def frames(self) -> int:
        # Of a copy: lane threads go on counting.
        return sum(count for cause, count in dict(self.counts).items() if cause not in NOT_THE_FRAMES_FAULT)

    def count(self, cause: Cause) -> Cause:
        self.counts[cause] = self.counts.get(cause, 0) + 1
        return cause

    def admit(self, lane: Lane, attempt_id: str, generation: int) -> Inbound | None:
        """The attempt that an offer or a seal is of. None: it goes no further, and the lane says why."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            closed = self._attempts.was_closed(attempt_id)
            lane.reply(Abort(attempt_id, self.count(Cause.CLOSED_ATTEMPT if closed else Cause.UNKNOWN_ATTEMPT), ""))
        elif generation != attempt.generation:
            detail = f"ours {attempt.generation}, theirs {generation}"
            lane.reply(Abort(attempt_id, self.count(Cause.STALE_GENERATION), detail))
        elif attempt.why is not None:
            self.count(Cause.CLOSED_ATTEMPT)
            lane.reply(Abort(attempt_id, *attempt.why))
        else:
            return attempt
        return None

    def admit_data(self, lane: Lane, header: Header) -> Inbound | Discard:
        """The attempt that a DATA frame is of. Raises ProtocolError: the lane is then to be refused."""
        attempt = self._attempts.get(header.attempt)
        if attempt is None:
            return self._late(lane, header.attempt)
        if header.generation != attempt.generation:
            return Discard(self.count(Cause.STALE_GENERATION))
        self.check_peer(lane, attempt)
        if attempt.why is not None:
            lane.reply(Abort(attempt.id, *attempt.why))
            return Discard(self.count(Cause.CLOSED_ATTEMPT))
        return attempt

    def check_peer(self, lane: Lane, attempt: Inbound) -> None:
        """Raises ProtocolError unless the lane is of the peer that has offered the attempt."""
        if not attempt.peer:
            raise ProtocolError(self.count(Cause.UNEXPECTED_PART), f"{attempt.id} was not offered")
        if attempt.peer != lane.peer:
            raise ProtocolError(self.count(Cause.TICKET), f"{attempt.id} is not from {lane.peer}")

    def _late(self, lane: Lane, attempt_id: str) -> Discard:
        """A frame of an attempt that is not open."""
        if not self._attempts.was_closed(attempt_id):
            raise ProtocolError(self.count(Cause.UNKNOWN_ATTEMPT), attempt_id)
        if not self._attempts.ended_well(attempt_id):
            lane.reply(Abort(attempt_id, Cause.CLOSED_ATTEMPT, ""))
        return Discard(self.count(Cause.CLOSED_ATTEMPT))
