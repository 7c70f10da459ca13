"""An outgoing attempt offers what the layout says, sends every piece until it is acknowledged, and ends once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.kvcache.layout import Extent, KvLayout, TensorKind, TensorSpec, Window, whole
from prfaas.transfer.attempts import Answer, Free, Hang, LaneId, Lost, Opened, Phase, Release, Tick
from prfaas.transfer.frames import Cause
from prfaas.transfer.offer import offer_for, seal_for
from prfaas.transfer.outgoing import (
    Aborted,
    AbortWork,
    Accepted,
    Acked,
    Allowance,
    Begin,
    Command,
    Completed,
    DataWork,
    Delivered,
    Destination,
    Dial,
    Heard,
    LaneDown,
    LaneUp,
    OfferWork,
    PartsReady,
    Sampled,
    SealWork,
    Urgency,
    Wake,
    Work,
)
from prfaas.transfer.sender import Params, Sender

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "uint8", (30,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "uint8", (16,)),),
    )
)
TOKENS, ENDS, PIECE = 20, (8, 16, 20), 64
WHOLE, PLACE = whole(TOKENS), (Window(0, TOKENS, 0, True),)
#: Parts: keys 0:8, keys 8:16 (two pieces each), state, keys 16:20 (a piece each).
OFFER, PIECES = offer_for(LAYOUT, WHOLE, ENDS, PLACE, PIECE)
TOTAL = LAYOUT.size_bytes(TOKENS)
A, B = "a" * 32, "b" * 32
TO = Destination(address="10.0.0.7:7001", incarnation=99, generation=5, region="east")
PARAMS = Params(
    connect_s=2.0,
    no_progress_s=5.0,
    silence_s=3.0,
    abort_grace_s=1.0,
    frame_bytes=128,
    piece_bytes=PIECE,
    idle_s=60.0,
    rest_s=0.5,
    tombstones=100,
)


def opened(params: Params = PARAMS, *attempts: str) -> Sender:
    sender = Sender(LAYOUT, params)
    for attempt in attempts or (A,):
        sender.handle(Opened(attempt, WHOLE, PLACE, generation=3, expires_at=100.0))
    return sender


def begin(sender: Sender, attempt: str = A, now: float = 1.0, to: Destination = TO, **fields: object) -> list[Command]:
    return sender.handle(Begin(attempt=attempt, to=to, chunk_ends=ENDS, now=now, **fields))


def up(sender: Sender, commands: list[Command], now: float = 1.0) -> list[LaneId]:
    lanes = [command.lane for command in commands if isinstance(command, Dial)]
    for lane in lanes:
        assert sender.handle(LaneUp(lane, now)) == []
    return lanes


def write(sender: Sender, lane: LaneId, max_bytes: int = 128, now: float = 1.0) -> Work | None:
    work = sender.take(lane, max_bytes, now)
    if work is not None:
        sender.wrote(lane, now)
    return work


def begun(params: Params = PARAMS) -> tuple[Sender, LaneId]:
    sender = opened(params)
    (lane,) = up(sender, begin(sender))
    assert write(sender, lane) == OfferWork(A, TO, OFFER)
    assert write(sender, lane) is None
    return sender, lane


def streaming(credit: int = TOTAL, params: Params = PARAMS) -> tuple[Sender, LaneId]:
    sender, lane = begun(params)
    assert sender.handle(Accepted(lane, A, (), credit, 1.0)) == []
    return sender, lane


def ready(sender: Sender, *parts: int, now: float = 1.5, attempt: str = A) -> list[Command]:
    return sender.handle(PartsReady(attempt, parts, now))


def two_lanes(*, now: float = 1.5) -> tuple[Sender, LaneId, LaneId]:
    """Everything is ready, nothing was taken."""
    sender, one = streaming()
    other, *more = up(sender, ready(sender, 0, 1, 2, 3, now=now), now)
    for lane in more:
        sender.handle(LaneDown(lane, None, "", now))
    return sender, one, other


def frames(work: Work | None) -> list[tuple[int, int]]:
    assert isinstance(work, DataWork), work
    return [(run.first, run.stop) for run in work.runs]


def acked(lane: LaneId, *ranges: tuple[int, int], credit: int = TOTAL, now: float = 2.0) -> Acked:
    return Acked(lane, A, ranges, credit, now)


def only(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_parts_leave_as_they_become_ready_and_a_seal_follows_the_last():
    """The seal does not wait for acknowledgements: that would cost a round trip."""
    sender, lane = streaming()
    ready(sender, 1)
    assert frames(write(sender, lane)) == [(2, 4)]
    assert write(sender, lane) is None
    ready(sender, 0, 3, 2)
    assert frames(write(sender, lane)) == [(0, 2)]
    assert frames(write(sender, lane)) == [(5, 6), (4, 5)]
    assert write(sender, lane) == SealWork(A, TO, seal_for(WHOLE, PIECES))
    assert write(sender, lane) is None and sender.phase(A) is Phase.SEALED


def test_field_F4_small_parts_leave_in_one_go():
    """A frame of all pieces that follow each other, several frames at a time, up to what the lane wants to take."""
    sender, lane = streaming()
    ready(sender, 0, 1, 3)
    ready(sender, 2)
    assert frames(write(sender, lane, 1 << 20)) == [(0, 4), (5, 6), (4, 5)]
    assert sender.sent_bytes == TOTAL


def test_a_slow_lane_may_take_as_little_as_a_piece():
    sender, lane = streaming()
    ready(sender, 0)
    assert frames(write(sender, lane, 1)) == [(0, 1)]


def test_parts_that_were_ready_too_early_keep_their_order():
    """Before the transfer began, and before the receiver accepted it."""
    sender = opened()
    assert ready(sender, 3, 1, now=0.5) == []
    (lane,) = up(sender, begin(sender))
    ready(sender, 0, now=1.2)
    write(sender, lane)
    assert write(sender, lane) is None, "not accepted yet"
    sender.handle(Accepted(lane, A, (), TOTAL, 1.3))
    assert frames(write(sender, lane, 1 << 20)) == [(5, 6), (2, 4), (0, 2)]


def test_a_part_that_is_announced_twice_leaves_once():
    sender, lane = streaming()
    ready(sender, 0, 0)
    ready(sender, 0)
    assert frames(write(sender, lane, 1 << 20)) == [(0, 2)] and write(sender, lane) is None


def test_a_part_of_what_is_held_may_be_sent():
    """The offer says which rows and states come; they are read from where they lie."""
    sender, some = opened(), Extent(8, 20, (20,))
    commands = sender.handle(Begin(attempt=A, to=TO, chunk_ends=(16, 20), now=1.0, extent=some))
    (lane,) = up(sender, commands)
    expected, pieces = offer_for(LAYOUT, some, (16, 20), PLACE, PIECE)
    assert write(sender, lane) == OfferWork(A, TO, expected)
    sender.handle(Accepted(lane, A, (), pieces.nbytes, 1.0))
    ready(sender, 0, 1, 2)
    work = write(sender, lane, 1000)
    assert isinstance(work, DataWork) and work.nbytes == 12 * 16 + 30
    assert [run.places for run in work.runs] == [((64 + 8 * 16, 128), (0, 30), (64 + 16 * 16, 64))]


def test_an_extent_that_is_not_held_is_not_offered():
    sender = opened()
    (lost,) = sender.handle(Begin(attempt=A, to=TO, chunk_ends=(24,), now=1.0, extent=Extent(8, 24)))
    assert isinstance(lost, Lost) and lost.cause is Cause.OFFER_MISMATCH


def test_an_empty_transfer_is_sealed_as_soon_as_it_is_accepted():
    sender = Sender(LAYOUT, PARAMS)
    sender.handle(Opened(A, whole(0), (), 3, 10.0))
    (lane,) = up(sender, sender.handle(Begin(attempt=A, to=TO, chunk_ends=(), now=1.0)))
    write(sender, lane)
    sender.handle(Accepted(lane, A, (), 0, 1.0))
    assert isinstance(write(sender, lane), SealWork)
    assert sender.handle(Completed(lane, A, 0, 1.25)) == [Delivered(A, 0, 0.25, 0, 0)]


def test_field_B2_delivered_means_that_the_receiver_said_so():
    """Neither written nor acknowledged is enough to free the source. Exposed time runs from the last part."""
    sender, lane = streaming()
    ready(sender, 0, 1, 2)
    ready(sender, 3, now=4.0)
    while write(sender, lane, now=4.0):
        pass
    assert sender.handle(acked(lane, (0, 6), now=4.4)) == []
    assert sender.handle(Completed(lane, A, TOTAL, 4.5)) == [Delivered(A, TOTAL, 0.5, 0, 0)]
    assert sender.phase(A) is Phase.HANDED
    assert sender.handle(Release(A)) == [Free(A), Answer(A)]


@pytest.mark.parametrize("nbytes", [TOTAL, TOTAL - 1])
def test_field_B5_a_completion_that_cannot_be_is_a_failure(nbytes: int):
    """Before the seal was sent, or of another size."""
    sender, lane = streaming()
    if nbytes != TOTAL:
        ready(sender, 0, 1, 2, 3)
        while write(sender, lane):
            pass
    (lost,) = only(sender.handle(Completed(lane, A, nbytes, 2.0)), Lost)
    assert lost.cause is Cause.MALFORMED


def test_nothing_is_sent_beyond_the_credit():
    """It counts different pieces: what is sent again is not paid for twice."""
    sender, lane = streaming(credit=130)
    ready(sender, 0, 1, 2, 3)
    assert frames(write(sender, lane, 1 << 20)) == [(0, 2)]
    assert write(sender, lane, 1 << 20) is None
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "", 1.6))
    (lane, *_) = up(sender, sender.handle(Tick(2.5)), 2.5)
    assert frames(write(sender, lane, 1 << 20)) == [(0, 2)]
    assert write(sender, lane, 1 << 20) is None
    assert only(sender.handle(acked(lane, (0, 2), credit=258)), Wake) == [Wake((lane,))]
    assert frames(write(sender, lane, 1 << 20)) == [(2, 4)]


def test_a_lost_lane_gives_back_what_was_not_acknowledged():
    """The same frames go out on another lane, before anything new; nothing else does."""
    sender, one, other = two_lanes()
    assert frames(write(sender, one, 64)) == [(0, 1)]
    assert frames(write(sender, one, 64)) == [(1, 2)]
    sender.handle(acked(one, (0, 1)))
    assert frames(sender.take(one, 128, 1.6)) == [(2, 4)]
    sender.handle(LaneDown(one, Cause.PEER_GONE, "", 2.0))
    assert frames(write(sender, other)) == [(1, 2)], "a frame keeps its bounds"
    assert frames(write(sender, other)) == [(2, 4)]
    assert frames(write(sender, other)) == [(4, 6)]
    assert isinstance(write(sender, other), SealWork)
    sender.handle(acked(other, (1, 6)))
    assert sender.handle(Completed(other, A, TOTAL, 2.5)) == [Delivered(A, TOTAL, 1.0, 64 + 128, 64 + 128)]
    assert sender.resent_bytes == 64 + 128


def test_field_C1_an_offer_and_a_seal_are_repeated_when_their_lane_is_lost():
    """Whatever has no answer goes out again."""
    sender, lane = begun()
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "", 1.1))
    (lane, *_) = up(sender, sender.handle(Tick(2.0)), 2.0)
    assert isinstance(write(sender, lane), OfferWork)
    sender.handle(Accepted(lane, A, (), TOTAL, 2.0))
    (other, *_) = up(sender, ready(sender, 0, 1, 2, 3, now=2.0), 2.0)
    while write(sender, lane, now=2.0):
        pass
    sender.handle(acked(lane, (0, 6)))
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "", 2.2))
    assert isinstance(write(sender, other), SealWork)
    assert only(sender.handle(Completed(other, A, TOTAL, 2.5)), Delivered)


def test_an_acknowledgement_of_what_was_not_sent_is_a_failure():
    sender, lane = streaming()
    ready(sender, 0)
    write(sender, lane)
    (lost,) = only(sender.handle(acked(lane, (0, 3))), Lost)
    assert lost.cause is Cause.MALFORMED


def test_a_release_waits_for_the_lane_that_reads_the_span():
    """Memory that is being sent is not given to the next one; on a lane that has written its frame nothing is left."""
    sender, one, other = two_lanes()
    write(sender, one)
    sender.take(other, 128, 1.6)
    (lost,) = only(sender.handle(Release(A)), Lost)
    assert lost == Lost(A, Cause.ABORTED, "released")
    assert only(sender.handle(LaneDown(one, Cause.PEER_GONE, "", 1.7)), Free) == []
    assert only(sender.wrote(other, 1.8), Free | Answer) == [Free(A), Answer(A)]
    assert sender.failed == 0


def test_field_A1_a_lane_stuck_in_a_frame_of_an_aborted_attempt_is_closed():
    sender, one, other = two_lanes()
    sender.take(one, 128, 1.6)
    sender.handle(Release(A))
    assert only(sender.handle(Tick(2.6)), Hang) == []
    (hang,) = only(sender.handle(Tick(2.7)), Hang)
    assert hang.lane == one
    assert only(sender.handle(LaneDown(one, Cause.ABORTED, "", 2.8)), Free) == [Free(A)]
    assert write(sender, other) == AbortWork(A, TO, Cause.ABORTED, "released")


def test_field_A2_the_peer_hears_of_an_end_and_an_end_there_ends_it_here():
    """An abort that came from there is not sent back."""
    sender, lane = streaming()
    ready(sender, 0)
    sender.handle(Release(A))
    assert isinstance(write(sender, lane), AbortWork) and write(sender, lane) is None
    sender, lane = streaming()
    assert sender.handle(Aborted(lane, A, Cause.EXPIRED, "there", 2.0)) == [Lost(A, Cause.EXPIRED, "there")]
    assert write(sender, lane) is None
    assert sender.handle(Release(A)) == [Free(A), Answer(A)]


def test_answers_that_cross_a_release_change_nothing():
    """The node was told that it is over; it is not told again."""
    sender, lane = streaming()
    ready(sender, 0, 1, 2, 3)
    while write(sender, lane):
        pass
    sender.handle(Release(A))
    assert sender.handle(acked(lane, (0, 6))) == sender.handle(Completed(lane, A, TOTAL, 2.0)) == []
    sender.check()


def test_a_span_that_was_never_sent_ends_without_an_outcome():
    """Nobody was promised one."""
    assert opened().handle(Release(A)) == [Free(A), Answer(A)]
    assert opened().handle(Tick(100.0)) == [Free(A)]


def test_a_deadline_ends_a_transfer():
    sender, _ = streaming()
    commands = sender.handle(Tick(100.0))
    assert Lost(A, Cause.EXPIRED) in commands and Free(A) in commands


def test_sending_what_is_not_there_or_does_not_fit_fails():
    """Every Begin ends in an outcome, and nothing is dialled."""
    sender = opened()
    sender.handle(Release(A))
    (lost,) = begin(sender)
    assert isinstance(lost, Lost) and lost.cause is Cause.UNKNOWN_ATTEMPT
    (lost,) = opened().handle(Begin(attempt=A, to=TO, chunk_ends=(8, 16), now=1.0))
    assert isinstance(lost, Lost) and lost.cause is Cause.OFFER_MISMATCH


@pytest.mark.parametrize("index", [4, -1])
def test_a_part_that_was_not_offered_fails_the_transfer(index: int):
    sender, _ = streaming()
    (lost,) = only(ready(sender, index), Lost)
    assert lost.cause is Cause.UNEXPECTED_PART
    early = opened()
    ready(early, index)
    (lost,) = begin(early)
    assert isinstance(lost, Lost) and lost.cause is Cause.UNEXPECTED_PART


def test_a_peer_that_does_not_answer_in_time_was_not_reached():
    sender, _ = begun()
    assert only(sender.handle(Tick(3.0)), Lost) == []
    (lost,) = only(sender.handle(Tick(3.1)), Lost)
    assert lost.cause is Cause.CONNECT


def test_a_peer_that_cannot_be_reached_is_tried_again_and_then_given_up():
    """With the reason of the last try, and not before another one would come too late."""
    sender = opened()
    commands, now, tries = begin(sender), 1.0, 0
    while not only(commands, Lost):
        for dial in only(commands, Dial):
            tries += 1
            sender.handle(LaneDown(dial.lane, Cause.CONNECT, "refused", now))
        now += 0.1
        commands = sender.handle(Tick(now))
    assert only(commands, Lost) == [Lost(A, Cause.CONNECT, "refused")]
    assert tries == 3 and now <= 3.2


@pytest.mark.parametrize("cause", [Cause.INCARNATION, Cause.NAMESPACE, Cause.WIRE])
def test_field_C3_a_peer_that_is_another_one_is_given_up_at_once(cause: Cause):
    """All its attempts; the same address under its new incarnation is another peer, which has nothing to rest for."""
    sender = opened(PARAMS, A, B)
    (dial,) = only(begin(sender), Dial)
    begin(sender, B)
    commands = sender.handle(LaneDown(dial.lane, cause, "ours 1, theirs 2", 1.1))
    assert {lost.attempt: lost.cause for lost in only(commands, Lost)} == {A: cause, B: cause}
    sender.handle(Opened("c" * 32, WHOLE, PLACE, 3, 100.0))
    renewed = Destination(address=TO.address, incarnation=100, generation=1, region="east")
    assert only(begin(sender, "c" * 32, 1.1, renewed), Dial)


def test_field_C1_silence_ends_a_transfer_that_is_owed_something():
    """Also while the lanes say that they live."""
    sender, lane = streaming()
    ready(sender, 0)
    write(sender, lane, now=2.0)
    for now in (3.0, 5.0, 7.0):
        sender.handle(Heard(lane, now))
        assert only(sender.handle(Tick(now)), Lost) == [] or now > 6.5
    assert sender.phase(A) is Phase.DRAINED and sender.failed == 1


def test_a_line_shows_for_how_long_nothing_has_come_of_what_is_owed():
    """An offer, or data; not what prefill has yet to make, and not what a peer owes that is gone. One peer that is
    heard shows that the line carries."""
    sender, lane = begun()
    assert sender.stalled_s("east", 1.7) == pytest.approx(0.7), "the offer was written at 1.0"
    assert sender.stalled_s("west", 1.7) is None
    sender.handle(Accepted(lane, A, (), TOTAL, 2.0))
    assert sender.stalled_s("east", 2.5) is None
    ready(sender, 0, 1, now=2.5)
    sender.handle(Tick(2.5))
    [(first, stop)] = frames(write(sender, lane, now=2.5))
    write(sender, lane, now=2.6)
    assert sender.stalled_s("east", 4.0) == pytest.approx(1.5)
    sender.handle(acked(lane, (first, stop), now=4.0))
    assert sender.stalled_s("east", 4.5) == pytest.approx(0.5)
    sender.handle(Heard(lane, 4.6))
    assert sender.stalled_s("east", 4.7) == pytest.approx(0.1)
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "closed", 5.0))
    assert sender.stalled_s("east", 6.0) is None


def test_waiting_for_prefill_is_no_failure():
    """Nothing is owed while nothing was sent that is not acknowledged."""
    sender, lane = streaming()
    ready(sender, 0)
    write(sender, lane)
    sender.handle(acked(lane, (0, 2)))
    for now in range(3, 60):
        sender.handle(Heard(lane, float(now)))
        assert only(sender.handle(Tick(float(now))), Lost) == []


@pytest.mark.parametrize("owed", [True, False])
def test_field_C2_a_peer_that_died_is_given_up_as_gone(owed: bool):
    """Also while prefill computes and there is nothing to send: a lane is kept, for each end to hear of the other."""
    sender, lane = streaming()
    if owed:
        ready(sender, 0)
        write(sender, lane)
    sender.handle(Tick(2.0))
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "closed", 2.0))
    lost, now = [], 2.0
    while not lost:
        now += 0.25
        commands = sender.handle(Tick(now))
        for dial in only(commands, Dial):
            sender.handle(LaneDown(dial.lane, Cause.CONNECT, "refused", now))
        lost = only(commands, Lost)
    assert lost == [Lost(A, Cause.PEER_GONE, "refused")] and now <= 7.25


def test_a_lane_that_falls_silent_is_replaced_while_others_go_on():
    """Half open: what it had goes out on the others. Bytes that leave are a sign of life too."""
    sender, one, other = two_lanes()
    write(sender, one)
    write(sender, other)
    sender.handle(Heard(other, 4.0))
    sender.handle(Sampled({one: 100}, 4.0))
    assert only(sender.handle(Tick(5.0)), Hang) == []
    sender.handle(Heard(other, 7.0))
    sender.handle(acked(other, (2, 4), now=5.5))
    hangs = only(sender.handle(Tick(7.1)), Hang)
    assert [hang.lane for hang in hangs] == [one]
    sender.handle(LaneDown(one, Cause.NO_PROGRESS, "", 7.2))
    assert frames(write(sender, other, now=7.2)) == [(0, 2)]


def test_field_F6_lanes_are_kept_from_one_transfer_to_the_next():
    """A thousand transfers use the lanes of the first, and nothing of them stays behind."""
    sender = Sender(LAYOUT, PARAMS)
    lanes: list[LaneId] = []
    for number in range(1000):
        attempt, now = f"{number:032x}", number / 100
        sender.handle(Opened(attempt, WHOLE, PLACE, 3, now + 100))
        commands = [*begin(sender, attempt, now), *ready(sender, 0, 1, 2, 3, attempt=attempt, now=now)]
        lanes += up(sender, commands, now)
        write(sender, lanes[0], now=now)
        lanes += up(sender, sender.handle(Accepted(lanes[0], attempt, (), TOTAL, now)), now)
        for turn in range(4):
            write(sender, lanes[turn % len(lanes)], now=now)
        if number % 3:
            sender.handle(Completed(lanes[0], attempt, TOTAL, now))
        sender.handle(Release(attempt))
        while any(write(sender, lane, now=now) for lane in lanes):
            pass
        assert attempt not in sender
    assert len(lanes) <= PARAMS.least_lanes
    sender.handle(Sampled(dict.fromkeys(lanes, 0), 20.0))
    assert sender.egress.readings(20.0)[0].queued_bytes == 0
    sender.check()


def test_lanes_are_dialled_while_there_is_more_work_than_lanes():
    """No more than are worth while on that line."""
    sender, _ = streaming()
    assert len(only(ready(sender, 0), Dial)) == 0, "the lane that is there is enough"
    assert len(only(ready(sender, 1), Dial)) == 1
    many = opened(PARAMS, *(f"{number:032x}" for number in range(20)))
    dials = [dial for number in range(20) for dial in only(begin(many, f"{number:032x}"), Dial)]
    assert len(dials) == PARAMS.least_lanes


def test_a_long_fat_line_gets_more_lanes():
    sender = opened(PARAMS, *(f"{number:032x}" for number in range(40)))
    sender.handle(Allowance("east", 125e6))
    (lane,) = up(sender, begin(sender, f"{0:032x}"))
    sender.handle(Sampled({}, 1.0, {lane: 0.13}))
    dials = [dial for number in range(1, 40) for dial in only(begin(sender, f"{number:032x}"), Dial)]
    assert len(dials) + 1 == 7


def test_over_a_short_way_two_lanes_are_busy_and_the_others_wait_their_turn():
    """There lanes are limited by processors; each of them is as good as the other, and takes over when one ends."""
    sender, one = streaming()
    lanes = [one, *up(sender, ready(sender, 0, 1, 2, 3))]
    sender.handle(Sampled({}, 3.1, {one: 0.0002}))
    works = {lane: sender.take(lane, 64, 3.2) for lane in lanes}
    (spare,) = [lane for lane, work in works.items() if work is None]
    going, ending = [lane for lane in lanes if lane is not spare]
    sender.wrote(going, 3.3)
    assert isinstance(sender.take(going, 64, 3.3), DataWork) and sender.take(spare, 64, 3.3) is None
    lost = frames(works[ending])
    assert only(sender.handle(LaneDown(ending, Cause.PEER_GONE, "", 3.4)), Wake) == [Wake((spare,))]
    assert frames(sender.take(spare, 64, 3.4)) == lost
    sender.check()


def test_lanes_are_bounded_and_go_to_who_has_work():
    """An idle lane of another peer is closed for it; one that is owed something is not."""
    sender, lane = begun(Params(piece_bytes=PIECE, total_lanes=1))
    sender.handle(Opened(B, WHOLE, PLACE, 3, 100.0))
    west = Destination(address="10.0.0.8:7001", incarnation=1, generation=1, region="west")
    assert begin(sender, B, to=west) == []
    sender.handle(Accepted(lane, A, (), TOTAL, 1.0))
    assert [hang.lane for hang in only(sender.handle(Tick(1.1)), Hang)] == [lane]
    sender.handle(LaneDown(lane, None, "", 1.2))
    (dial,) = only(sender.handle(Tick(1.3)), Dial)
    assert dial.peer == west.peer


def test_idle_lanes_are_harmless_and_closed_in_the_end():
    """Gaps of seconds to minutes cost nothing."""
    sender, lane = streaming()
    sender.handle(Release(A))
    write(sender, lane)
    assert write(sender, lane, now=2.0) is None
    for now in range(3, 62):
        sender.handle(Heard(lane, float(now)))
        assert sender.handle(Tick(float(now))) == []
    (hang,) = sender.handle(Tick(62.1))
    assert isinstance(hang, Hang) and hang.lane == lane
    sender.handle(LaneDown(lane, Cause.ABORTED, "", 62.2))
    sender.handle(Opened(B, WHOLE, PLACE, 3, 100.0))
    assert only(begin(sender, B, 62.2), Dial), "nothing to rest for"


def test_a_lane_is_kept_while_prefill_computes():
    """A lost one is dialled again although nothing waits to be sent; and it is not closed for being idle."""
    sender, lane = streaming()
    for now in range(2, 80):
        sender.handle(Heard(lane, float(now)))
        assert sender.handle(Tick(float(now))) == []
    sender.handle(LaneDown(lane, Cause.PEER_GONE, "", 80.0))
    assert len(only(sender.handle(Tick(80.6)), Dial)) == 1


def test_an_urgent_transfer_passes_a_bulk_one():
    sender = opened(PARAMS, A, B)
    (lane,) = up(sender, begin(sender))
    begin(sender, B, urgency=Urgency.FINISHING)
    assert isinstance(write(sender, lane), OfferWork) and isinstance(write(sender, lane), OfferWork)
    for attempt in (A, B):
        sender.handle(Accepted(lane, attempt, (), TOTAL, 1.0))
        ready(sender, 0, 1, 2, 3, attempt=attempt, now=1.0)
    turns = [write(sender, lane) for _ in range(3)]
    assert [work.attempt for work in turns] == [B, B, B]


def test_what_was_lost_waits_again_and_what_ended_waits_no_more():
    """The line's backlog: what is ready and allowed and has not left, by the socket or by the peer's word."""
    sender, one, other = two_lanes()
    queued = lambda: sender.egress.readings(3.0)[0].queued_bytes  # noqa: E731
    assert queued() == TOTAL
    write(sender, one)
    assert queued() == TOTAL
    sender.handle(Sampled({one: 28}, 2.0))
    assert queued() == TOTAL - 100
    sender.handle(acked(one, (0, 2)))
    assert queued() == TOTAL - 128
    write(sender, one)
    sender.handle(Sampled({one: 0}, 2.0))
    assert queued() == TOTAL - 256
    sender.handle(LaneDown(one, Cause.PEER_GONE, "", 2.1))
    assert queued() == TOTAL - 128
    write(sender, other)
    sender.handle(Release(A))
    assert queued() == 128, "what is written will still leave"
    sender.handle(Sampled({other: 0}, 2.5))
    assert queued() == 0


class SenderMachine(RuleBasedStateMachine):
    """Engine, lanes, peer, node and clock in any order: pieces reach the peer in frames that never change, one outcome,
    no span freed under a lane, nothing sent beyond the credit."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = Sender(LAYOUT, PARAMS)
        self.now = 0.0
        self.count = 0
        self.open: list[str] = []
        self.begun: set[str] = set()
        self.ready: dict[str, set[int]] = {}
        self.outcomes: dict[str, Command] = {}
        self.dialled: list[LaneId] = []
        self.lanes: dict[LaneId, Work | None] = {}
        self.unanswered: dict[LaneId, list[tuple[str, object]]] = {}
        self.credit: dict[str, int] = {}
        self.frames: dict[str, dict[int, int]] = {}
        self.applied: dict[str, set[int]] = {}
        self.sealed: set[str] = set()

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Dial(lane):
                    self.dialled.append(lane)
                case Wake(lanes):
                    assert all(lane in self.lanes and self.lanes[lane] is None for lane in lanes)
                case Delivered(attempt) | Lost(attempt):
                    assert attempt not in self.outcomes and attempt in self.begun
                    assert isinstance(command, Lost) or attempt in self.sealed
                    self.outcomes[attempt] = command
                case Free(attempt):
                    for work in self.lanes.values():
                        assert not isinstance(work, DataWork) or work.attempt != attempt, "freed under a lane"
                    self.open.remove(attempt)
                case Hang(lane):
                    self.down(lane, Cause.NO_PROGRESS)

    def down(self, lane: LaneId, cause: Cause) -> None:
        if lane in self.dialled:
            self.dialled.remove(lane)
        self.lanes.pop(lane, None)
        self.unanswered.pop(lane, None)
        self.do(self.sender.handle(LaneDown(lane, cause, "", self.now)))

    @rule(ttl=st.floats(0.5, 20), begin=st.booleans(), urgency=st.sampled_from(list(Urgency)))
    def reserve(self, ttl: float, begin: bool, urgency: Urgency):
        self.count += 1
        attempt = f"{self.count:032x}"
        self.open.append(attempt)
        self.ready[attempt], self.frames[attempt], self.applied[attempt] = set(), {}, set()
        self.do(self.sender.handle(Opened(attempt, WHOLE, PLACE, self.count, self.now + ttl)))
        if begin:
            self.begun.add(attempt)
            self.do(begin_(self.sender, attempt, self.now, urgency))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), parts=st.sampled_from([(0,), (1,), (2, 3), (0, 1, 2, 3)]))
    def parts_ready(self, data: st.DataObject, parts: tuple[int, ...]):
        attempt = data.draw(st.sampled_from(self.open))
        self.ready[attempt].update(parts)
        self.do(self.sender.handle(PartsReady(attempt, parts, self.now)))

    @precondition(lambda self: self.dialled)
    @rule(works=st.booleans())
    def connect(self, works: bool):
        lane = self.dialled.pop(0)
        if not works:
            self.down(lane, Cause.CONNECT)
            return
        self.lanes[lane], self.unanswered[lane] = None, []
        self.do(self.sender.handle(LaneUp(lane, self.now)))

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), max_bytes=st.sampled_from([64, 128, 500]), turns=st.integers(1, 4))
    def write(self, data: st.DataObject, max_bytes: int, turns: int):
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        for _ in range(turns):
            if self.lanes.get(lane) is not None:
                self.finish(lane)
            if lane in self.lanes:
                self.lanes[lane] = work = self.sender.take(lane, max_bytes, self.now)
                if isinstance(work, DataWork):
                    self.examine(work)

    def examine(self, work: DataWork) -> None:
        assert work.attempt in self.begun and work.attempt not in self.outcomes
        frames = self.frames[work.attempt]
        for run in work.runs:
            pieces = set(range(run.first, run.stop))
            assert frames.setdefault(run.first, run.stop) == run.stop, "a frame has changed"
            assert not pieces & self.applied[work.attempt] or run.first in frames
            assert pieces <= {piece for part in self.ready[work.attempt] for piece in range(*PIECES.of_part(part))}
        assert sum(PIECES.bytes_of(first, stop) for first, stop in frames.items()) <= self.credit[work.attempt]

    def finish(self, lane: LaneId) -> None:
        work, self.lanes[lane] = self.lanes[lane], None
        match work:
            case DataWork(attempt, _, runs):
                self.unanswered[lane] += [(attempt, run) for run in runs]
            case OfferWork(attempt):
                self.unanswered[lane].append((attempt, "offer"))
            case SealWork(attempt):
                assert self.ready[attempt] == {0, 1, 2, 3}
                self.unanswered[lane].append((attempt, "seal"))
        self.do(self.sender.wrote(lane, self.now))

    @precondition(lambda self: any(self.unanswered.values()))
    @rule(data=st.data(), window=st.sampled_from([100, 200, 1000]), abort=st.sampled_from([False] * 9 + [True]))
    def answer(self, data: st.DataObject, window: int, abort: bool):
        lane = data.draw(st.sampled_from(sorted(lane for lane, owed in self.unanswered.items() if owed)))
        attempt, what = self.unanswered[lane].pop(0)
        applied = self.applied[attempt]
        if abort:
            return self.do(self.sender.handle(Aborted(lane, attempt, Cause.EXPIRED, "", self.now)))
        if what == "seal":
            if len(applied) < PIECES.count:
                self.unanswered[lane].append((attempt, what))
                return None
            self.sealed.add(attempt)
            return self.do(self.sender.handle(Completed(lane, attempt, TOTAL, self.now)))
        if what != "offer":
            applied.update(range(what.first, what.stop))
        done = sum(PIECES.bytes_of(piece, piece + 1) for piece in applied)
        self.credit[attempt] = max(self.credit.get(attempt, 0), min(TOTAL, done + window))
        if what == "offer":
            event = Accepted(lane, attempt, (), self.credit[attempt], self.now)
        else:
            event = Acked(lane, attempt, ((what.first, what.stop),), self.credit[attempt], self.now)
        return self.do(self.sender.handle(event))

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject):
        self.down(data.draw(st.sampled_from(sorted(self.lanes))), Cause.PEER_GONE)

    @precondition(lambda self: self.lanes)
    @rule(nbytes=st.integers(0, 300))
    def sample(self, nbytes: int):
        self.do(self.sender.handle(Sampled(dict.fromkeys(self.lanes, nbytes), self.now)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(self.open))
        self.do(self.sender.handle(Release(attempt)))
        assert (attempt in self.outcomes) == (attempt in self.begun)
        touched = any(isinstance(work, DataWork) and work.attempt == attempt for work in self.lanes.values())
        assert (attempt in self.open) == touched

    @rule(seconds=st.floats(0, 2))
    def tick(self, seconds: float):
        self.now += seconds
        for lane in self.lanes:
            self.do(self.sender.handle(Heard(lane, self.now)))
        self.do(self.sender.handle(Tick(self.now)))

    @invariant()
    def sound(self):
        self.sender.check()

    def teardown(self):
        """The peer answers everything and the engine is done: then every attempt that was begun is over."""
        for lane in list(self.lanes):
            if self.lanes.get(lane) is not None:
                self.finish(lane)
        self.do(self.sender.handle(Tick(self.now + 100)))
        assert not self.open and set(self.outcomes) == self.begun
        for lane in list(self.lanes):
            self.down(lane, Cause.PEER_GONE)
        assert all(sent.queued_bytes == 0 for sent in self.sender.egress.readings(self.now + 100))
        self.sender.check()


def begin_(sender: Sender, attempt: str, now: float, urgency: Urgency) -> list[Command]:
    return begin(sender, attempt, now, urgency=urgency)


TestSenderMachine = SenderMachine.TestCase
TestSenderMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
