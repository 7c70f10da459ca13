"""What a link carries, learned from senders that wait for it."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import LinkState, Node
from prfaas.profile import GBPS
from prfaas.scheduling.congestion import LinkEstimator, LinkParams
from tests.unit.scheduling.steering_scenes import FAR, NEAR, sending

PAIR = (FAR, NEAR)
LINE = LinkParams(line_bytes_per_s={PAIR: 100.0})


def after(estimator: LinkEstimator, rounds: int, *senders: Node, start: int = 0) -> LinkState:
    """The same reports, second after second."""
    for second in range(start, start + rounds):
        for each in senders:
            estimator.report(each, float(second))
        estimator.update(float(second))
        estimator.check()
    return estimator.links(float(start + rounds - 1))[PAIR]


def test_a_lasting_queue_says_what_the_line_carries():
    """100 were bought, 3 arrive while more is waiting."""
    state = after(LinkEstimator(LINE), 30, sending("p0", sent=3.0, backlogged=3.0, queued=50))
    assert state.capacity_bytes_per_s == pytest.approx(3.0, rel=0.01)
    assert (state.utilization, state.queued_bytes) == (pytest.approx(1.0, rel=0.01), 50)


def test_a_cut_is_noticed_within_a_few_reports():
    """The time constant is two reports."""
    state = after(LinkEstimator(LINE), 6, sending("p0", sent=3.0, backlogged=3.0, queued=50))
    assert state.capacity_bytes_per_s is not None and state.capacity_bytes_per_s < 20


def test_a_link_is_stalled_when_nothing_arrives_of_anybody():
    """The one report after a cut says so. Who waits for nothing says nothing, one who is answered shows that the line
    carries, and an old report says nothing any more."""
    stuck, idle = sending("p0", sent=0.0, stalled_s=0.9), sending("p1", sent=0.0, queued=50)
    stuck_longer = sending("p2", sent=0.0, stalled_s=3.0)
    assert after(LinkEstimator(LINE), 1, stuck, idle, stuck_longer).stalled_s == 0.9
    assert after(LinkEstimator(LINE), 1, stuck, sending("p2", sent=9.0, stalled_s=0.02)).stalled_s == 0.02
    assert after(LinkEstimator(LINE), 1, idle).stalled_s == 0.0
    estimator = LinkEstimator(LINE)
    after(estimator, 1, stuck)
    assert estimator.links(LINE.stale_s + 1.0)[PAIR].stalled_s == 0.0


def test_the_tail_of_a_transfer_says_only_what_the_line_is_at_least():
    """A short queue at 30 does not make a line of 100 narrow, and one at 150 makes it wider."""
    estimator = LinkEstimator(LINE)
    assert after(estimator, 30, sending("p0", sent=1.0, backlogged=30.0, queued=1)).capacity_bytes_per_s == 100.0
    wider = after(estimator, 30, sending("p0", sent=1.0, backlogged=150.0, queued=1), start=30)
    assert wider.capacity_bytes_per_s == pytest.approx(150.0, rel=0.01)


def test_senders_that_are_always_backlogged_share_the_line():
    """Four with a quarter each make the whole."""
    senders = [sending(f"p{i}", sent=25.0, backlogged=25.0, queued=99) for i in range(4)]
    assert after(LinkEstimator(), 20, *senders).capacity_bytes_per_s == pytest.approx(100.0, rel=0.01)


def test_senders_that_take_turns_count_once():
    """Four that each get all of it for a twentieth of the time do not make it four times as wide."""
    senders = [sending(f"p{i}", sent=5.0, backlogged=100.0, queued=1) for i in range(4)]
    assert after(LinkEstimator(), 20, *senders).capacity_bytes_per_s == pytest.approx(115.0, rel=0.01)


def test_who_never_waits_takes_a_part_of_it_too():
    """60 go by while the others get 40."""
    senders = [sending("p0", sent=60.0), sending("p1", sent=40.0, backlogged=40.0, queued=99)]
    assert after(LinkEstimator(), 20, *senders).capacity_bytes_per_s == pytest.approx(100.0, rel=0.01)


def test_a_narrow_line_is_not_taken_for_narrow_for_ever():
    """Without a backlog the estimate recovers to the line, or is forgotten where none is known."""
    for params, expected in ((LINE, 100.0), (LinkParams(), None)):
        estimator = LinkEstimator(params)
        after(estimator, 20, sending("p0", sent=2.0, backlogged=2.0, queued=50))
        soon = after(estimator, 4, sending("p0", sent=1.0), start=20)
        assert soon.capacity_bytes_per_s == pytest.approx(2.0, rel=0.01)
        assert after(estimator, 60, sending("p0", sent=1.0), start=24).capacity_bytes_per_s == expected


def test_recovery_is_stopped_by_the_next_backlog():
    """It is a guess, and a measurement corrects it."""
    estimator = LinkEstimator(LINE)
    after(estimator, 20, sending("p0", sent=2.0, backlogged=2.0, queued=50))
    guessed = after(estimator, 20, sending("p0", sent=1.0), start=20)
    assert guessed.capacity_bytes_per_s is not None and guessed.capacity_bytes_per_s > 4
    measured = after(estimator, 15, sending("p0", sent=2.0, backlogged=2.0, queued=50), start=40)
    assert measured.capacity_bytes_per_s == pytest.approx(2.0, rel=0.02)


def test_what_just_crossed_fits():
    """No estimate is below the goodput."""
    state = after(LinkEstimator(LinkParams(line_bytes_per_s={PAIR: 5.0})), 20, sending("p0", sent=8.0))
    assert state.capacity_bytes_per_s == pytest.approx(8.0, rel=0.01)


def test_a_stalled_line_carries_nothing():
    """Everything waits and nothing goes."""
    state = after(LinkEstimator(LINE), 40, sending("p0", sent=0.0, backlogged=0.0, queued=10_000))
    assert state.capacity_bytes_per_s is not None and state.capacity_bytes_per_s < 0.01


def lanes(name: str, *, sent: float, rtt_s: float | None, retransmitted: float | None) -> Node:
    """A sender that looks at its lanes."""
    plain = sending(name, sent=sent)
    (egress,) = plain.load.egress
    seen = replace(egress, rtt_s=rtt_s, retransmitted_bytes_per_s=retransmitted, queue_age_s=0.5)
    return replace(plain, load=replace(plain.load, egress=(seen,)))


def test_the_round_trip_is_the_shortest_that_a_sender_sees():
    """A queue in one sender's way makes its own longer, not the link's. It outlives the lanes, and a new way shows."""
    estimator = LinkEstimator(LINE)
    far, near = (lanes(name, sent=1.0, rtt_s=rtt_s, retransmitted=0.0) for name, rtt_s in (("p0", 0.08), ("p1", 0.03)))
    assert after(estimator, 5, far, near).rtt_s == pytest.approx(0.03)
    idle = lanes("p0", sent=0.0, rtt_s=None, retransmitted=0.0)
    assert after(estimator, 60, idle, replace(idle, id=near.id), start=5).rtt_s == pytest.approx(0.03)
    assert after(estimator, 30, far, start=65).rtt_s == pytest.approx(0.08, rel=0.01)


def test_the_retransmitted_share_is_of_all_that_went_out():
    """Only of the senders that count it; nothing is known when nobody does, or when nothing is sent for long."""
    estimator = LinkEstimator(LINE)
    silent = sending("p1", sent=1e9)
    assert after(estimator, 10, silent).retransmitted_ratio is None
    state = after(estimator, 30, silent, lanes("p0", sent=98.0, rtt_s=0.03, retransmitted=2.0), start=10)
    assert state.retransmitted_ratio == pytest.approx(0.02) and state.queue_age_s == 0.5
    assert (
        after(estimator, 60, lanes("p0", sent=0.0, rtt_s=None, retransmitted=0.0), start=40).retransmitted_ratio is None
    )


def test_without_reports_nothing_changes_but_the_age():
    """Silence is not idleness: no recovery, no abundance."""
    estimator = LinkEstimator(LINE)
    before = after(estimator, 20, sending("p0", sent=2.0, backlogged=2.0, queued=50))
    for second in range(20, 200):
        estimator.update(float(second))
    state = estimator.links(199.0)[PAIR]
    assert state.capacity_bytes_per_s == before.capacity_bytes_per_s
    assert state.age_s == 180.0 and not estimator.abundant(NEAR)


def test_a_line_that_nobody_has_reported_is_known_but_unheard_of():
    """What was bought is expected, and its age says that nobody has confirmed it."""
    state = LinkEstimator(LINE).links(5.0)[PAIR]
    assert (state.capacity_bytes_per_s, state.utilization, state.age_s) == (100.0, None, math.inf)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0])
def test_nonsense_is_no_report(nonsense):
    """The sender's last sound word stands until it is stale, and after that the link has not been heard of."""
    estimator = LinkEstimator(LINE)
    sound = after(estimator, 20, sending("p0", sent=10.0, backlogged=10.0, queued=50))
    for broken in (
        sending("p0", sent=nonsense, backlogged=10.0, queued=50),
        sending("p0", sent=10.0, backlogged=nonsense, queued=50),
        lanes("p0", sent=10.0, rtt_s=nonsense, retransmitted=1.0),
        lanes("p0", sent=10.0, rtt_s=0.01, retransmitted=nonsense),
    ):
        state = after(estimator, 10, broken, start=20)
        assert state == replace(sound, age_s=10.0)


def test_the_switch_is_calm_and_safe():
    """Abundant only after a while of little use, scarce at once, and in between it stays what it is."""
    estimator = LinkEstimator(LINE)
    assert not estimator.abundant(NEAR)
    after(estimator, 9, sending("p0", sent=20.0))
    assert not estimator.abundant(NEAR)
    after(estimator, 5, sending("p0", sent=20.0), start=9)
    assert estimator.abundant(NEAR)
    after(estimator, 20, sending("p0", sent=60.0), start=14)
    assert estimator.abundant(NEAR)
    after(estimator, 10, sending("p0", sent=90.0), start=34)
    assert not estimator.abundant(NEAR)
    after(estimator, 20, sending("p0", sent=60.0), start=44)
    assert not estimator.abundant(NEAR)


def test_the_switch_does_not_follow_noise():
    """Around either limit it flips once at most in ten minutes."""
    for use in (0.5, 0.75):
        chance, estimator, flips, was = random.Random(7), LinkEstimator(LINE), 0, False
        for second in range(600):
            after(estimator, 1, sending("p0", sent=100 * use * chance.uniform(0.8, 1.2)), start=second)
            flips, was = flips + (estimator.abundant(NEAR) != was), estimator.abundant(NEAR)
        assert flips <= 1


rates = st.one_of(st.floats(), st.floats(0, 1e12))
reports = st.lists(
    st.tuples(st.integers(0, 3), rates, st.one_of(st.none(), rates), st.integers(-5, 10**12), st.integers(0, 20)),
    max_size=60,
)


@given(reports)
def test_whatever_is_reported_the_estimate_stays_sane(events):
    """NaN, infinity, negative numbers, gaps and steps back in time."""
    estimator, now = LinkEstimator(LinkParams(line_bytes_per_s={PAIR: GBPS})), 0.0
    for name, sent, backlogged, queued, wait in events:
        now += wait
        estimator.report(sending(f"p{name}", sent=sent, backlogged=backlogged, queued=queued), now)
        estimator.update(now)
        estimator.check()
        state = estimator.links(now)[PAIR]
        assert state.capacity_bytes_per_s is None or 0 <= state.capacity_bytes_per_s < math.inf
        assert state.utilization is None or 0 <= state.utilization < math.inf
