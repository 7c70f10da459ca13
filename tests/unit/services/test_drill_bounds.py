"""Whether a drill's bound held, from what was sent and what came of it."""

import pytest

from services.drill.bounds import ALLOWANCE_S, BOUNDS, FACTOR, Drill, Seen, Sent, report

FAULT_S, STRUCK_S = 100.0, 100.5


def sent(begun_s: float, took_s: float = 1.0, **facts: object) -> Sent:
    return Sent(begun_s, begun_s + took_s, **{"path": "remote", **facts})  # type: ignore[arg-type]


BEFORE = (sent(90.0), sent(92.0, path="local"))
AFTER = (sent(101.0), sent(103.0))


def told(drill: Drill, *since: Sent, before: tuple[Sent, ...] = BEFORE, left: tuple[str, ...] | None = (), unchecked=0):
    answered = sum(not one.error for one in (*before, *since))
    return report(Seen(drill, "x", FAULT_S, STRUCK_S, (*before, *since), left, answered - unchecked))


@pytest.mark.parametrize("drill", Drill)
def test_a_drill_in_which_nothing_was_felt_held(drill: Drill):
    """Requests before and after, all answered, nothing left."""
    outcome = told(drill, *AFTER)
    assert outcome["held"] and outcome["broken"] == []
    assert (outcome["requests_before"], outcome["requests_since"], outcome["failed"]) == (2, 2, 0)
    assert outcome["right_again_seconds"] == 0.0 and outcome["given_back"] is True


@pytest.mark.parametrize("drill", Drill)
def test_a_failure_that_begins_after_the_fault_breaks_every_bound(drill: Drill):
    """By then everybody knows whom to avoid."""
    outcome = told(drill, *AFTER, sent(101.0, error="PeerUnavailable"))
    assert not outcome["held"] and "1 requests failed" in outcome["broken"][0]
    assert outcome["errors"] == {"PeerUnavailable": 1}


@pytest.mark.parametrize("drill", Drill)
def test_only_where_a_stream_has_lost_its_node_may_an_open_one_fail(drill: Drill):
    """It was open when its decode node was killed, or while that was being done."""
    for begun_s in (99.5, STRUCK_S):
        outcome = told(drill, *AFTER, sent(begun_s, error="PeerUnavailable"))
        assert outcome["held"] is (drill is Drill.KILL_DECODE)
        assert outcome["failed"] == 1


@pytest.mark.parametrize("drill", Drill)
def test_a_wrong_answer_and_one_that_never_ends_break_every_bound(drill: Drill):
    """Whenever they were."""
    for broken, says in (({"wrong": True}, "wrong"), ({"hung": True, "error": "no answer"}, "did not end")):
        outcome = told(drill, *AFTER, sent(99.5, 90.0, **broken))
        assert not outcome["held"]
        assert any(says in one for one in outcome["broken"])


def test_an_answer_that_could_not_be_compared_breaks_the_bound():
    """Nobody knows whether it was right."""
    outcome = told(Drill.KILL_DECODE, *AFTER, unchecked=1)
    assert not outcome["held"] and "1 answers could not be compared" in outcome["broken"][0]


def test_traffic_is_right_again_when_the_last_disturbed_request_has_ended():
    """A request that takes much longer than any before is disturbed, and so is one that fails."""
    limit_s = FACTOR * 1.0 + ALLOWANCE_S
    outcome = told(Drill.WAN_CUT, sent(99.0, limit_s), sent(101.0, limit_s + 0.5), sent(110.0))
    assert outcome["disturbed"] == 1
    assert outcome["right_again_seconds"] == pytest.approx(1.0 + limit_s + 0.5)
    slow = BOUNDS[Drill.WAN_CUT].right_again_s + 1.0
    outcome = told(Drill.WAN_CUT, sent(100.0, slow), sent(140.0))
    assert not outcome["held"] and "right again after 31.0 s" in outcome["broken"][0]


def test_what_is_not_given_back_breaks_the_bound():
    """Where it can be asked for."""
    assert not told(Drill.KILL_DECODE, *AFTER, left=("prfaas_worker_kv_spans of decode-0: 1",))["held"]
    outcome = told(Drill.KILL_DECODE, *AFTER, left=None)
    assert outcome["held"] and outcome["given_back"] is None


@pytest.mark.parametrize(
    ("drill", "before", "since"),
    [
        (Drill.KILL_PREFILL, (sent(90.0, path="local"),), AFTER),
        (Drill.WAN_CUT, (sent(90.0, path="local"),), AFTER),
        (Drill.KILL_DECODE, (), AFTER),
        (Drill.KILL_DECODE, (sent(90.0, error="Overloaded"),), AFTER),
        (Drill.STORE_OUTAGE, BEFORE, ()),
    ],
)
def test_a_drill_that_met_nothing_does_not_pass(drill: Drill, before: tuple[Sent, ...], since: tuple[Sent, ...]):
    """Without traffic that the fault could hurt nothing was shown."""
    outcome = told(drill, *since, before=before)
    assert not outcome["held"] and "shows nothing" in outcome["broken"][0]
