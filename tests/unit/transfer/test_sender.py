"""An outgoing attempt offers what the layout says, sends parts in the order in which they became ready, and ends
once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec
from prfaas.transfer.attempts import Answer, Drained, Free, LaneId, Lost, Opened, Phase, Release, Stop, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import offer_for
from prfaas.transfer.sender import (
    Accepted,
    Begin,
    Command,
    Delivered,
    Destination,
    Dial,
    PartSent,
    PartsReady,
    Sender,
    Stream,
)

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "float32", (3,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "bfloat16", (8,)),),
    )
)
TOKENS, ENDS = 20, (8, 16, 20)
OFFER, PARTS = offer_for(LAYOUT, TOKENS, ENDS)
A, LANE = "a" * 32, LaneId(1)
TO = Destination("10.0.0.7:7001", 99, 5)


def opened() -> Sender:
    sender = Sender(LAYOUT)
    sender.handle(Opened(A, TOKENS, generation=3, expires_at=10.0))
    return sender


def begun(sender: Sender | None = None) -> Sender:
    sender = sender or opened()
    assert sender.handle(Begin(LANE, A, TO, ENDS, now=1.0)) == [Dial(LANE, A, TO, OFFER)]
    return sender


def streaming() -> Sender:
    sender = begun()
    assert sender.handle(Accepted(LANE, A, 1.0)) == []
    return sender


def let_go(sender: Sender, cause: Cause | None = None, now: float = 2.0) -> list[Command]:
    return sender.handle(Drained(LANE, A, now, cause))


def streamed(commands: list[Command]) -> tuple[list[int], bool]:
    (stream,) = commands
    assert isinstance(stream, Stream)
    return [part.index for part in stream.parts], stream.last


def test_parts_leave_as_they_become_ready_and_the_last_brings_the_seal():
    sender = streaming()
    assert streamed(sender.handle(PartsReady(A, (0, 1), 1.5))) == ([0, 1], False)
    assert streamed(sender.handle(PartsReady(A, (3,), 1.6))) == ([3], False)
    assert streamed(sender.handle(PartsReady(A, (2,), 1.7))) == ([2], True)
    assert sender.phase(A) is Phase.SEALED


def test_parts_that_were_ready_too_early_keep_their_order():
    """Before the transfer began, and before the receiver accepted it."""
    sender = opened()
    assert sender.handle(PartsReady(A, (3, 1), 0.5)) == []
    begun(sender)
    assert sender.handle(PartsReady(A, (0,), 1.2)) == []
    assert streamed(sender.handle(Accepted(LANE, A, 1.0))) == ([3, 1, 0], False)


def test_a_part_that_is_announced_twice_leaves_once():
    sender = streaming()
    assert streamed(sender.handle(PartsReady(A, (0, 0, 1), 1.5))) == ([0, 1], False)
    assert sender.handle(PartsReady(A, (1, 0), 1.6)) == []


def test_an_empty_transfer_is_sealed_as_soon_as_it_is_accepted():
    sender = Sender(LAYOUT)
    sender.handle(Opened(A, 0, 3, 10.0))
    sender.handle(Begin(LANE, A, TO, (), now=1.0))
    assert streamed(sender.handle(Accepted(LANE, A, 1.0))) == ([], True)
    assert let_go(sender, now=1.25) == [Delivered(A, 0, 0.25)]


def test_field_B2_delivered_means_acknowledged():
    """Not sent: the node may free the source only when the receiver has checked it. Exposed time runs from the last
    part."""
    sender = streaming()
    sender.handle(PartsReady(A, (0, 1, 2), 1.5))
    sender.handle(PartsReady(A, (3,), 4.0))
    assert [sender.handle(PartSent(LANE, A, index)) for index in range(4)] == [[]] * 4
    assert sender.sent_bytes == LAYOUT.size_bytes(TOKENS)
    assert let_go(sender, now=4.5) == [Delivered(A, LAYOUT.size_bytes(TOKENS), 0.5)]
    assert sender.phase(A) is Phase.HANDED
    assert sender.handle(Release(A)) == [Free(A), Answer(A)]


def test_a_lost_lane_is_a_lost_transfer_at_any_point():
    for sender in (begun(), streaming()):
        assert let_go(sender, Cause.PEER_GONE) == [Lost(A, Cause.PEER_GONE)]
        assert sender.handle(PartsReady(A, (0, 1, 2, 3), 3.0)) == []
        assert sender.handle(Release(A)) == [Free(A), Answer(A)]
        assert sender.failed == 1


def test_a_release_waits_for_the_lane_that_may_read_the_span():
    """B2 the other way round: memory that is being sent is not given to the next one."""
    sender = streaming()
    assert sender.handle(Release(A)) == [Stop(LANE, Cause.ABORTED, "released"), Lost(A, Cause.ABORTED, "released")]
    assert sender.handle(PartsReady(A, (0,), 3.0)) == []
    assert let_go(sender, Cause.ABORTED) == [Free(A), Answer(A)]
    assert sender.failed == 0


def test_an_acknowledgement_that_crosses_a_release_changes_nothing():
    """The node was told that it is over; it is not told again."""
    sender = streaming()
    sender.handle(PartsReady(A, (0, 1, 2, 3), 1.5))
    sender.handle(Release(A))
    assert let_go(sender) == [Free(A), Answer(A)]


def test_a_span_that_was_never_sent_ends_without_an_outcome():
    """Nobody was promised one."""
    assert opened().handle(Release(A)) == [Free(A), Answer(A)]
    assert opened().handle(Tick(10.0)) == [Free(A)]


def test_a_deadline_ends_a_transfer():
    sender = streaming()
    assert sender.handle(Tick(10.0)) == [Stop(LANE, Cause.EXPIRED), Lost(A, Cause.EXPIRED)]
    assert let_go(sender, Cause.EXPIRED) == [Free(A)]


def test_sending_what_is_not_there_fails():
    """Every Send ends in an outcome, also when the span is gone by then."""
    sender = opened()
    sender.handle(Release(A))
    (lost,) = sender.handle(Begin(LANE, A, TO, ENDS, 1.0))
    assert isinstance(lost, Lost) and lost.cause is Cause.UNKNOWN_ATTEMPT


def test_chunk_ends_that_do_not_fit_fail_before_anything_is_dialled():
    sender = opened()
    (lost,) = sender.handle(Begin(LANE, A, TO, (8, 16), 1.0))
    assert isinstance(lost, Lost) and lost.cause is Cause.OFFER_MISMATCH


@pytest.mark.parametrize("index", [4, -1])
def test_a_part_that_was_not_offered_fails_the_transfer(index: int):
    stop, lost = streaming().handle(PartsReady(A, (index,), 1.5))
    assert isinstance(stop, Stop) and isinstance(lost, Lost)
    assert lost.cause is Cause.UNEXPECTED_PART


class SenderMachine(RuleBasedStateMachine):
    """Engine, lane, node and clock in any order: parts leave once and in order, one outcome, no span freed under a
    lane."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = Sender(LAYOUT, tombstones=5)
        self.now = 0.0
        self.count = 0
        self.open: list[str] = []
        self.bound: dict[str, LaneId] = {}
        self.begun: set[str] = set()
        self.ready: dict[str, list[int]] = {}
        self.left: dict[str, list[int]] = {}
        self.sealed: set[str] = set()
        self.outcomes: set[str] = set()

    def do(self, event: object) -> None:
        for command in self.sender.handle(event):
            match command:
                case Dial(lane, attempt):
                    self.bound[attempt] = lane
                case Stream(lane, parts, last):
                    (attempt,) = (a for a, bound in self.bound.items() if bound == lane)
                    assert attempt not in self.sealed
                    self.left[attempt] += [part.index for part in parts]
                    if last:
                        self.sealed.add(attempt)
                case Delivered(attempt) | Lost(attempt):
                    assert attempt not in self.outcomes and attempt in self.begun
                    assert isinstance(command, Lost) or attempt in self.sealed
                    self.outcomes.add(attempt)
                case Free(attempt):
                    assert attempt not in self.bound, "freed under a lane"
                    self.open.remove(attempt)

    @rule(ttl=st.floats(0.5, 20))
    def reserve(self, ttl: float):
        self.count += 1
        attempt = f"{self.count:032x}"
        self.open.append(attempt)
        self.ready[attempt], self.left[attempt] = [], []
        self.do(Opened(attempt, TOKENS, self.count, self.now + ttl))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def begin(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(self.open))
        if attempt not in self.begun:
            self.begun.add(attempt)
            self.do(Begin(LaneId(self.count * 100 + len(self.begun)), attempt, TO, ENDS, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), parts=st.lists(st.integers(0, 3), max_size=4))
    def parts_ready(self, data: st.DataObject, parts: list[int]):
        attempt = data.draw(st.sampled_from(self.open))
        self.ready[attempt] += [p for p in dict.fromkeys(parts) if p not in self.ready[attempt]]
        self.do(PartsReady(attempt, tuple(parts), self.now))

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def accept(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        self.do(Accepted(self.bound[attempt], attempt, self.now))

    @precondition(lambda self: self.bound)
    @rule(data=st.data(), cause=st.sampled_from([Cause.PEER_GONE, Cause.NO_PROGRESS]))
    def drain(self, data: st.DataObject, cause: Cause):
        """With the acknowledgement once there is a seal to acknowledge."""
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        acknowledged = attempt in self.sealed and data.draw(st.booleans())
        self.do(Drained(self.bound.pop(attempt), attempt, self.now, None if acknowledged else cause))
        assert attempt in self.outcomes

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(self.open))
        self.do(Release(attempt))
        assert (attempt in self.outcomes) == (attempt in self.begun)
        assert (attempt in self.open) == (attempt in self.bound)

    @rule(seconds=st.floats(0, 5))
    def tick(self, seconds: float):
        self.now += seconds
        self.do(Tick(self.now))

    @invariant()
    def sound(self):
        self.sender.check()
        for attempt, left in self.left.items():
            assert left == self.ready[attempt][: len(left)], "out of order"
            assert attempt not in self.sealed or sorted(left) == [0, 1, 2, 3]

    def teardown(self):
        for attempt, lane in list(self.bound.items()):
            del self.bound[attempt]
            self.do(Drained(lane, attempt, self.now, Cause.PEER_GONE))
        self.do(Tick(self.now + 100))
        assert not self.open and self.outcomes == self.begun


TestSenderMachine = SenderMachine.TestCase
TestSenderMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
