"""What a router steers by: own work over the view, demand, hardware as it turns out, and the memory of decisions."""

from dataclasses import replace

import pytest

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Story
from prfaas.live.decisions import Decisions
from prfaas.live.demand_report import record_of, snapshot_of
from prfaas.live.pace import FIT_EVERY, MICROSECONDS, SEQUENCES, STEPS, Pace
from prfaas.live.situation import Situation
from prfaas.live.steering import Steering
from prfaas.membership.plans import RouterRecord
from prfaas.profile import CASE_STUDY, shipped
from prfaas.request import NO_MATCHES, AttemptId, Mode, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.demand import DemandParams, DemandSnapshot
from prfaas.scheduling.routing import RoutingParams, choose
from prfaas.scheduling.threshold import ThresholdDecision, ThresholdReason

PD = RegionId("pd")
H200 = shipped(CASE_STUDY, "h200")
ROUTING = RoutingParams(threshold_tokens=1000, profiles={"h200": H200})


def node(name: str, role: Role = Role.PREFILL, incarnation: int = 1) -> Node:
    far = role is Role.PREFILL
    return Node(
        id=NodeId(name),
        region=RegionId("far") if far else PD,
        kind=NodeKind.PREFILL_WORKER if far else NodeKind.PD,
        role=role,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        max_context_tokens=200_000,
        hardware="h200",
    )


P0, D0 = node("p0"), node("d0", Role.MIXED)
VIEW = ClusterView(nodes={P0.id: P0, D0.id: D0}, remote_prefill=(P0.id,), local_prefill=(D0.id,), decode=(D0.id,))


def request(tokens: int, name: str = "r") -> Request:
    return Request(id=RequestId(name), model="m", prompt=bytes(4 * tokens), sampling=Sampling(max_tokens=10))


def remotely(asked: Request, prefill_tokens: int) -> Route:
    return Route(
        prefill=P0.id,
        decode=D0.id,
        path=Path.REMOTE,
        reason=Reason.LONG_PROMPT,
        uncached_tokens=prefill_tokens,
        transfer_tokens=asked.handoff_tokens,
        threshold_tokens=1000,
        prefill_tokens=prefill_tokens,
    )


def load(view: ClusterView, one: Node) -> NodeLoad:
    """As far as it is known."""
    return view.loads.get(one.id, one.load)


def report(tokens: int, seconds: float) -> PrefillReport:
    return PrefillReport(queue_s=0.0, compute_s=seconds, exposed_s=0.0, prefill_tokens=tokens, kv_bytes=0)


def test_own_work_counts_until_it_is_over():
    """Charged when room is taken, moved on after prefill, and gone with the release."""
    steering, one = Steering(PD, ROUTING, 0.0, DemandParams()), AttemptId("a")
    steering.reserved(one, request(5000), remotely(request(5000), 5000), P0, 1.0)
    charged = steering.overlay.view(VIEW, 1.0)
    assert load(charged, P0).queued_prefill_tokens == 4999
    assert load(charged, D0).committed_tokens == 5010
    steering.prefilled(one, request(5000), P0, report(4999, 0.6), 2.0)
    handed = steering.overlay.view(VIEW, 2.0)
    assert (load(handed, P0).queued_prefill_tokens, load(handed, D0).decoding) == (0, 1)
    steering.released(one, 3.0)
    steering.released(one, 3.0)
    assert load(steering.overlay.view(VIEW, 3.0), D0).committed_tokens == 0


def test_only_what_has_to_be_computed_waits_in_front_of_others():
    """A cached prefix takes no time; charged in full it would keep requests away from the node that has it."""
    steering, cached = Steering(PD, ROUTING, 0.0, DemandParams()), 4096
    steering.reserved(AttemptId("a"), request(5000), remotely(request(5000), 5000 - cached), P0, 1.0)
    charged = steering.overlay.view(VIEW, 1.0)
    assert load(charged, P0).queued_prefill_tokens == 5000 - cached
    assert load(charged, D0).committed_tokens == 5010
    steering.released(AttemptId("a"), 2.0)
    assert load(steering.overlay.view(VIEW, 2.0), P0).queued_prefill_tokens == 0


def test_routed_requests_are_the_demand():
    """By what was left to compute."""
    steering = Steering(PD, ROUTING, 0.0, DemandParams())
    route = choose(request(5000), NO_MATCHES, VIEW, steering.routing)
    steering.routed(request(5000), route, 10.0)
    steering.finished(12, 11.0)
    seen = steering.demand.snapshot(11.0)
    assert seen.counts.total == pytest.approx(1, abs=0.01) and seen.output_tokens == pytest.approx(12)


def test_a_decision_of_the_fast_loop_is_what_is_routed_by():
    """Threshold, mode, and how much room there is."""
    steering = Steering(PD, ROUTING, 0.0, DemandParams())
    decision = ThresholdDecision(
        threshold_tokens=7, mode=Mode.ALWAYS, reason=ThresholdReason.PINNED, plan_threshold_tokens=1000
    )
    steering.apply(decision, {}, abundant=True, now=1.0)
    routing = steering.routing
    assert (routing.threshold_tokens, routing.mode, routing.abundant) == (7, Mode.ALWAYS, True)
    assert steering.situation.decision is decision


def test_a_profile_follows_what_its_nodes_report():
    """Prefills that take twice as long make the profile twice as slow, in the end."""
    pace = Pace({"h200": H200})
    pace.seen(VIEW)
    for number in range(6 * FIT_EVERY):
        tokens = 2000 + 900 * (number % 60)
        pace.prefilled(P0, request(tokens + 1), report(tokens, 2 * H200.prefill_s(tokens)))
    assert pace.profiles["h200"].prefill_s(20_000) == pytest.approx(2 * H200.prefill_s(20_000), rel=0.1)


def test_field_K4_a_node_that_has_just_changed_is_not_learned_from():
    """Nor are mixed nodes, whose prefills have decode steps in them, and hardware that nobody has a profile of."""
    pace = Pace({"h200": H200})
    for number in range(6 * FIT_EVERY):
        again = node("p0", incarnation=number)
        pace.seen(ClusterView(nodes={again.id: again}))
        pace.prefilled(again, request(20_001), report(20_000, 99.0))
        pace.prefilled(D0, request(20_001), report(20_000, 99.0))
    assert pace.profiles["h200"] is H200


def test_a_decode_profile_follows_what_its_nodes_count():
    """Steps that take twice as long, in batches that differ from report to report, on a node that prefills as well. A
    restart, from which counters begin anew, is no step backwards."""
    h20 = shipped(CASE_STUDY, "h20")
    assert h20.decode is not None
    pace, life, counted = Pace({"h20": h20}), 1, (0, 0, 0)
    for number in range(6 * FIT_EVERY):
        if number == 3 * FIT_EVERY:
            life, counted = 2, (0, 0, 0)
        each = replace(node("d0", Role.MIXED, life), hardware="h20")
        pace.seen(ClusterView(nodes={each.id: each}))
        batch = 1 + number % 20
        new = (40, 40 * batch, round(40 * 2e6 * h20.decode.step_s(batch)))
        counted = tuple(map(sum, zip(counted, new, strict=True)))
        pace.decoded(each, dict(zip((STEPS, SEQUENCES, MICROSECONDS), counted, strict=True)))
    found = pace.profiles["h20"]
    assert found.decode is not None and found.prefill is h20.prefill
    for batch in (1, 10, 20):
        assert found.decode.step_s(batch) == pytest.approx(2 * h20.decode.step_s(batch), rel=0.05)


def test_a_node_that_counts_no_steps_teaches_nothing():
    """Idle, or of a version that does not count them."""
    h20 = shipped(CASE_STUDY, "h20")
    pace, each = Pace({"h20": h20}), replace(D0, hardware="h20")
    pace.seen(ClusterView(nodes={each.id: each}))
    for number in range(6 * FIT_EVERY):
        pace.decoded(each, {} if number % 2 else {STEPS: 5, SEQUENCES: 5, MICROSECONDS: 0})
    assert pace.profiles["h20"] is h20


def test_what_a_router_reports_is_what_it_saw():
    """Through the record, without the buckets that are empty."""
    steering = Steering(PD, ROUTING, 0.0, DemandParams())
    for tokens in (10, 5000, 5000, 90_000):
        steering.routed(request(tokens), choose(request(tokens), NO_MATCHES, VIEW, ROUTING), 1.0)
    seen = steering.demand.snapshot(2.0)
    record = record_of("r0", seen, seq=1)
    assert len(record.lengths) == 3
    told = snapshot_of(record)
    assert told.counts.counts == pytest.approx(seen.counts.counts, abs=1e-3)
    assert told.arrivals_per_s == pytest.approx(seen.arrivals_per_s, abs=1e-5)
    assert DemandSnapshot.merged([told, told]).counts.total == pytest.approx(8, rel=0.01)


def test_buckets_of_another_version_are_left_out():
    """A record never makes the leader fail."""
    assert snapshot_of(RouterRecord(router="r", lengths=((-1, 5.0), (10**6, 5.0)))).counts.total == 0


def test_decisions_are_found_by_any_name_and_forgotten_in_order():
    """The request's own id, the one its client gave, and that of the answer."""
    decisions = Decisions(limit=3)
    for number in range(5):
        one = request(10, f"{number:032x}")
        decisions.begun(one, Story())
        decisions.routed(one, Situation())
        decisions.ended(one.id, f"mine-{number}", {"status": 200})
    assert len(decisions) == 3
    assert decisions.find("mine-0") is None and decisions.find(f"{1:032x}") is None
    for name in ("mine-4", f"{4:032x}", f"chatcmpl-{4:032x}"):
        found = decisions.find(name)
        assert found is not None and found.request_id == f"{4:032x}" and found.outcome == {"status": 200}


def test_what_was_never_begun_is_not_remembered():
    """Requests that were refused before they had a route leave nothing."""
    decisions = Decisions()
    decisions.routed(request(1, "x"), Situation())
    decisions.ended(RequestId("x"), "y", {})
    assert decisions.find("y") is None and len(decisions) == 0
