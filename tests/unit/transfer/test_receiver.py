"""An incoming attempt is complete or failed, never something between; its span comes back when nobody can touch it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec, Window, whole
from prfaas.transfer.attempts import Answer, Free, Hang, LaneId, Lost, Opened, Phase, Release, Tick
from prfaas.transfer.frames import Cause, Header, Kind, ProtocolError
from prfaas.transfer.incoming import (
    Abort,
    Accept,
    Ack,
    Complete,
    Discard,
    Done,
    Greeted,
    Heard,
    LaneGone,
    OfferArrived,
    OfferRefused,
    PeerAborted,
    Place,
    SealArrived,
    Stop,
    Turned,
)
from prfaas.transfer.offer import Offer, Seal, offer_for, seal_for
from prfaas.transfer.pieces import Pieces
from prfaas.transfer.receiver import Params, Receiver

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "uint8", (30,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "uint8", (16,)),),
    )
)
TOKENS_ONLY = KvLayout(layers=LAYOUT.layers[1:])
TOKENS, ENDS, PIECE = 20, (8, 16, 20), 64
WHOLE, PLACE = whole(TOKENS), (Window(0, TOKENS, 0, True),)
#: Parts: keys 0:8, keys 8:16 (two pieces each), state, keys 16:20 (a piece each).
OFFER, PIECES = offer_for(LAYOUT, WHOLE, ENDS, PLACE, PIECE)
SEAL = seal_for(WHOLE, PIECES)
TOTAL = LAYOUT.size_bytes(TOKENS)
A, L1, L2, RIVAL = "a" * 32, LaneId(1), LaneId(2), LaneId(9)
PARAMS = Params(window_bytes=1 << 20, no_progress_s=5.0, abort_grace_s=1.0, piece_bytes=PIECE, tombstones=100)


def opened(layout: KvLayout = LAYOUT, params: Params = PARAMS) -> Receiver:
    receiver = Receiver(layout, params)
    receiver.handle(Opened(A, WHOLE, PLACE, generation=5, expires_at=100.0))
    for lane, peer in ((L1, "p0"), (L2, "p0"), (RIVAL, "p1")):
        receiver.handle(Greeted(lane, peer, 0.0))
    return receiver


def offer(receiver: Receiver, lane: LaneId = L1, offer: Offer = OFFER, generation: int = 5) -> list[object]:
    return receiver.handle(OfferArrived(lane, A, generation, offer, 0.0))


def streaming(params: Params = PARAMS) -> Receiver:
    receiver = opened(params=params)
    assert offer(receiver) == []
    (accept,) = receiver.replies(L1)
    assert accept == Accept(A, (), min(TOTAL, max(PIECE, params.window_bytes)))
    return receiver


def data(first: int, stop: int, pieces: Pieces = PIECES, **changes: object) -> Header:
    run = pieces.run(first, stop)
    fields = {"attempt": A, "generation": 5, "index": first, "count": run.count, "offset": run.offset}
    return Header(kind=Kind.DATA, **(fields | {"length": run.nbytes} | changes))


def land(receiver: Receiver, first: int, stop: int, lane: LaneId = L1) -> list[object]:
    assert isinstance(receiver.claim(lane, data(first, stop), 0.0), Place)
    return receiver.landed(lane, 0.0)


FRAMES = [(0, 2), (2, 4), (4, 5), (5, 6)]


def landed(*frames: tuple[int, int]) -> Receiver:
    receiver = streaming()
    for first, stop in frames:
        land(receiver, first, stop)
    return receiver


def seal(receiver: Receiver, lane: LaneId = L1, seal: Seal = SEAL) -> list[object]:
    return receiver.handle(SealArrived(lane, A, 5, seal, 0.0))


def said(receiver: Receiver, lane: LaneId, kind: type) -> list[object]:
    return [reply for reply in receiver.replies(lane) if isinstance(reply, kind)]


def only(commands: list[object], kind: type) -> list[object]:
    return [command for command in commands if isinstance(command, kind)]


def test_a_transfer_is_complete_when_all_is_there_and_sealed():
    """In whichever order pieces and seal come, and on whichever lanes."""
    receiver = landed(FRAMES[3], FRAMES[0])
    assert only(seal(receiver), Complete) == []
    land(receiver, *FRAMES[2], lane=L2)
    assert only(land(receiver, *FRAMES[1], lane=L2), Complete) == [Complete(A, TOTAL)]
    assert said(receiver, L1, Done) == [Done(A, TOTAL)]
    assert receiver.phase(A) is Phase.HANDED and receiver.received_bytes == TOTAL
    assert receiver.handle(Release(A)) == [Free(A), Answer(A)]


def test_an_empty_transfer_is_complete_with_its_seal():
    receiver = Receiver(LAYOUT, PARAMS)
    receiver.handle(Opened(A, whole(0), (), 5, 10.0))
    receiver.handle(Greeted(L1, "p0", 0.0))
    empty, pieces = offer_for(LAYOUT, whole(0), (), (), PIECE)
    offer(receiver, offer=empty)
    assert only(seal(receiver, seal=seal_for(whole(0), pieces)), Complete) == [Complete(A, 0)]


@pytest.mark.parametrize("missing", range(4))
def test_field_B5_a_seal_does_not_replace_a_piece(missing: int):
    """A stream that was truncated never becomes a prompt that is decoded."""
    receiver = landed(*(frame for index, frame in enumerate(FRAMES) if index != missing))
    assert only(seal(receiver), Complete) == [] and said(receiver, L1, Done) == []
    assert receiver.phase(A) is Phase.SEALED


@pytest.mark.parametrize("field", ["tokens", "parts", "pieces", "payload_bytes"])
def test_field_B5_a_seal_that_differs_in_anything_is_refused(field: str):
    fields = {name: getattr(SEAL, name) for name in SEAL.__struct_fields__}
    fields[field] += 1
    receiver = landed(*FRAMES)
    (lost,) = only(seal(receiver, seal=Seal(**fields)), Lost)
    assert lost.cause is Cause.SEAL_MISMATCH
    assert said(receiver, L1, Abort)[0].cause is Cause.SEAL_MISMATCH


def test_field_B7_an_offer_without_a_state_ends_the_attempt():
    receiver = opened()
    short = Offer(extent=WHOLE, chunk_ends=ENDS, piece_bytes=PIECE, groups=OFFER.groups[1:])
    (lost,) = only(offer(receiver, offer=short), Lost)
    assert lost.cause is Cause.OFFER_MISMATCH and "conv_state" in lost.detail
    assert receiver.refused == {Cause.OFFER_MISMATCH: 1}
    assert said(receiver, L1, Abort)[0].cause is Cause.OFFER_MISMATCH


@pytest.mark.parametrize(
    ("attempt", "generation", "cause"),
    [("b" * 32, 5, Cause.UNKNOWN_ATTEMPT), (A, 4, Cause.STALE_GENERATION), (A, 6, Cause.STALE_GENERATION)],
)
def test_field_B1_an_offer_that_is_not_for_this_reservation_leaves_it_alone(
    attempt: str, generation: int, cause: Cause
):
    """It is refused and counted, and the right one is still accepted."""
    receiver = opened()
    assert receiver.handle(OfferArrived(L2, attempt, generation, OFFER, 0.0)) == []
    assert said(receiver, L2, Abort)[0].cause is cause and receiver.refused == {cause: 1}
    offer(receiver)
    assert said(receiver, L1, Accept)


def test_field_B1_late_frames_are_dropped_and_counted():
    """Of an earlier holder of the memory, of an attempt that failed, of one that is closed. The lane goes on."""
    receiver = streaming()
    assert receiver.claim(L1, data(0, 2, generation=4), 0.0) == Discard(Cause.STALE_GENERATION)
    receiver.handle(PeerAborted(L2, A, 5, Cause.ABORTED, "", 0.0))
    assert receiver.claim(L1, data(0, 2), 0.0) == Discard(Cause.CLOSED_ATTEMPT)
    assert len(said(receiver, L1, Abort)) == 1, "its sender is told on the lane that it uses"
    assert receiver.handle(Release(A)) == [Free(A), Answer(A)]
    for _ in range(2):
        assert receiver.claim(L1, data(0, 2), 0.0) == Discard(Cause.CLOSED_ATTEMPT)
    assert receiver.refused == {Cause.STALE_GENERATION: 1, Cause.CLOSED_ATTEMPT: 3}
    assert len(said(receiver, L1, Abort)) == 1, "once, however many come"


@pytest.mark.parametrize(
    "header",
    [
        data(0, 2, attempt="c" * 32),
        data(0, 2, offset=1),
        data(0, 2, length=1),
        data(0, 2, length=1 << 22),
        data(0, 2, count=3),
        data(0, 2, count=0),
        data(0, 2, count=1 << 31),
        data(0, 2, index=77),
        data(2, 4, index=1),
    ],
)
def test_field_B1_frames_that_describe_no_place_end_their_lane(header: Header):
    """Unknown attempt, wrong offset, length, count, or over the end of a part; what they claimed to be can still
    come."""
    receiver = streaming()
    with pytest.raises(ProtocolError):
        receiver.claim(L2, header, 0.0)
    land(receiver, 0, 2)


def test_nothing_is_taken_before_it_was_offered_or_from_somebody_else():
    receiver = opened()
    with pytest.raises(ProtocolError):
        receiver.claim(L1, data(0, 2), 0.0)
    offer(receiver)
    for strange in (lambda: receiver.claim(RIVAL, data(0, 2), 0.0), lambda: seal(receiver, RIVAL)):
        with pytest.raises(ProtocolError) as caught:
            strange()
        assert caught.value.cause is Cause.TICKET
    assert receiver.handle(PeerAborted(RIVAL, A, 5, Cause.ABORTED, "", 0.0)) == []
    offer(receiver, RIVAL)
    assert said(receiver, RIVAL, Abort)[0].cause is Cause.ALREADY_OFFERED
    assert receiver.phase(A) is Phase.STREAMING


def test_field_J1_two_attempts_never_meet():
    """The same pieces of two attempts of one peer have nothing to do with each other."""
    receiver = streaming()
    other = "b" * 32
    receiver.handle(Opened(other, WHOLE, PLACE, 6, 100.0))
    receiver.handle(OfferArrived(L1, other, 6, OFFER, 0.0))
    land(receiver, 0, 2)
    assert receiver.claim(L2, data(0, 2, attempt=other, generation=6), 0.0) == Place(other, PIECES.run(0, 2).places)


def test_acknowledgements_name_what_was_applied_as_few_ranges():
    """On the lane that it came on, with the credit of now."""
    receiver = landed((0, 2), (2, 4), (5, 6))
    land(receiver, 4, 5, lane=L2)
    assert receiver.replies(L1) == [Ack(A, ((0, 4), (5, 6)), TOTAL)]
    assert receiver.replies(L2) == [Ack(A, ((4, 5),), TOTAL)]
    assert receiver.replies(L1) == []


def test_credit_moves_with_what_was_applied():
    """And a sender that goes beyond it is refused."""
    receiver = streaming(Params(window_bytes=130, piece_bytes=PIECE))
    receiver.claim(L1, data(0, 2), 0.0)
    with pytest.raises(ProtocolError, match="credit"):
        receiver.claim(L2, data(2, 4), 0.0)
    receiver.landed(L1, 0.0)
    assert receiver.replies(L1) == [Ack(A, ((0, 2),), 128 + 130)]
    land(receiver, 2, 4, lane=L2)


def test_a_piece_that_comes_twice_is_applied_once_and_acknowledged_twice():
    """The first acknowledgement may have been lost with its lane."""
    receiver = landed((0, 2))
    receiver.replies(L1)
    assert receiver.claim(L2, data(0, 2), 0.0) == Discard(None)
    assert receiver.replies(L2) == [Ack(A, ((0, 2),), TOTAL)]
    assert receiver.received_bytes == 128 and receiver.refused == {}


def test_a_piece_that_is_being_written_is_thrown_away_on_another_lane():
    """That one hears of it when the first has landed."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    assert receiver.claim(L2, data(0, 2), 0.0) == Discard(None)
    assert receiver.replies(L2) == []
    receiver.landed(L1, 0.0)
    assert said(receiver, L2, Ack) == said(receiver, L1, Ack) == [Ack(A, ((0, 2),), TOTAL)]


def test_what_was_thrown_away_for_a_lane_that_died_must_come_again():
    """The lane that threw it away is closed, so that its sender knows what to repeat."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    receiver.claim(L2, data(0, 2), 0.0)
    (hang,) = receiver.handle(LaneGone(L1, 0.0))
    assert isinstance(hang, Hang) and hang.lane == L2
    receiver.handle(LaneGone(L2, 0.0))
    receiver.handle(Greeted(LaneId(3), "p0", 0.0))
    land(receiver, 0, 2, lane=LaneId(3))


def test_a_half_read_frame_does_not_keep_its_piece_for_ever():
    """A lane that hangs in a frame which its sender sends again elsewhere is closed."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    receiver.claim(L2, data(0, 2), 0.1)
    (hang,) = receiver.handle(Tick(0.2))
    assert isinstance(hang, Hang) and hang.lane == L1


def test_frames_are_never_half_new():
    receiver = landed((0, 2))
    receiver.claim(L1, data(2, 4), 0.0)
    for overlap in ((1, 2), (3, 4)):
        header = data(*overlap)
        if overlap == (1, 2):
            assert receiver.claim(L2, header, 0.0) == Discard(None), "all of it is there"
        else:
            with pytest.raises(ProtocolError):
                receiver.claim(L2, header, 0.0)


def test_a_lost_lane_costs_what_it_was_reading_and_nothing_else():
    receiver = landed((0, 2))
    receiver.claim(L1, data(2, 4), 0.0)
    assert receiver.handle(LaneGone(L1, 0.0)) == []
    assert receiver.phase(A) is Phase.STREAMING
    for frame in FRAMES[1:]:
        land(receiver, *frame, lane=L2)
    assert only(seal(receiver, L2), Complete)


def test_field_B3_damage_ends_the_attempt_loudly():
    """Both ends hear of it, and it is counted."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    (lost,) = only(receiver.missed(L1, Cause.CHECKSUM, "pieces 0:2", 0.0), Lost)
    assert lost.cause is Cause.CHECKSUM and receiver.refused_frames == 1
    assert said(receiver, L1, Abort) == [Abort(A, Cause.CHECKSUM, "pieces 0:2")]
    assert receiver.handle(Release(A)) == [Free(A), Answer(A)]


def test_field_A1_a_release_frees_only_what_no_lane_can_touch():
    """The abort barrier: the last word of a frame that is being read counts, wherever it goes."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    receiver.claim(L2, data(2, 4), 0.0)
    (lost,) = only(receiver.handle(Release(A)), Lost)
    assert lost == Lost(A, Cause.ABORTED, "released")
    assert receiver.landed(L1, 0.1) == []
    assert receiver.handle(LaneGone(L2, 0.2)) == [Free(A), Answer(A)]


def test_field_A1_a_lane_stuck_in_a_frame_of_an_aborted_attempt_is_closed():
    """Neighbours on other lanes are not."""
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    receiver.handle(Release(A))
    assert receiver.handle(Tick(1.0)) == []
    (hang,) = receiver.handle(Tick(1.1))
    assert isinstance(hang, Hang) and hang.lane == L1
    assert receiver.handle(Tick(1.2)) == []


def test_a_sender_hears_of_a_release_on_any_lane_that_is_left():
    receiver = streaming()
    receiver.handle(LaneGone(L1, 0.0))
    receiver.handle(Release(A))
    assert said(receiver, L2, Abort) == [Abort(A, Cause.ABORTED, "released")]
    assert said(receiver, RIVAL, Abort) == []


def test_field_A1_a_reservation_ends_at_its_deadline():
    """Before any offer came: not a moment earlier, once, and without a release."""
    receiver = opened()
    assert receiver.handle(Tick(99.999)) == []
    assert receiver.handle(Tick(100.0)) == [Lost(A, Cause.EXPIRED), Free(A)]
    assert receiver.handle(Tick(101.0)) == []
    assert receiver.handle(Release(A)) == [Answer(A)]


def test_field_C1_a_completion_that_was_lost_is_repeated():
    """A sender that got no answer sends its seal again: before the span is released, and after."""
    receiver = landed(*FRAMES)
    seal(receiver)
    receiver.handle(LaneGone(L1, 0.0))
    assert only(seal(receiver, L2), Complete) == []
    assert said(receiver, L2, Done) == [Done(A, TOTAL)]
    receiver.handle(Release(A))
    seal(receiver, L2)
    assert said(receiver, L2, Done) == [Done(A, TOTAL)]


def test_field_C1_an_offer_whose_answer_was_lost_is_accepted_again():
    """With what has been applied, so that a sender that knows nothing of it does not send that again."""
    receiver = landed((0, 2))
    offer(receiver, L2)
    assert said(receiver, L2, Accept) == [Accept(A, ((0, 2),), TOTAL)]


def test_a_seal_of_what_failed_is_answered():
    receiver = streaming()
    receiver.handle(Release(A))
    receiver.replies(L1)
    seal(receiver, L2)
    assert said(receiver, L2, Abort)[0].cause is Cause.CLOSED_ATTEMPT


@pytest.mark.parametrize(("lanes_left", "cause"), [(True, Cause.NO_PROGRESS), (False, Cause.PEER_GONE)])
def test_field_C2_a_sender_that_is_heard_no_more_is_given_up(lanes_left: bool, cause: Cause):
    """Neighbours do not count. A keepalive on any of its lanes does: prefill may compute for long between two parts."""
    receiver = streaming()
    receiver.handle(Heard(L2, 4.0))
    if not lanes_left:
        receiver.handle(LaneGone(L1, 4.0))
        receiver.handle(LaneGone(L2, 4.0))
    receiver.handle(Heard(RIVAL, 9.0))
    assert receiver.handle(Tick(9.0)) == []
    (lost,) = only(receiver.handle(Tick(9.1)), Lost)
    assert lost.cause is cause


def test_the_first_cause_is_kept():
    receiver = streaming()
    receiver.claim(L1, data(0, 2), 0.0)
    receiver.handle(Tick(100.0))
    assert only(receiver.missed(L1, Cause.CHECKSUM, "", 100.0), Lost) == []
    assert receiver.failed == 1


def test_field_J1_a_wrong_ticket_is_answered_and_changes_nothing():
    """Who has none hears so on the lane on which he asked; the attempt that he named goes on for who has one."""
    receiver = streaming()
    assert receiver.handle(OfferRefused(RIVAL, A, Cause.TICKET, "expired", 0.0)) == []
    assert receiver.replies(RIVAL) == [Abort(A, Cause.TICKET, "expired")]
    assert receiver.replies(L1) == [] and receiver.refused == {Cause.TICKET: 1}
    for first, stop in FRAMES:
        land(receiver, first, stop)
    assert only(seal(receiver), Complete) == [Complete(A, TOTAL)]


def test_strangers_are_counted_by_cause_and_those_who_leave_are_no_offence():
    receiver = opened()
    for cause in (Cause.TICKET, Cause.TICKET, Cause.PEER_GONE):
        receiver.handle(Turned(cause))
    assert receiver.refused == {Cause.TICKET: 2, Cause.PEER_GONE: 1} and receiver.refused_frames == 2


def test_tombstones_are_bounded():
    receiver = Receiver(LAYOUT, Params(tombstones=2))
    ids = [f"{number:032x}" for number in range(4)]
    for attempt in ids:
        receiver.handle(Opened(attempt, WHOLE, PLACE, 1, 1.0))
        receiver.handle(Release(attempt))
        receiver.check()
    assert [receiver.was_closed(attempt) for attempt in ids] == [False, False, True, True]


@pytest.mark.parametrize(("frames", "tokens"), [([], 0), ([(0, 2)], 8), ([(2, 4)], 0), ([(0, 2), (2, 4)], 16)])
def test_a_verified_boundary_is_the_end_of_the_chunks_that_are_whole(frames: list[tuple[int, int]], tokens: int):
    """So much of a lost transfer need not be computed again."""
    receiver = opened(TOKENS_ONLY)
    plain, pieces = offer_for(TOKENS_ONLY, WHOLE, ENDS, PLACE, PIECE)
    offer(receiver, offer=plain)
    for first, stop in frames:
        assert isinstance(receiver.claim(L1, data(first, stop, pieces), 0.0), Place)
        receiver.landed(L1, 0.0)
    receiver.handle(PeerAborted(L1, A, 5, Cause.ABORTED, "", 0.0))
    assert receiver.boundary(A) == tokens


def test_pieces_go_to_the_windows_that_were_given():
    """The frame says which pieces it carries; where they belong is known here alone."""
    windows = (Window(0, 8, 5000), Window(8, 16, 1000), Window(16, 20, 3000), Window(20, 20, 200, state=True))
    receiver = Receiver(LAYOUT, PARAMS)
    receiver.handle(Opened(A, WHOLE, windows, 5, 100.0))
    receiver.handle(Greeted(L1, "p0", 0.0))
    offer(receiver)
    assert receiver.claim(L1, data(1, 5), 0.0) == Place(A, ((5064, 64), (1000, 128), (200, 30)))
    receiver.landed(L1, 0.0)
    assert receiver.claim(L1, data(5, 6), 0.0) == Place(A, ((3000, 64),))


def test_an_offer_whose_chunks_do_not_fit_the_windows_ends_the_attempt():
    """Nothing of it is ever written."""
    receiver = Receiver(LAYOUT, PARAMS)
    receiver.handle(Opened(A, WHOLE, (Window(0, 12, 0), Window(12, 20, 4096, state=True)), 5, 100.0))
    receiver.handle(Greeted(L1, "p0", 0.0))
    (lost,) = only(offer(receiver), Lost)
    assert lost.cause is Cause.OFFER_MISMATCH and "8:16" in lost.detail
    assert receiver.claim(L1, data(0, 1), 0.0) == Discard(Cause.CLOSED_ATTEMPT)


def test_a_transfer_that_is_stopped_keeps_what_has_come():
    """Nothing is added from then on, the sender is told, and the span stays until it is released."""
    receiver = opened(TOKENS_ONLY)
    plain, pieces = offer_for(TOKENS_ONLY, WHOLE, ENDS, PLACE, PIECE)
    offer(receiver, offer=plain)
    for first, stop in ((0, 2), (2, 4)):
        assert isinstance(receiver.claim(L1, data(first, stop, pieces), 0.0), Place)
        if first:
            (lost,) = only(receiver.handle(Stop(A)), Lost)
            assert lost.cause is Cause.ABORTED
            assert receiver.handle(Stop(A)) == []
        receiver.landed(L1, 0.0)
    assert receiver.boundary(A) == 8 and A in receiver
    assert said(receiver, L1, Abort)[0].cause is Cause.ABORTED
    assert receiver.claim(L1, data(2, 4, pieces), 0.0) == Discard(Cause.CLOSED_ATTEMPT)
    assert only(receiver.handle(Release(A)), Free) == [Free(A)]
    receiver.check()


def test_a_transfer_that_is_complete_is_not_stopped_any_more():
    """Nor one that nobody knows."""
    receiver = landed(*FRAMES)
    seal(receiver)
    assert receiver.handle(Stop(A)) == receiver.handle(Stop("b" * 32)) == []
    assert receiver.boundary(A) == TOKENS


def test_field_B8_a_state_is_good_at_its_own_length_only():
    """Keys of the first chunks are of no use with the state of the end, nor without."""
    receiver = landed(*FRAMES[:3])
    assert receiver.boundary(A) == 0
    land(receiver, *FRAMES[3])
    assert receiver.boundary(A) == TOKENS


class ReceiverMachine(RuleBasedStateMachine):
    """Peers, lanes, node and clock in any order: one outcome, complete only when whole, no span freed under a lane,
    every frame answered or its lane closed."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = Receiver(LAYOUT, PARAMS)
        self.now = 0.0
        self.count = 0
        self.open: list[str] = []
        self.lanes: dict[LaneId, str | None] = {}
        self.writing: dict[LaneId, tuple[str, tuple[int, int]]] = {}
        self.applied: dict[str, set[tuple[int, int]]] = {}
        self.owed: dict[LaneId, set[tuple[str, tuple[int, int]]]] = {}
        self.outcomes: dict[str, object] = {}
        self.freed: set[str] = set()

    def do(self, commands: list[object]) -> None:
        for command in commands:
            match command:
                case Complete(attempt) | Lost(attempt):
                    assert attempt not in self.outcomes
                    self.outcomes[attempt] = command
                    assert isinstance(command, Lost) or self.applied[attempt] == set(FRAMES)
                case Free(attempt):
                    assert attempt in self.outcomes and attempt not in self.freed
                    assert all(attempt != writing for writing, _ in self.writing.values()), "freed under a lane"
                    self.freed.add(attempt)
                    self.open.remove(attempt)
                case Hang(lane):
                    self.gone(lane)

    def gone(self, lane: LaneId) -> None:
        if lane in self.lanes:
            del self.lanes[lane], self.owed[lane]
            self.writing.pop(lane, None)
            self.do(self.receiver.handle(LaneGone(lane, self.now)))

    def answered(self, lane: LaneId) -> None:
        for reply in self.receiver.replies(lane):
            match reply:
                case Ack(attempt, ranges):
                    pieces = {piece for first, stop in ranges for piece in range(first, stop)}
                    frames = {frame for frame in FRAMES if pieces.issuperset(range(*frame))}
                    assert frames <= self.applied[attempt], "acknowledged and not applied"
                    self.owed[lane] -= {(attempt, frame) for frame in frames}
                case Abort(attempt) | Done(attempt):
                    self.owed[lane] = {owed for owed in self.owed[lane] if owed[0] != attempt}

    @rule(ttl=st.floats(0.5, 30))
    def reserve(self, ttl: float):
        self.count += 1
        attempt = f"{self.count:032x}"
        self.open.append(attempt)
        self.applied[attempt] = set()
        self.do(self.receiver.handle(Opened(attempt, WHOLE, PLACE, self.count, self.now + ttl)))

    @rule()
    def greet(self):
        self.count += 1
        lane = LaneId(self.count)
        self.lanes[lane], self.owed[lane] = "p0", set()
        self.receiver.handle(Greeted(lane, "p0", self.now))

    @precondition(lambda self: self.lanes and self.applied)
    @rule(data=st.data(), stale=st.booleans())
    def offer(self, data: st.DataObject, stale: bool):
        lane, attempt = self.draw(data)
        generation = int(attempt, 16) + (stale and data.draw(st.booleans()))
        self.do(self.receiver.handle(OfferArrived(lane, attempt, generation, OFFER, self.now)))
        self.answered(lane)

    @precondition(lambda self: self.lanes and self.applied)
    @rule(data_=st.data())
    def frame(self, data_: st.DataObject):
        lane, attempt = self.draw(data_)
        frame = data_.draw(st.sampled_from(FRAMES))
        if lane in self.writing:
            return
        header = data(*frame, attempt=attempt, generation=int(attempt, 16))
        try:
            place = self.receiver.claim(lane, header, self.now)
        except ProtocolError:
            self.gone(lane)
            return
        if isinstance(place, Place):
            assert attempt not in self.freed and frame not in self.applied[attempt], "applied twice"
            self.writing[lane] = (attempt, frame)
        if attempt not in self.freed or not isinstance(self.outcomes[attempt], Complete):
            self.owed[lane].add((attempt, frame))
        self.answered(lane)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), cause=st.sampled_from([None, None, None, Cause.CHECKSUM, Cause.PEER_GONE]))
    def end_frame(self, data: st.DataObject, cause: Cause | None):
        lane = data.draw(st.sampled_from(sorted(self.writing)))
        attempt, frame = self.writing.pop(lane)
        if cause is Cause.PEER_GONE:
            self.gone(lane)
        elif cause is not None:
            self.do(self.receiver.missed(lane, cause, "", self.now))
        else:
            if self.receiver.phase(attempt) in (Phase.STREAMING, Phase.SEALED):
                self.applied[attempt].add(frame)
            self.do(self.receiver.landed(lane, self.now))
        if lane in self.lanes:
            self.answered(lane)

    @precondition(lambda self: self.lanes and self.applied)
    @rule(data=st.data())
    def seal(self, data: st.DataObject):
        lane, attempt = self.draw(data)
        try:
            self.do(self.receiver.handle(SealArrived(lane, attempt, int(attempt, 16), SEAL, self.now)))
        except ProtocolError:
            self.gone(lane)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject):
        self.gone(data.draw(st.sampled_from(sorted(self.lanes))))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        attempt = data.draw(st.sampled_from(self.open))
        self.do(self.receiver.handle(Release(attempt)))
        touched = any(attempt == writing for writing, _ in self.writing.values())
        assert attempt in self.outcomes and (attempt in self.freed) != touched

    @rule(seconds=st.floats(0, 3))
    def tick(self, seconds: float):
        self.now += seconds
        self.do(self.receiver.handle(Tick(self.now)))

    @invariant()
    def sound(self):
        self.receiver.check()

    def draw(self, data: st.DataObject) -> tuple[LaneId, str]:
        return data.draw(st.sampled_from(sorted(self.lanes))), data.draw(st.sampled_from(sorted(self.applied)))

    def teardown(self):
        """The frames that are being read end, deadlines pass, and nothing is left: no span, no frame unanswered."""
        for lane in list(self.writing):
            if lane in self.writing and lane in self.lanes:
                attempt, frame = self.writing.pop(lane)
                if self.receiver.phase(attempt) in (Phase.STREAMING, Phase.SEALED):
                    self.applied[attempt].add(frame)
                self.do(self.receiver.landed(lane, self.now))
        for lane in list(self.lanes):
            if lane in self.lanes:
                self.answered(lane)
                assert not self.owed[lane], "a frame was neither acknowledged nor refused"
        self.do(self.receiver.handle(Tick(self.now + 100)))
        assert not self.open and set(self.outcomes) == set(self.applied) == self.freed


TestReceiverMachine = ReceiverMachine.TestCase
TestReceiverMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
