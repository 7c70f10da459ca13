"""Whole scenarios: the product's code in virtual time agrees with queueing theory, survives what is done to it, and
does the same again for the same seed.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prfaas.cluster import NodeKind
from prfaas.flows.convert_role import OnDrainTimeout, Phase
from prfaas.profile import CASE_STUDY, shipped
from prfaas.request import Mode
from prfaas.sim.fault_plan import Chances, LinkStep, NodeDeath, StoreOutage
from prfaas.sim.policies import Policy, Rule
from prfaas.sim.result import result_of
from prfaas.sim.run import run
from prfaas.sim.scenario import ControlSpec, FleetSpec, LinkSpec, Scenario, ServeSpec
from prfaas.sim.workload import Arrivals, Fixed, LogNormal, Workload
from prfaas.sim.world import World

H20, H200 = shipped(CASE_STUDY, "h20"), shipped(CASE_STUDY, "h200")
RTT_S = 0.02
LINK = LinkSpec(source="a", target="b", gbps=100.0, rtt_s=RTT_S)
FAR = FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=2)
NEAR = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=4, shares=(1.0, 1.0))
BOTH_LOOPS = ControlSpec(fast=True, slow=True, slow_period_s=60.0)


def scenario(rate_per_s: float = 1.0, **changes: object) -> Scenario:
    tokens = changes.pop("tokens", None)
    prompts = LogNormal() if tokens is None else Fixed(tokens=tokens)
    base = Scenario(
        name="test",
        fleets=(FAR, NEAR),
        links=(LINK,),
        workload=Workload(arrivals=Arrivals(rate_per_s=rate_per_s), prompts=prompts, outputs=Fixed(tokens=200)),
        policy=Policy(threshold_tokens=19_000),
        duration_s=600.0,
        warm_up_s=60.0,
    )
    return base.but(**changes)


def one_queue(rate_per_s: float, tokens: int, **changes: object) -> Scenario:
    """One prefill worker far away, everything through it."""
    far = FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=1)
    near = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=4)
    changes = {"fleets": (far, near), "policy": Policy(mode=Mode.ALWAYS), **changes}
    return scenario(rate_per_s, tokens=tokens, **changes)


def test_one_instance_is_an_m_d_1_queue():
    """Poisson arrivals of equal prompts at one prefill worker wait as Pollaczek and Khinchine say,
    rho T / (2 (1 - rho)), here at rho = 0.7."""
    service_s = H200.prefill_s(9_999)
    result = run(one_queue(0.7 / service_s, 10_000, duration_s=7_000.0, warm_up_s=500.0, report_s=5.0))
    waits = result.requests["prefill_queue_s"]
    assert waits.mean() == pytest.approx(0.7 * service_s / (2 * 0.3), rel=0.12)
    assert np.all(result.requests["prefill_s"] == pytest.approx(service_s))


def test_the_time_to_the_first_token_is_the_sum_of_what_it_is_made_of():
    """Nothing is left over; an idle cluster takes prefill, the state's time on the line, the hops and a step."""
    result = run(one_queue(0.01, 30_000, duration_s=3000.0))
    rows = result.requests
    terms = ("queue_s", "network_s", "prefill_queue_s", "prefill_s", "exposed_s", "decode_queue_s", "first_step_s")
    assert sum(rows[term] for term in terms) == pytest.approx(rows["ttft_s"])
    state_s = H200.kv_bytes(0) / 12.5e9
    alone = rows[rows["prefill_queue_s"] == 0][0]
    assert alone["exposed_s"] == pytest.approx(state_s + RTT_S, abs=1e-6)
    assert alone["first_step_s"] == pytest.approx(H20.decode.step_s(1))
    assert alone["kv_bytes"] == pytest.approx(H200.kv_bytes(29_999), rel=1e-6)


def test_how_finely_tokens_are_handed_out_changes_nothing_but_the_cost():
    """So studies may hand out a whole output at once."""
    fine, coarse = (run(scenario(2.0, token_batch=batch, duration_s=300.0)).requests for batch in (16, 1 << 20))
    for column in ("ttft_s", "finished_s", "predicted_s", "output_tokens", "remote"):
        assert fine[column].astype(float) == pytest.approx(coarse[column].astype(float), rel=1e-9)


def test_a_narrow_line_is_shared_and_shows():
    """At 1 Gbps and five sixths of what that carries all is served, the line is busy as long as that takes, and what a
    prefill cannot hide of its transfer is seen by its request."""
    narrow = LinkSpec(source="a", target="b", gbps=1.0, rtt_s=RTT_S)
    kv_bytes = H200.kv_bytes(29_999)
    rate = 1.25e8 / kv_bytes * 5 / 6
    result = run(one_queue(rate, 30_000, links=(narrow,), duration_s=3600.0))
    summary = result.summary
    assert summary["completed"] == summary["offered"]
    assert summary["egress_gbps"] == pytest.approx(summary["offered_per_s"] * kv_bytes * 8e-9, rel=0.03)
    alone_s = kv_bytes / 1.25e8 - H200.prefill_s(29_999)
    assert result.requests["exposed_s"].min() == pytest.approx(alone_s + RTT_S, rel=0.01)
    assert summary["terms_mean_s"]["exposed"] > 2 * alone_s


def test_a_mixed_node_divides_its_time():
    """Half a node prefills half as fast, and its steps take twice as long meanwhile."""
    mixed = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=1, shares=(0.5,))
    streams = Workload(arrivals=Arrivals(rate_per_s=0.25), prompts=Fixed(tokens=10_000), outputs=Fixed(tokens=2000))
    never = Policy(mode=Mode.NEVER)
    result = run(scenario(workload=streams, fleets=(mixed,), links=(), policy=never, step_limit_s=None))
    rows = result.requests
    alone_s = H20.prefill_s(9_999)
    assert rows["prefill_s"].min() >= alone_s * 0.999
    assert rows["prefill_s"].max() == pytest.approx(2 * alone_s, rel=0.01)


def test_round_robin_takes_turns():
    """All prefill nodes, all decode nodes, whatever the prompt."""
    world = World(scenario(policy=Policy(rule=Rule.ROUND_ROBIN)))
    world.play()
    prefills = [seen.story.route.prefill for seen in world.records.requests if seen.story.route]
    assert {name: prefills.count(name) for name in set(prefills)}.keys() == {"far-0", "far-1", "pd-0", "pd-1"}
    assert prefills[:8] == prefills[4:12]


def test_the_rule_sends_long_prompts_away():
    """By the threshold, exactly, where nobody spills over."""
    rows = run(scenario()).requests
    assert np.all(rows["remote"] == (rows["uncached_tokens"] > 19_000))
    assert 0.3 < rows["remote"].mean() < 0.7


def test_a_wrong_decision_is_seen(monkeypatch):
    """The simulator runs the product's `choose`: broken, the figures show it."""
    from prfaas.scheduling.rule import RoutingParams

    sound = run(scenario(1.4)).summary
    monkeypatch.setattr(RoutingParams, "is_short", lambda self, tokens: tokens > 19_000)
    broken = run(scenario(1.4)).summary
    assert broken["ttft"]["mean"] > 2 * sound["ttft"]["mean"]


def test_cached_prefixes_are_skipped():
    """A trace of conversations, with caches: a good part of the prompts' tokens is never computed again."""
    from prfaas.sim.trace_files import TraceFormat
    from prfaas.sim.workload import Trace

    traces = Path(__file__).parents[2] / "bench" / "traces"
    trace = Trace(path="mooncake_conversation.jsonl", format=TraceFormat.MOONCAKE, jitter_s=3.0, rate_scale=0.3)
    fleets = tuple(type(fleet)(**{**_fields(fleet), "cache_gib": 1500.0}) for fleet in (FAR, NEAR))
    cached = run(scenario(workload=Workload(trace=trace), folder=str(traces), fleets=fleets))
    cold = run(scenario(workload=Workload(trace=trace), folder=str(traces)))
    assert cold.summary["prefill_skip_rate"] == 0
    assert cached.summary["prefill_skip_rate"] > 0.05
    assert cached.summary["ttft"]["mean"] < cold.summary["ttft"]["mean"]
    assert len(cached.requests) == len(cold.requests) > 400


FAULTS = {
    "node deaths": (NodeDeath(at_s=100.0, node="far-0", down_s=60.0), NodeDeath(at_s=200.0, node="pd-3", down_s=30.0)),
    "a node gone for good": (NodeDeath(at_s=100.0, node="pd-0"),),
    "link cut and back": (
        LinkStep(at_s=100.0, source="a", target="b", gbps=0.0),
        LinkStep(at_s=200.0, source="a", target="b", gbps=100.0),
    ),
    "link step": (
        LinkStep(at_s=100.0, source="a", target="b", gbps=3.0),
        LinkStep(at_s=300.0, source="a", target="b", gbps=100.0),
    ),
    "store outage": (StoreOutage(at_s=100.0, for_s=60.0),),
    "store comes back empty": (StoreOutage(at_s=100.0, for_s=5.0, empty=True),),
    "a little of everything": (Chances(at_s=60.0, refuse=0.02, transfer=0.02, engine=0.02),),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_requests_survive_what_goes_wrong(faults):
    """With both loops running: every request ends, nearly all with their answer, and nobody keeps anything. What is
    refused was lost with a node in mid-stream or has used up its attempts."""
    serve = ServeSpec(prefill_timeout_s=120.0, first_token_timeout_s=60.0, token_gap_timeout_s=30.0)
    world = World(scenario(0.6, faults=faults, control=BOTH_LOOPS, serve=serve))
    world.play()
    world.kernel.run_until(world.kernel.now() + 15.0)
    world.check()
    world.cluster.check_idle()
    result = result_of(world)
    assert world.in_system == 0
    assert result.summary["completed"] + result.summary["failed"] == result.summary["offered"]
    assert result.summary["failed"] <= 0.03 * result.summary["offered"]


def test_a_cut_line_keeps_traffic_local_and_then_it_returns():
    """The fast loop notices within a few reports, and notices the end of it as well."""
    cut = (
        LinkStep(at_s=200.0, source="a", target="b", gbps=0.0),
        LinkStep(at_s=400.0, source="a", target="b", gbps=100.0),
    )
    result = run(scenario(0.4, faults=cut, control=ControlSpec(fast=True)))
    rows = result.requests
    during = rows[(rows["arrived_s"] > 215) & (rows["arrived_s"] < 395)]
    after = rows[rows["arrived_s"] > 440]
    assert len(during) > 40 and not during["remote"].any()
    assert after["remote"].mean() > 0.3


def test_a_demand_that_grows_turns_a_node():
    """Long prompts on a cluster made for short ones: the slow loop converts, and no request is lost."""
    lean = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=4, shares=(1.0,))
    # Reservations of prompts that wait for prefill keep a decode node from draining, so it has to go on without.
    loops = ControlSpec(
        fast=True, slow=True, slow_period_s=60.0, drain_timeout_s=30.0, on_drain_timeout=OnDrainTimeout.PROCEED
    )
    never = Policy(mode=Mode.NEVER)
    world = World(scenario(0.55, fleets=(lean,), links=(), policy=never, control=loops, duration_s=1200.0))
    world.play()
    summary = result_of(world).summary
    assert world.flips >= 1
    assert summary["failed"] == 0 and summary["completed"] == summary["offered"]
    assert {world.reporters[name].record.phase for name in world.cluster.workers} == {Phase.SERVING.value}


def test_two_routers_do_not_both_pick_the_idle_node():
    """Each knows its own work at once and that of the other by reports; nothing is lost between them."""
    summary = run(scenario(1.0, routers=2)).summary
    assert summary["failed"] == 0 and summary["completed"] == summary["offered"]


def test_one_seed_is_one_run_whatever_the_hash_seed():
    """Same seed, same trace of events, on any machine; another seed is another run."""
    root = Path(__file__).parents[2]
    script = """
import runpy
made = runpy.run_path("tests/simulation/test_world.py")
faults = made["FAULTS"]["node deaths"] + made["FAULTS"]["link step"]
runs = [made["scenario"](1.0, control=made["BOTH_LOOPS"], faults=faults, seed=seed) for seed in (1, 2)]
print([made["run"](each).trace for each in runs])
"""
    traces = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    first, second = next(iter(traces)).strip("[]\n").split(", ")
    assert first != second


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
