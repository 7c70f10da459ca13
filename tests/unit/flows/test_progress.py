"""The net below the flow's deadlines: which open request gets nowhere."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import NodeId
from prfaas.flows.ports import PrefillReport
from prfaas.flows.progress import Open, Progress, Stage, attempt_s
from prfaas.flows.serve import ServeParams
from prfaas.flows.story import Attempt, Story
from prfaas.request import AttemptId, Path, Reason, Request, RequestId, Route, Sampling

GRACE_S, ATTEMPT_S = 10.0, 100.0
ROUTE = Route(
    prefill=NodeId("p"),
    decode=NodeId("d"),
    path=Path.REMOTE,
    reason=Reason.LONG_PROMPT,
    uncached_tokens=1,
    transfer_tokens=1,
    threshold_tokens=0,
)
REPORT = PrefillReport(queue_s=0.0, compute_s=0.0, exposed_s=0.0, prefill_tokens=1, kv_bytes=1)


def routed(story: Story) -> None:
    story.attempts.append(Attempt(AttemptId("a"), ROUTE))


def prefilled(story: Story) -> None:
    story.prefill = REPORT


def token(story: Story) -> None:
    story.output_tokens += 1


@dataclass
class Scene:
    progress: Progress
    story: Story
    open: Open


@pytest.fixture
def scene() -> Scene:
    progress, story = Progress(GRACE_S), Story()
    return Scene(progress, story, progress.opened(RequestId("r"), story, ATTEMPT_S, 0.0))


@pytest.mark.parametrize(
    ("steps", "stage", "bound_s"),
    [
        ((), Stage.LOOK_UP, GRACE_S),
        ((routed,), Stage.PREFILL, GRACE_S + ATTEMPT_S),
        ((routed, prefilled), Stage.FIRST_TOKEN, GRACE_S + ATTEMPT_S),
        ((routed, prefilled, token), Stage.DECODE, GRACE_S + ATTEMPT_S),
    ],
)
def test_field_C10_a_request_that_gets_nowhere_is_told_with_its_stage(scene: Scene, steps, stage, bound_s):
    """Once its stage has taken longer than the deadlines of the flow and the grace together, and not before."""
    for step in steps:
        step(scene.story)
    scene.progress.look(0.0)
    assert scene.progress.look(bound_s) == []
    [stalled] = scene.progress.look(bound_s + 0.1)
    assert (stalled.open.request, stalled.stage, stalled.times) == ("r", stage, 1)
    assert stalled.seconds == pytest.approx(bound_s + 0.1)


def test_whatever_is_reached_counts_as_progress(scene: Scene):
    """Another attempt, the end of a prefill, one token: each begins the time anew."""
    now = 0.0
    for step in (routed, prefilled, routed, token, token):
        now += 0.9 * GRACE_S
        step(scene.story)
        assert scene.progress.look(now) == []
        assert scene.progress.oldest_s(now) == 0.0


def test_the_time_of_a_client_that_reads_slowly_does_not_count(scene: Scene):
    """What it has not taken yet is bounded where it is written, not here."""
    for step in (routed, prefilled, token):
        step(scene.story)
    scene.open.waiting = False
    assert scene.progress.look(1e6) == []
    assert scene.progress.oldest_s(2e6) == 0.0
    scene.open.waiting = True
    assert scene.progress.look(1e6 + ATTEMPT_S) == []
    assert scene.progress.look(1e6 + ATTEMPT_S + GRACE_S + 1)


def test_one_that_does_not_end_is_told_again(scene: Scene):
    """Once for each time that it was given."""
    assert [len(scene.progress.look(at * GRACE_S / 2 + 0.1)) for at in range(1, 8)] == [0, 1, 0, 1, 0, 1, 0]
    scene.progress.closed(scene.open)
    assert scene.progress.look(1e6) == []
    assert len(scene.progress) == 0


def test_an_attempt_may_take_all_of_its_deadlines():
    """The net never ends what the flow still waits for by its own rules, whatever the prompt's length."""
    params = ServeParams(
        reserve_timeout_s=1.0,
        prefill_timeout_s=20.0,
        prefill_timeout_s_per_token=0.01,
        first_token_timeout_s=300.0,
        token_gap_timeout_s=4000.0,
        migration_timeout_s=50_000.0,
    )
    request = Request(id=RequestId("r"), model="m", prompt=bytes(4 * 1000), sampling=Sampling(max_tokens=100))
    assert attempt_s(request, params) == pytest.approx(1 + 20 + 11 + 300 + 4000 + 50_000)


@given(st.lists(st.tuples(st.sampled_from(["token", "look", "hand over", "resume"]), st.floats(0.1, 30)), max_size=60))
def test_no_request_is_silent_for_longer_than_its_bound_without_being_told(events):
    """In whatever order things happen: at each look that finds it waiting since the bound, it is told of."""
    progress, story = Progress(GRACE_S), Story()
    one, now, since, told = progress.opened(RequestId("r"), story, 0.0, 0.0), 0.0, 0.0, 0
    for what, pause_s in events:
        now += pause_s
        match what:
            case "token":
                story.output_tokens += 1
                routed(story)
                progress.look(now)
                since, told = now, 0
            case "hand over":
                one.waiting = False
                progress.look(now)
                since, told = now, 0
            case "resume":
                if not one.waiting:
                    progress.look(now)
                    since, told = now, 0
                one.waiting = True
            case "look":
                found = progress.look(now)
                if not one.waiting:
                    since, told = now, 0
                due = one.waiting and now - since > GRACE_S * (told + 1)
                assert bool(found) == due
                told += due
        progress.check()
