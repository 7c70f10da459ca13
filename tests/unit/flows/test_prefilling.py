"""How long a prefill elsewhere is waited for, and what is done meanwhile."""

from dataclasses import replace

import pytest

from prfaas.cluster import NodeId, Role
from prfaas.errors import EngineFailed, Overloaded, PrefillOverdue, PrfaasError
from prfaas.flows.failures import OnPrefillFailure
from prfaas.flows.prefilling import refusal, spare
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Ending, Story
from prfaas.request import (
    NO_MATCHES,
    Alternative,
    AttemptId,
    Path,
    Predicted,
    Reason,
    Request,
    RequestId,
    Route,
    Sampling,
)
from prfaas.scheduling.hedging import HedgeParams, Hedging
from prfaas.scheduling.routing import RoutingParams, choose, fallback
from prfaas.scheduling.shunning import Shunned, shunning
from prfaas.scheduling.shut import Shut
from prfaas.sim.cluster import Fault, Lost, SimCluster
from prfaas.sim.instance import Costs
from prfaas.sim.kernel import Kernel
from prfaas.sim.serve_ports import SimServePorts
from prfaas.sim.task import Cancelled
from tests.right_answers import expected_output
from tests.unit.flows.test_serve import far, node

COSTS = Costs()
PROFILE = COSTS.instance().profile
PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=30.0,
    prefill_timeout_s_per_token=0.0,
    first_token_timeout_s=5.0,
    token_gap_timeout_s=2.0,
    within_objective=True,
)
ROUTING = RoutingParams(threshold_tokens=100, profiles={"small": PROFILE})


def asked(tokens: int = 500) -> Request:
    return Request(id=RequestId("r"), model="m", prompt=bytes(4 * tokens), sampling=Sampling(max_tokens=3))


class Ports(SimServePorts):
    def __init__(self, cluster: SimCluster, routing: RoutingParams, hedging: Hedging | None) -> None:
        super().__init__(cluster, routing)
        self._hedges = hedging
        self.lost: list[tuple[AttemptId, PrfaasError]] = []
        self._released: set[AttemptId] = set()

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        self._released.add(attempt)
        super().release(node, attempt)

    def hedging(self) -> Hedging | None:
        return self._hedges

    def prefill_lost(self, attempt: AttemptId, error: PrfaasError) -> None:
        assert attempt not in self._released, "breakers have forgotten it"
        self.lost.append((attempt, error))


class World:
    def __init__(
        self,
        *prefills: Fault,
        routing: RoutingParams = ROUTING,
        hedging: Hedging | None = None,
        params: ServeParams = PARAMS,
        decodes: int = 1,
    ) -> None:
        self.kernel = Kernel(seed=0)
        pd = (node(f"d{number}", Role.DECODE) for number in range(decodes))
        nodes = [replace(each, hardware="small") for each in (far("p0"), *pd)]
        self.cluster = SimCluster(self.kernel, nodes, COSTS)
        self.cluster.plan("prefill", *prefills)
        self.ports = Ports(self.cluster, routing, hedging)
        self.params, self.story, self.received = params, Story(), b""

    async def client(self) -> None:
        stream = serve(asked(), NO_MATCHES, self.params, self.ports, self.story)
        try:
            async for batch in stream:
                self.received += batch.tokens
        finally:
            await stream.aclose()

    def complete(self) -> None:
        self.kernel.run(self.client())
        assert self.received == expected_output(asked())
        self.nothing_left()

    def nothing_left(self) -> None:
        self.kernel.run_until(self.kernel.now() + 1.0)
        self.cluster.check_idle()

    @property
    def attempts(self) -> list[tuple[str, Reason, Ending]]:
        return [(each.route.prefill, each.route.reason, each.ending) for each in self.story.attempts]


LOCAL_S = 499 * COSTS.prefill_s_per_token + COSTS.step_s


def test_a_prefill_elsewhere_gets_the_time_that_leaves_one_here_to_keep_the_objective():
    """It is given up then, and the decode node keeps the objective by itself: no other source is tried first."""
    objective_s = 2.0
    world = World(Lost.COMMAND, routing=replace(ROUTING, ttft_slo_s=objective_s))
    world.complete()
    assert world.attempts == [
        ("p0", Reason.LONG_PROMPT, Ending.PREFILL_LOST),
        ("d0", Reason.FALLBACK, Ending.DONE),
    ]
    assert world.story.first_s is not None
    assert objective_s - 0.1 < world.story.first_s <= objective_s + 0.05
    [(_, error)] = world.ports.lost
    assert str(error).startswith("prefill did not finish within 1.7")


def test_without_an_objective_it_gets_all_the_time_there_is():
    """The timeout is the only limit."""
    world = World(Lost.COMMAND)
    world.complete()
    assert world.story.first_s is not None and world.story.first_s > PARAMS.prefill_timeout_s


def test_an_objective_that_cannot_be_kept_is_no_reason_to_give_up():
    """Half a millisecond is kept by nobody: then the prefill elsewhere goes on."""
    world = World(routing=replace(ROUTING, ttft_slo_s=0.0005))
    world.complete()
    assert world.attempts == [("p0", Reason.LONG_PROMPT, Ending.DONE)]


def test_without_another_prefill_to_follow_an_objective_is_no_reason_to_give_up():
    """With on_prefill_failure = fail there would be nothing but an error."""
    fail = replace(PARAMS, on_prefill_failure=OnPrefillFailure.FAIL)
    world = World(routing=replace(ROUTING, ttft_slo_s=1.0), params=fail)
    world.kernel.call_later(0.0, lambda: setattr(world.cluster.workers[NodeId("p0")], "slowness", 10.0))
    world.complete()
    assert world.attempts == [("p0", Reason.LONG_PROMPT, Ending.DONE)]


def test_a_hedge_does_not_end_with_the_time_of_the_prefill_that_it_is_for():
    """The objective ends the one elsewhere; the one here, half way through, goes on."""
    world = World(Lost.COMMAND, routing=replace(ROUTING, ttft_slo_s=0.9), hedging=hedging(least_s=0.5))
    world.complete()
    assert world.attempts == [("p0", Reason.LONG_PROMPT, Ending.PREFILL_LOST), ("d0", Reason.HEDGE, Ending.DONE)]
    assert world.story.first_s is not None and world.story.first_s <= 0.9


@pytest.mark.parametrize(
    ("objective_s", "waited_s", "left_s"),
    [(10.0, 0.0, 7.0), (10.0, 5.0, 2.0), (10.0, 5.5, None), (None, 0.0, None)],
    ids=["time left", "just enough", "less than it takes", "no objective"],
)
def test_the_spare_time_is_what_the_decode_node_does_not_need(objective_s, waited_s, left_s):
    """3 s here, 2 s elsewhere."""
    own = Alternative(
        Path.LOCAL, NodeId("d0"), NodeId("d0"), 10, 0, 0, Predicted(prefill_s=2.5, first_decode_step_s=0.5)
    )
    route = Route(
        prefill=NodeId("p0"),
        decode=NodeId("d0"),
        path=Path.REMOTE,
        reason=Reason.LONG_PROMPT,
        uncached_tokens=10,
        transfer_tokens=10,
        threshold_tokens=1,
        alternatives=(own,),
        predicted=Predicted(prefill_queue_s=0.5, prefill_s=1.0, transfer_exposed_s=0.5, first_decode_step_s=0.5),
    )
    assert spare(route, objective_s, waited_s) == left_s


def hedging(least_s: float = 1.0, share: float = 1.0, burst: float = 2.0) -> Hedging:
    return Hedging(HedgeParams(factor=0.001, least_s=least_s, share=share, burst=burst))


def test_a_hedge_that_is_first_goes_on_and_the_other_is_released():
    """With a reservation of its own. The account of the first token still closes: what came before was a wait."""
    hedges = hedging()
    world = World(Lost.COMMAND, hedging=hedges)
    world.complete()
    assert world.attempts == [("p0", Reason.LONG_PROMPT, Ending.CANCELLED), ("d0", Reason.HEDGE, Ending.DONE)]
    assert (hedges.started, hedges.won) == (1, 1)
    assert world.story.first_s == pytest.approx(sum(world.story.terms.values()))
    assert world.story.terms["queue"] == pytest.approx(1.0, abs=0.02)
    assert world.story.first_s < 1.1 + LOCAL_S
    assert len(world.ports.lost) == 1, "the slow one counts against its source"


def test_a_hedge_that_comes_too_late_is_released():
    """The prefill elsewhere is first: the route of the request is its own."""
    hedges = hedging(least_s=0.3)
    world = World(hedging=hedges)
    world.complete()
    assert world.attempts[-1] == ("p0", Reason.LONG_PROMPT, Ending.DONE)
    assert [ending for *_, ending in world.attempts] == [Ending.CANCELLED, Ending.DONE]
    assert (hedges.started, hedges.won) == (1, 0)
    assert world.story.route is not None and world.story.route.path is Path.REMOTE


def test_a_prefill_that_fails_while_its_hedge_runs_is_forgotten():
    """The hedge goes on, and nobody tries a third time."""
    world = World(hedging=hedging(least_s=0.1))
    p0 = NodeId("p0")
    world.kernel.call_later(0.0, lambda: setattr(world.cluster.workers[p0], "slowness", 100.0))
    world.kernel.call_later(0.2, lambda: world.cluster.kill(p0))
    world.complete()
    assert world.attempts == [("p0", Reason.LONG_PROMPT, Ending.PREFILL_LOST), ("d0", Reason.HEDGE, Ending.DONE)]


def test_a_hedge_that_fails_harms_nobody():
    """The prefill elsewhere goes on as if there had been none."""
    hedges = hedging(least_s=0.1)
    world = World(hedging=hedges)
    world.kernel.call_later(0.0, lambda: setattr(world.cluster.workers[NodeId("p0")], "slowness", 10.0))
    world.kernel.call_later(0.05, lambda: world.cluster.plan("prefill", EngineFailed("d0", "boom")))
    world.complete()
    assert [ending for *_, ending in world.attempts] == [Ending.PREFILL_LOST, Ending.DONE]
    assert (hedges.started, hedges.won) == (1, 0)


def test_no_hedge_without_room_for_one():
    """Its share is used up: the request waits."""
    hedges = hedging(burst=1.0, share=0.001)
    assert hedges.take()
    world = World(Lost.COMMAND, hedging=hedges)
    world.complete()
    assert Reason.HEDGE not in [reason for _, reason, _ in world.attempts]


@pytest.mark.parametrize(("hedged", "kind"), [(True, "unreachable"), (True, "distrusted"), (False, "distrusted")])
def test_a_prefill_here_goes_around_nodes_that_are_known_to_be_bad(hedged: bool, kind: str):
    """The node that was to decode has become bad since it was chosen: a hedge is begun on the other one, and after a
    failure what is kept there is given up. (What is kept on a node ends with its link.)"""
    known = Shunned()
    params = replace(
        PARAMS,
        choose=shunning(choose, lambda: known),
        fallback=shunning(fallback, lambda: known),
        on_prefill_failure=OnPrefillFailure.LOCAL,
        prefill_timeout_s=3.0,
    )
    world = World(Lost.COMMAND, hedging=hedging(least_s=0.5) if hedged else None, params=params, decodes=2)
    chosen = choose(asked(), NO_MATCHES, world.ports.view(), ROUTING, frozenset()).decode

    def turn_bad() -> None:
        nonlocal known
        known = Shunned(**{kind: frozenset({chosen})})

    world.kernel.call_later(0.2, turn_bad)
    world.complete()
    last = world.story.attempts[-1].route
    assert (last.reason, last.path) == (Reason.HEDGE if hedged else Reason.FALLBACK, Path.LOCAL)
    assert last.decode != chosen


def test_a_client_that_leaves_at_any_wait_leaves_nothing_behind():
    """Also while both prefills run, and while one replaces the other."""
    for wait in range(1, 14):
        world = World(Lost.COMMAND, hedging=hedging(least_s=0.1))
        task = world.kernel.spawn(world.client(), "client")
        task.cancel_at_wait = wait
        world.kernel.run_until(60.0)
        if task.waits >= wait:
            with pytest.raises(Cancelled):
                task.result()
        world.nothing_left()
        assert all(attempt.ending is not Ending.RUNNING for attempt in world.story.attempts)


def test_a_client_that_leaves_at_any_time_leaves_nothing_behind():
    """The same by the clock."""
    for hundredth in range(1, 60):
        world = World(Lost.COMMAND, hedging=hedging(least_s=0.1))
        task = world.kernel.spawn(world.client(), "client")
        world.kernel.call_later(hundredth / 100, task.cancel)
        world.kernel.run_until(5.0)
        assert task.done
        if hundredth < 30:
            with pytest.raises(Cancelled):
                task.result()
        world.nothing_left()


def test_a_refusal_tells_when_the_first_breaker_lets_something_through():
    """Unless there is nothing to wait for, or less than the refusal asks for."""
    world = World(routing=replace(ROUTING, shut=Shut(links=frozenset({("far", "near")}), half_opens_at=7.0)))
    [own] = world.cluster.view().decode
    route = Route(
        prefill=own,
        decode=own,
        path=Path.LOCAL,
        reason=Reason.BREAKER_OPEN,
        uncached_tokens=1,
        transfer_tokens=0,
        threshold_tokens=1,
    )
    told = refusal(Overloaded("kv"), route, world.ports)
    assert isinstance(told, Overloaded) and told.retry_after_s == 7.0
    later, failure = Overloaded("kv", retry_after_s=9.0), PrefillOverdue("prefill", 1.0)
    assert refusal(later, route, world.ports) is later
    assert refusal(failure, route, world.ports) is failure
    other = Overloaded("kv")
    assert refusal(other, replace(route, reason=Reason.SHORT_PROMPT), world.ports) is other
