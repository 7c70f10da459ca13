"""An incoming attempt is complete or failed, never something between; its span comes back when nobody can touch it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec
from prfaas.transfer.attempts import Answer, Drained, Free, LaneId, Lost, Opened, Phase, Release, Stop, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import Offer, Seal, manifest, offer_for, seal_for
from prfaas.transfer.receiver import (
    Accept,
    Acknowledge,
    Admit,
    Command,
    Complete,
    OfferAnnounced,
    OfferArrived,
    PartArrived,
    Receiver,
    SealArrived,
    Turned,
)

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "float32", (3,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "bfloat16", (8,)),),
    )
)
TOKENS, ENDS = 20, (8, 16, 20)
OFFER, PARTS = offer_for(LAYOUT, TOKENS, ENDS)
CRCS = [100 + part.index for part in PARTS]
SEAL = seal_for(TOKENS, PARTS, CRCS)
A, LANE = "a" * 32, LaneId(1)


def opened(tombstones: int = 100) -> Receiver:
    receiver = Receiver(LAYOUT, tombstones)
    receiver.handle(Opened(A, TOKENS, generation=5, expires_at=10.0))
    return receiver


def streaming() -> Receiver:
    receiver = opened()
    assert receiver.handle(OfferAnnounced(LANE, A, 5)) == [Admit(LANE)]
    (accept,) = receiver.handle(OfferArrived(LANE, A, OFFER))
    assert isinstance(accept, Accept)
    return receiver


def arrived(receiver: Receiver, *indices: int) -> Receiver:
    for index in indices:
        assert receiver.handle(PartArrived(LANE, A, index, CRCS[index])) == []
    return receiver


def sealed() -> Receiver:
    receiver = arrived(streaming(), 3, 1, 0, 2)
    receiver.handle(SealArrived(LANE, A, SEAL))
    return receiver


def let_go(receiver: Receiver, cause: Cause | None = None, detail: str = "") -> list[Command]:
    return receiver.handle(Drained(LANE, A, 1.0, cause, detail))


def test_a_complete_transfer_is_acknowledged_and_handed_over():
    """Only after the seal was compared; the span then stays until it is released."""
    receiver = arrived(streaming(), 3, 1, 0, 2)
    assert receiver.handle(SealArrived(LANE, A, SEAL)) == [Complete(A, LAYOUT.size_bytes(TOKENS)), Acknowledge(LANE)]
    assert let_go(receiver) == []
    assert receiver.phase(A) is Phase.HANDED
    assert receiver.handle(Release(A)) == [Free(A), Answer(A)]
    assert receiver.received_bytes == LAYOUT.size_bytes(TOKENS)


def test_an_empty_transfer_is_complete_with_its_seal():
    receiver = Receiver(LAYOUT)
    receiver.handle(Opened(A, 0, 5, 10.0))
    receiver.handle(OfferAnnounced(LANE, A, 5))
    receiver.handle(OfferArrived(LANE, A, offer_for(LAYOUT, 0, ())[0]))
    assert receiver.handle(SealArrived(LANE, A, seal_for(0, (), ()))) == [Complete(A, 0), Acknowledge(LANE)]


@pytest.mark.parametrize("missing", range(4))
def test_field_H3_a_missing_part_fails_by_name(missing: int):
    """Whichever part it is; a seal does not replace it."""
    receiver = arrived(streaming(), *(index for index in range(4) if index != missing))
    stop, lost = receiver.handle(SealArrived(LANE, A, SEAL))
    assert isinstance(stop, Stop) and isinstance(lost, Lost)
    assert lost.cause is Cause.MISSING_PART
    assert f"part {missing} (layer {PARTS[missing].layer} " in lost.detail


@pytest.mark.parametrize("field", ["tokens", "parts", "payload_bytes", "digest"])
def test_field_B5_a_seal_that_differs_in_anything_is_refused(field: str):
    """Token count, part count, bytes and checksums each count."""
    fields = {name: getattr(SEAL, name) for name in SEAL.__struct_fields__}
    fields[field] += 1
    receiver = arrived(streaming(), 0, 1, 2, 3)
    _, lost = receiver.handle(SealArrived(LANE, A, Seal(**fields)))
    assert isinstance(lost, Lost) and lost.cause is Cause.SEAL_MISMATCH


def test_field_B7_an_offer_without_a_state_ends_the_attempt():
    receiver = opened()
    receiver.handle(OfferAnnounced(LANE, A, 5))
    short = Offer(tokens=TOKENS, chunk_ends=ENDS, manifest=manifest([part for part in PARTS if part.layer != 0]))
    stop, lost = receiver.handle(OfferArrived(LANE, A, short))
    assert isinstance(stop, Stop) and isinstance(lost, Lost)
    assert lost.cause is Cause.OFFER_MISMATCH and "conv_state" in lost.detail
    assert receiver.refused_frames == 1


@pytest.mark.parametrize(
    ("attempt", "generation", "cause"),
    [("b" * 32, 5, Cause.UNKNOWN_ATTEMPT), (A, 4, Cause.STALE_GENERATION), (A, 6, Cause.STALE_GENERATION)],
)
def test_field_B1_an_offer_that_is_not_for_this_reservation_leaves_it_alone(
    attempt: str, generation: int, cause: Cause
):
    """It is refused and counted, and the right one is still accepted."""
    receiver = opened()
    (stop,) = receiver.handle(OfferAnnounced(LaneId(9), attempt, generation))
    assert isinstance(stop, Stop) and stop.cause is cause
    assert receiver.refused_frames == 1
    assert receiver.handle(OfferAnnounced(LANE, A, 5)) == [Admit(LANE)]


def test_a_second_lane_cannot_offer_speak_or_drain_for_an_attempt():
    """Only the lane that the attempt is bound to counts."""
    receiver, rival = streaming(), LaneId(2)
    (stop,) = receiver.handle(OfferAnnounced(rival, A, 5))
    assert isinstance(stop, Stop) and stop.cause is Cause.ALREADY_OFFERED and stop.lane == rival
    assert receiver.handle(PartArrived(rival, A, 0, 1)) == []
    assert receiver.handle(SealArrived(rival, A, SEAL)) == []
    assert receiver.handle(Drained(rival, A, 1.0, Cause.PEER_GONE)) == []
    assert receiver.phase(A) is Phase.STREAMING and receiver.received_bytes == 0


def test_a_lost_connection_is_reported_at_once_and_the_span_stays():
    """Until the node releases it: the node may still look at it."""
    receiver = arrived(streaming(), 0)
    assert let_go(receiver, Cause.PEER_GONE, "closed") == [Lost(A, Cause.PEER_GONE, "closed")]
    assert receiver.phase(A) is Phase.DRAINED
    assert receiver.handle(Release(A)) == [Free(A), Answer(A)]


def test_field_A1_a_release_frees_only_what_no_lane_can_touch():
    """The abort barrier (R16): asking the lane to stop proves nothing, its last word does."""
    receiver = arrived(streaming(), 0)
    stop, lost = receiver.handle(Release(A))
    assert stop == Stop(LANE, Cause.ABORTED, "released") and isinstance(lost, Lost)
    assert receiver.handle(Release(A)) == []
    assert let_go(receiver, Cause.ABORTED) == [Free(A), Answer(A)]


def test_a_release_right_after_completion_lets_the_acknowledgement_out():
    """The node may be done with the span before the lane's thread has told the sender."""
    receiver = sealed()
    assert receiver.handle(Release(A)) == []
    assert let_go(receiver) == [Free(A), Answer(A)]


def test_the_first_cause_is_kept():
    """What goes wrong while an attempt is being ended is a consequence."""
    receiver = streaming()
    receiver.handle(Tick(10.0))
    assert [c for c in let_go(receiver, Cause.PEER_GONE) if isinstance(c, Lost)] == []
    assert receiver.failed == 1


@pytest.mark.parametrize("cause", [Cause.CHECKSUM, Cause.DUPLICATE_PART, Cause.STALE_GENERATION])
def test_frames_that_end_an_attempt_are_counted(cause: Cause):
    receiver = streaming()
    let_go(receiver, cause)
    assert (receiver.refused_frames, receiver.failed) == (1, 1)


def test_strangers_are_counted_and_those_who_leave_are_not():
    receiver = opened()
    receiver.handle(Turned(Cause.MALFORMED))
    receiver.handle(Turned(Cause.PEER_GONE))
    assert (receiver.refused_frames, receiver.failed) == (1, 0)


def test_field_A1_a_reservation_ends_at_its_deadline():
    """Before any offer came: not a moment earlier, once, and without a release."""
    receiver = opened()
    assert receiver.handle(Tick(9.999)) == []
    assert receiver.handle(Tick(10.0)) == [Lost(A, Cause.EXPIRED), Free(A)]
    assert receiver.handle(Tick(11.0)) == []
    assert receiver.handle(Release(A)) == [Answer(A)]


def test_a_deadline_in_mid_stream_waits_for_the_lane():
    receiver = streaming()
    assert receiver.handle(Tick(10.0)) == [Stop(LANE, Cause.EXPIRED), Lost(A, Cause.EXPIRED)]
    assert receiver.handle(Tick(10.5)) == []
    assert let_go(receiver, Cause.EXPIRED) == [Free(A)]


def test_what_was_handed_over_expires_without_a_second_outcome():
    receiver = sealed()
    let_go(receiver)
    assert receiver.handle(Tick(10.0)) == [Free(A)]


def test_late_frames_find_a_tombstone():
    """An offer for an attempt that was closed says so, as long as we remember; memory of the dead is bounded."""
    receiver = opened(tombstones=2)
    receiver.handle(Release(A))
    (stop,) = receiver.handle(OfferAnnounced(LANE, A, 5))
    assert isinstance(stop, Stop) and stop.cause is Cause.CLOSED_ATTEMPT
    assert receiver.handle(PartArrived(LANE, A, 0, 1)) == []
    for name in "bc":
        receiver.handle(Opened(name * 32, TOKENS, 6, 10.0))
        receiver.handle(Release(name * 32))
    receiver.check()
    assert not receiver.was_closed(A) and receiver.was_closed("b" * 32) and receiver.was_closed("c" * 32)


class ReceiverMachine(RuleBasedStateMachine):
    """Lanes, node and clock in any order: one outcome per attempt, completion only with everything there, and no span
    freed while a lane may touch it."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = Receiver(LAYOUT, tombstones=5)
        self.now = 0.0
        self.count = self.lanes = 0
        self.open: list[str] = []
        self.bound: dict[str, LaneId] = {}
        self.sent: dict[str, set[int]] = {}
        self.outcomes: dict[str, object] = {}
        self.freed: set[str] = set()

    def do(self, event: object) -> list[Command]:
        commands = self.receiver.handle(event)
        for command in commands:
            match command:
                case Lost(attempt) | Complete(attempt):
                    assert attempt not in self.outcomes, f"{attempt} ended twice"
                    self.outcomes[attempt] = command
                    if isinstance(command, Complete):
                        assert self.sent[attempt] == set(range(4)), "complete with parts missing"
                case Free(attempt):
                    assert attempt not in self.bound, "freed under a lane"
                    assert attempt not in self.freed and attempt in self.outcomes
                    self.freed.add(attempt)
                    self.open.remove(attempt)
        return commands

    @rule(ttl=st.floats(0.5, 20))
    def reserve(self, ttl: float):
        self.count += 1
        attempt = f"{self.count:032x}"
        self.open.append(attempt)
        self.sent[attempt] = set()
        self.do(Opened(attempt, TOKENS, self.count, self.now + ttl))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), stale=st.booleans(), honest=st.booleans())
    def offer(self, data: st.DataObject, stale: bool, honest: bool):
        attempt = data.draw(st.sampled_from(self.open))
        self.lanes += 1
        lane = LaneId(self.lanes)
        (answer,) = self.do(OfferAnnounced(lane, attempt, int(attempt, 16) + stale))
        assert isinstance(answer, Admit | Stop)
        if isinstance(answer, Admit):
            assert not stale and attempt not in self.bound
            self.bound[attempt] = lane
            offer = OFFER if honest else Offer(tokens=TOKENS, chunk_ends=ENDS, manifest=b"")
            commands = self.do(OfferArrived(lane, attempt, offer))
            assert any(isinstance(command, Accept) for command in commands) == honest

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def part(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        rest = sorted(set(range(4)) - self.sent[attempt])
        if rest:
            index = data.draw(st.sampled_from(rest))
            self.sent[attempt].add(index)
            self.do(PartArrived(self.bound[attempt], attempt, index, CRCS[index]))

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def all_parts(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        for index in sorted(set(range(4)) - self.sent[attempt]):
            self.sent[attempt].add(index)
            self.do(PartArrived(self.bound[attempt], attempt, index, CRCS[index]))

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def seal(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        self.do(SealArrived(self.bound[attempt], attempt, SEAL))

    @precondition(lambda self: self.bound)
    @rule(data=st.data(), cause=st.sampled_from([None, Cause.PEER_GONE, Cause.CHECKSUM]))
    def drain(self, data: st.DataObject, cause: Cause | None):
        attempt = data.draw(st.sampled_from(sorted(self.bound)))
        lane = self.bound.pop(attempt)
        self.do(Drained(lane, attempt, self.now, cause))
        assert attempt in self.outcomes, "the lane is gone and the node knows nothing"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(self.open))
        self.do(Release(attempt))
        assert attempt in self.outcomes
        assert (attempt in self.freed) == (attempt not in self.bound)

    @rule(seconds=st.floats(0, 5))
    def tick(self, seconds: float):
        self.now += seconds
        self.do(Tick(self.now))

    @invariant()
    def sound(self):
        self.receiver.check()

    def teardown(self):
        """The faults end: lanes let go, the deadline passes, and nothing is left."""
        for attempt, lane in list(self.bound.items()):
            del self.bound[attempt]
            self.do(Drained(lane, attempt, self.now, Cause.PEER_GONE))
        self.do(Tick(self.now + 100))
        assert not self.open and set(self.outcomes) == set(self.sent) == self.freed


TestReceiverMachine = ReceiverMachine.TestCase
TestReceiverMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
