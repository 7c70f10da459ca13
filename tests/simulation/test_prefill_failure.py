"""Prefill elsewhere that is slow, stuck or cut off: who does not depend on it does not notice, and it heals alone."""

import numpy as np
import pytest

from prfaas.cluster import NodeId, NodeKind
from prfaas.request import Path
from prfaas.scheduling.blame import Guard
from prfaas.scheduling.breaker import BreakerParams
from prfaas.sim.fault_plan import Chances, Fault, LinkStep, NodeDeath, SlowPrefill
from prfaas.sim.policies import Policy
from prfaas.sim.result import result_of
from prfaas.sim.scenario import FleetSpec, LinkSpec, Scenario, ServeSpec
from prfaas.sim.workload import Arrivals, Fixed, LogNormal, Workload
from prfaas.sim.world import World

LINK = LinkSpec(source="a", target="b", gbps=100.0, rtt_s=0.02)
FAR = FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=4)
NEAR = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=4, shares=(1.0,))
PLAIN = ServeSpec(prefill_timeout_s=60.0, prefill_timeout_s_per_token=0.002, first_token_timeout_s=60.0)
GUARDED = ServeSpec(prefill_timeout_s=60.0, prefill_timeout_s_per_token=0.002, breakers=True)
HEDGED = ServeSpec(prefill_timeout_s=60.0, prefill_timeout_s_per_token=0.002, hedge=True)
BEGINS_S = 100.0


def played(serve: ServeSpec, *faults: Fault, **changes: object) -> World:
    streams = Workload(arrivals=Arrivals(rate_per_s=0.8), prompts=LogNormal(), outputs=Fixed(tokens=200))
    base = Scenario(
        name="test",
        fleets=(FAR, NEAR),
        links=(LINK,),
        workload=streams,
        policy=Policy(threshold_tokens=19_000),
        serve=serve,
        faults=faults,
        duration_s=600.0,
        warm_up_s=60.0,
    )
    world = World(base.but(**changes))
    world.play()
    world.kernel.run_until(world.kernel.now() + 15.0)
    world.check()
    world.cluster.check_idle()
    assert world.in_system == 0
    return world


def slowest(world: World) -> tuple[float, float]:
    """The 99th percentile and the longest of all times to the first token since the fault."""
    rows = result_of(world).requests
    seconds = rows["ttft_s"][rows["arrived_s"] > BEGINS_S]
    assert len(seconds) > 300 and not np.isnan(seconds).any(), "all are served"
    return float(np.percentile(seconds, 99)), float(seconds.max())


@pytest.mark.parametrize("factor", [10.0, 1e6], ids=["ten times as slow", "black hole"])
def test_field_C20_one_bad_source_and_the_others_do_not_notice(factor):
    """The slowest of all requests take hardly longer than in the run where nothing is wrong; without breakers they take
    the bad node's time, or that of the longest timeout."""
    bad = SlowPrefill(at_s=BEGINS_S, node="far-0", factor=factor)
    well_p99, well_most = slowest(played(GUARDED))
    guarded = played(GUARDED, bad)
    p99, most = slowest(guarded)
    assert p99 <= 1.25 * well_p99 and most <= 1.5 * well_most
    assert slowest(played(PLAIN, bad))[1] > 3 * well_most
    breakers = guarded.routers[0].breakers
    assert breakers is not None
    opened = {guard for guard, _ in breakers.opened}
    assert Guard.SOURCE in opened and Guard.LINK not in opened
    broken = [(guard, source) for guard, source, *_ in breakers.states(guarded.kernel.now())]
    assert {source for _, source in broken} == {"far-0"}, "its own breakers only"


def waiting_for_a_black_hole(serve: ServeSpec) -> int:
    """The most prefills that were at a source at once which had stopped answering twenty seconds before, or earlier."""
    streams = Workload(arrivals=Arrivals(rate_per_s=3.0), prompts=Fixed(tokens=4000), outputs=Fixed(tokens=50))
    far = FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=2)
    near = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=8, shares=(1.0,) * 3)
    world = World(
        Scenario(
            name="test",
            fleets=(far, near),
            links=(LINK,),
            workload=streams,
            policy=Policy(threshold_tokens=2000),
            serve=serve,
            faults=(SlowPrefill(at_s=BEGINS_S, node="far-0", factor=1e6),),
            duration_s=200.0,
            warm_up_s=60.0,
        )
    )
    there: list[int] = []
    for second in range(int(BEGINS_S) + 20, 200):
        world.kernel.call_later(
            float(second), lambda: there.append(world.cluster.workers[NodeId("far-0")].engine.prefills)
        )
    world.play()
    world.check()
    assert len(there) == 80
    return max(there)


def test_field_C20_decode_nodes_do_not_fill_up_with_what_waits_for_a_bad_source():
    """Each of them is a reservation on a decode node that holds memory and does nothing."""
    assert waiting_for_a_black_hole(GUARDED) <= BreakerParams().least_in_flight
    assert waiting_for_a_black_hole(PLAIN) > 20 * BreakerParams().least_in_flight


def test_field_C20_a_node_that_is_well_again_is_used_again():
    """A probe finds out."""
    bad = SlowPrefill(at_s=BEGINS_S, node="far-0", factor=10.0)
    well = SlowPrefill(at_s=250.0, node="far-0", factor=1.0)
    world = played(GUARDED, bad, well)
    late = [seen for seen in world.records.requests if seen.arrival.at_s > 400.0]
    used = [seen.story.attempts[-1].route.prefill for seen in late]
    assert used.count("far-0") > 0.15 * sum(name.startswith("far") for name in used)
    breakers = world.routers[0].breakers
    assert breakers is not None and not list(breakers.states(world.kernel.now()))


def test_a_link_that_is_cut_opens_its_breaker_and_closes_it_by_itself():
    """Neither loop runs, so that it is the breaker alone that keeps traffic here: from a few seconds after the cut
    nothing is sent away but probes, and soon after the end of it everything is again."""
    cut_s, healed_s = 100.0, 160.0
    cut = LinkStep(at_s=cut_s, source="a", target="b", gbps=0.0)
    healed = LinkStep(at_s=healed_s, source="a", target="b", gbps=100.0)
    near = FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=8, shares=(1.0,) * 5)
    streams = Workload(arrivals=Arrivals(rate_per_s=3.0), prompts=Fixed(tokens=4000), outputs=Fixed(tokens=50))
    world = played(
        GUARDED,
        cut,
        healed,
        fleets=(FAR, near),
        workload=streams,
        policy=Policy(threshold_tokens=2000),
        duration_s=400.0,
    )
    breakers = world.routers[0].breakers
    assert breakers is not None
    assert sum(count for (guard, _), count in breakers.opened.items() if guard is Guard.LINK) >= 1
    assert breakers.probes[Guard.LINK, "closed"] == 1

    def sent_away(since_s: float, until_s: float) -> float:
        """Of the requests of that time."""
        those = [seen.story for seen in world.records.requests if since_s < seen.arrival.at_s < until_s]
        assert len(those) > 30
        return sum(story.attempts[0].route.path is Path.REMOTE for story in those) / len(those)

    assert sent_away(20.0, cut_s) > 0.99
    assert sent_away(cut_s + 6.0, healed_s) < 0.05
    assert sent_away(healed_s + 70.0, 400.0) > 0.95
    assert all(seen.error is None for seen in world.records.requests)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_nothing_is_left_and_breakers_stay_sound(seed):
    """Deaths, slowness, broken transfers and lost messages together, with breakers, hedges and an objective: every
    request ends, nearly all of them well, and nobody keeps anything."""
    everything = ServeSpec(
        prefill_timeout_s=60.0,
        prefill_timeout_s_per_token=0.002,
        first_token_timeout_s=60.0,
        token_gap_timeout_s=20.0,
        breakers=True,
        hedge=True,
        within_objective=True,
    )
    world = played(
        everything,
        Chances(at_s=30.0, refuse=0.03, lose=0.005, transfer=0.05, engine=0.03),
        SlowPrefill(at_s=60.0, node="far-1", factor=20.0),
        NodeDeath(at_s=90.0, node="far-2", down_s=20.0),
        NodeDeath(at_s=110.0, node="pd-2", down_s=20.0),
        SlowPrefill(at_s=160.0, node="far-1", factor=1.0),
        policy=Policy(threshold_tokens=19_000, ttft_slo_s=20.0),
        routers=2,
        seed=seed,
        duration_s=300.0,
        warm_up_s=10.0,
    )
    assert any(router.breakers is not None and router.breakers.opened for router in world.routers)
    failed = sum(seen.error is not None for seen in world.records.requests)
    assert failed <= 0.05 * len(world.records.requests)


def test_a_hedge_takes_the_place_of_what_is_stuck_and_cannot_bury_the_cluster():
    """Most of those that are begun are first. How many there are is bounded by their share."""
    bad = SlowPrefill(at_s=BEGINS_S, node="far-0", factor=10.0)
    hedged = played(HEDGED, bad)
    hedging = hedged.routers[0].hedging
    assert hedging is not None
    assert 0.05 * hedging.prefills + 2 >= hedging.started >= hedging.won > 0.5 * hedging.started > 2
    assert slowest(hedged)[1] < slowest(played(PLAIN, bad))[1]
