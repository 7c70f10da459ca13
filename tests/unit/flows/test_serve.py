"""The serve flow over the simulated cluster: what a client sees, and what is left behind on the workers."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import (
    CACHE_LOST,
    KV_ROOM,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.flows.failures import OnPrefillFailure
from prfaas.flows.ports import PrefillReport, Reservation, TokenBatch
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Ending, Story
from prfaas.request import (
    NO_MATCHES,
    TTFT_TERMS,
    AttemptId,
    FinishReason,
    Match,
    Matches,
    Path,
    Reason,
    Request,
    RequestId,
    Route,
    Sampling,
)
from prfaas.scheduling.routing import RoutingParams, choose
from prfaas.sim.cluster import Fault, Lost, SimCluster
from prfaas.sim.instance import Costs
from prfaas.sim.kernel import Kernel
from prfaas.sim.serve_ports import SimServePorts
from prfaas.sim.task import Cancelled
from tests.right_answers import expected_output

ROUTING = RoutingParams(threshold_tokens=100)
PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=5.0,
    prefill_timeout_s_per_token=0.01,
    first_token_timeout_s=5.0,
    token_gap_timeout_s=2.0,
)


COSTS = Costs()


def node(name: str, role: Role, kind: NodeKind = NodeKind.PD) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId("far" if kind is NodeKind.PREFILL_WORKER else "near"),
        kind=kind,
        role=role,
        incarnation=Incarnation(1),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        kv_addresses={"": f"{name}:7000"},
        max_context_tokens=100_000,
    )


def far(name: str) -> Node:
    return node(name, Role.PREFILL, NodeKind.PREFILL_WORKER)


TRIO = (far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE))


def prompt(tokens: int, max_tokens: int = 5, model: str = "m") -> Request:
    packed = b"".join(i.to_bytes(4, "little") for i in range(tokens))
    return Request(id=RequestId("r"), model=model, prompt=packed, sampling=Sampling(max_tokens=max_tokens))


class World:
    """A kernel, a cluster, and a client that reads one request to its end."""

    def __init__(
        self,
        *nodes: Node,
        costs: Costs = COSTS,
        params: ServeParams = PARAMS,
        matches: Matches = NO_MATCHES,
        **planned: list[Fault],
    ) -> None:
        self.kernel = Kernel(seed=0)
        self.cluster = SimCluster(self.kernel, nodes, costs)
        for call, faults in planned.items():
            self.cluster.plan(call, *faults)
        self.ports = SimServePorts(self.cluster, ROUTING)
        self.params, self.matches = params, matches
        self.story = Story()
        self.received = b""

    async def client(self, request: Request, on_batch: Callable[[], None] = lambda: None) -> None:
        async for batch in serve(request, self.matches, self.params, self.ports, self.story):
            self.received += batch.tokens
            on_batch()

    def complete(self, request: Request, on_batch: Callable[[], None] = lambda: None) -> Story:
        self.kernel.run(self.client(request, on_batch))
        assert self.received == expected_output(request)
        assert self.story.attempts[-1].ending is Ending.DONE
        return self.nothing_left()

    def fail(self, request: Request, error: type[PrfaasError]) -> Any:
        with pytest.raises(error) as caught:
            self.kernel.run(self.client(request))
        self.nothing_left()
        return caught.value

    async def prefilled(self) -> None:
        """Until the KV is complete at the decode node; the command to decode takes longer to get there than this."""
        limit_s = self.kernel.now() + 5.0
        while self.story.prefill is None:
            assert self.kernel.now() < limit_s
            await self.kernel.sleep(self.cluster.network.hop_s / 10)

    def nothing_left(self) -> Story:
        """Half a second after the client is gone all workers are idle."""
        self.kernel.run_until(self.kernel.now() + 0.5)
        self.cluster.check_idle()
        return self.story

    @property
    def endings(self) -> list[Ending]:
        return [attempt.ending for attempt in self.story.attempts]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(attempt.route.prefill, attempt.route.decode) for attempt in self.story.attempts]


def test_a_long_prompt_goes_the_remote_way():
    """Prefilled over there, decoded here; the story tells how."""
    world = World(far("p0"), node("d0", Role.DECODE))
    story = world.complete(prompt(500))
    assert story.route is not None and story.route.path is Path.REMOTE
    assert (story.finish, story.output_tokens, story.recomputed_tokens) == (FinishReason.LENGTH, 5, 1)
    assert story.prefill is not None and story.prefill.prefill_tokens == 499


def test_a_short_prompt_stays_on_a_mixed_node():
    """Nothing moves."""
    world = World(far("p0"), node("m0", Role.MIXED))
    story = world.complete(prompt(50))
    assert world.pairs == [("m0", "m0")]
    assert story.prefill is not None and story.prefill.kv_bytes == 0


def test_a_decode_node_lost_during_prefill_is_the_one_avoided():
    """The prefill node did nothing wrong: it is asked again, for another decode node."""
    chosen = choose(prompt(500), NO_MATCHES, World(*TRIO).ports.view(), ROUTING).decode
    world = World(*TRIO, prefill=[PeerUnavailable(chosen, "gone")])
    world.complete(prompt(500))
    other = "d1" if chosen == "d0" else "d0"
    assert world.endings == [Ending.DECODE_LOST, Ending.DONE]
    assert world.pairs == [("p0", chosen), ("p0", other)]


def test_one_token_is_a_whole_request():
    """The first batch is the last one."""
    world = World(far("p0"), node("d0", Role.DECODE))
    assert world.complete(prompt(500, max_tokens=1)).output_tokens == 1


def test_the_account_of_the_first_token_closes():
    """All terms together are the time to the first token, with no rest."""
    world = World(far("p0"), node("d0", Role.DECODE))
    first: list[float] = []
    story = world.complete(prompt(500), lambda: first.append(world.kernel.now()))
    assert set(story.terms) == set(TTFT_TERMS) - {"tokenize"}
    assert sum(story.terms.values()) == pytest.approx(first[0], abs=1e-9)
    assert story.terms["prefill"] == pytest.approx(499 * COSTS.prefill_s_per_token)
    assert story.terms["network"] > 0 and story.terms["transfer_exposed"] > 0


def test_the_account_closes_over_failed_attempts():
    """What failed attempts took is time in the queue, on top of what the caller had counted there."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=[TransferFailed("a", "checksum")])
    world.story.terms["queue"] = 1.0
    first: list[float] = []
    story = world.complete(prompt(500), lambda: first.append(world.kernel.now()))
    assert story.terms["queue"] > 1.0
    assert sum(story.terms.values()) == pytest.approx(1.0 + first[0], abs=1e-9)


class Clocked(SimServePorts):
    """Workers that say how long they had each command; prefill had it a second longer than its terms tell."""

    async def reserve(self, attempt: AttemptId, request: Request, route: Route) -> Reservation:
        reservation = await super().reserve(attempt, request, route)
        await self.sleep(0.25)
        return replace(reservation, took_s=0.25)

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        report = await super().prefill(route, attempt, request, reservation)
        await self.sleep(1.0)
        return replace(report, took_s=report.queue_s + report.compute_s + report.exposed_s + 1.0)

    async def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        async for batch in super().decode(reservation, request):
            yield batch if batch.first_step_s is None else replace(batch, first_took_s=batch.first_step_s)


def test_the_network_is_what_calls_took_beyond_the_workers_own_time():
    """Room that was waited for is a wait for decode; what a worker spent on none of its terms stays unaccounted, and is
    not taken for the network."""
    plain, world = World(far("p0"), node("d0", Role.DECODE)), World(far("p0"), node("d0", Role.DECODE))
    plain.complete(prompt(500))
    world.ports = Clocked(world.cluster, ROUTING)
    first: list[float] = []
    story = world.complete(prompt(500), lambda: first.append(world.kernel.now()))
    assert story.terms["network"] == pytest.approx(plain.story.terms["network"])
    assert story.terms["decode_queue"] == pytest.approx(plain.story.terms["decode_queue"] + 0.25)
    assert sum(story.terms.values()) == pytest.approx(first[0] - 1.0)
    assert story.first_s == first[0]


def test_the_account_begins_when_the_request_was_handed_over():
    """What happens before the flow's first step, the look-up of what is cached above all, is of the route."""
    world = World(far("p0"), node("d0", Role.DECODE))
    world.story.arrived_s = 0.0

    async def later() -> None:
        await world.kernel.sleep(2.0)
        await world.client(prompt(500))

    world.kernel.run(later())
    assert world.story.terms["route"] == pytest.approx(2.0)
    assert sum(world.story.terms.values()) == pytest.approx(world.story.first_s)


def test_a_reservation_that_was_kept_is_not_accounted_twice():
    """The attempt that goes on in its place did not wait for it: that was while the first one failed."""
    world = World(
        far("p0"),
        node("m0", Role.MIXED),
        params=replace(PARAMS, on_prefill_failure=OnPrefillFailure.LOCAL),
        prefill=[TransferFailed("a", "checksum")],
    )
    world.ports = Clocked(world.cluster, ROUTING)
    first: list[float] = []
    story = world.complete(prompt(500), lambda: first.append(world.kernel.now()))
    assert [attempt.id for attempt in story.attempts] == [story.attempts[0].id] * 2
    assert story.terms["queue"] > 0.25
    assert sum(story.terms.values()) == pytest.approx(first[0] - 1.0)


def test_a_refused_reservation_goes_to_another_decode_node():
    """Room is a matter of the node: the next one may have it."""
    world = World(far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE), reserve=[Overloaded("kv")])
    world.complete(prompt(500))
    assert world.endings == [Ending.REFUSED, Ending.DONE]
    assert {decode for _, decode in world.pairs} == {"d0", "d1"}


CACHED = {NodeId("p0"): Match(320, 448), NodeId("p1"): Match(320, 448)}


@pytest.mark.parametrize(
    "error", [TransferFailed("a", "checksum"), PeerUnavailable("p0", "gone"), DeadlineExceeded("prefill", 1.0)]
)
def test_after_a_failure_the_next_attempt_does_without_a_cache(error):
    """It may have been what failed: the prompt is computed whole, and routed as such."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=[error], matches=CACHED)
    story = world.complete(prompt(500))
    assert [attempt.route.use_cache for attempt in story.attempts] == [True, False]
    assert [attempt.route.prefill_tokens for attempt in story.attempts] == [180, 500]
    assert story.match == Match(320, 448)


def test_a_lost_cache_says_nothing_against_the_nodes():
    """The only decode node lost what the cache was to bring it: the same two nodes serve the request without."""
    world = World(far("p0"), node("d0", Role.DECODE), decode=[TransferFailed("a", CACHE_LOST)], matches=CACHED)
    story = world.complete(prompt(500))
    assert world.pairs == [("p0", "d0")] * 2
    assert [(each.route.use_cache, each.route.prefill_tokens) for each in story.attempts] == [(True, 180), (False, 500)]


def test_a_refusal_says_nothing_against_the_cache():
    """There was no room on one node; what is cached is so still."""
    nodes = far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE)
    world = World(*nodes, reserve=[Overloaded("kv")], matches=CACHED)
    story = world.complete(prompt(500))
    assert [(each.route.use_cache, each.route.prefill_tokens) for each in story.attempts] == [(True, 180)] * 2


def test_when_all_decode_nodes_are_full_the_client_hears_of_it():
    """The first refusal is the answer, with its Retry-After, and not that no node is left."""
    world = World(far("p0"), node("d0", Role.DECODE), reserve=[Overloaded("kv", retry_after_s=7.0), Overloaded("kv")])
    assert world.fail(prompt(500), Overloaded).retry_after_s == 7.0


PREFILL_ERRORS = [
    PeerUnavailable("p0", "gone"),
    TransferFailed("a", "checksum"),
    EngineFailed("p0", "oom"),
    Overloaded("queue"),
    DeadlineExceeded("prefill", 1.0),
]


@pytest.mark.parametrize("error", PREFILL_ERRORS, ids=lambda error: type(error).__name__)
def test_a_lost_prefill_is_retried_elsewhere(error):
    """Another prefill node takes over, and the client never knows."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=[error])
    world.complete(prompt(500))
    assert world.endings == [Ending.REFUSED if isinstance(error, Overloaded) else Ending.PREFILL_LOST, Ending.DONE]
    assert {prefill for prefill, _ in world.pairs} == {"p0", "p1"}


def test_the_last_attempt_needs_nobody_but_the_decode_node():
    """After two prefill nodes failed, the third is not tried: the prompt is computed where it is decoded."""
    lost = [TransferFailed("a", "link"), TransferFailed("b", "link")]
    world = World(far("p0"), far("p1"), far("p2"), node("d0", Role.DECODE), prefill=lost)
    story = world.complete(prompt(500))
    assert world.pairs[-1] == ("d0", "d0")
    assert story.route is not None and story.route.reason is Reason.FALLBACK


@pytest.mark.parametrize(
    ("choice", "lost"),
    [
        (OnPrefillFailure.LOCAL, [TransferFailed("a", "link")]),
        (OnPrefillFailure.RETRY, [TransferFailed("a", "link"), TransferFailed("b", "link")]),
    ],
)
def test_the_decode_node_goes_on_with_what_has_arrived(choice, lost):
    """Under the reservation of the attempt that failed, on the node that holds it, although others are less busy."""
    params = replace(PARAMS, on_prefill_failure=choice)
    world = World(far("p0"), far("p1"), *(node(f"d{number}", Role.DECODE) for number in range(3)), params=params)
    world.cluster.plan("prefill", *lost)
    world.complete(prompt(500))
    *_, failed, done = world.story.attempts
    assert world.endings == [Ending.PREFILL_LOST] * len(lost) + [Ending.DONE]
    assert done.id == failed.id and world.pairs[-1] == (failed.route.decode, failed.route.decode)
    assert len({attempt.id for attempt in world.story.attempts}) == len(lost)


def test_what_has_arrived_is_given_up_with_its_node():
    """It has left the view by then: another node begins anew, and nothing is held for nobody."""
    params = replace(PARAMS, on_prefill_failure=OnPrefillFailure.LOCAL)
    world = World(*TRIO, params=params, prefill=[TransferFailed("a", "link")])
    chosen = choose(prompt(500), NO_MATCHES, world.ports.view(), ROUTING).decode
    views = iter([world.ports.view()])

    def view() -> ClusterView:
        whole = world.cluster.view()
        left = {name: each for name, each in whole.nodes.items() if name != chosen}
        gone = replace(whole, nodes=left, decode=tuple(name for name in whole.decode if name != chosen))
        return next(views, gone)

    world.ports.view = view
    world.complete(prompt(500))
    first, second = world.story.attempts
    assert first.id != second.id and world.pairs[1][0] == world.pairs[1][1] != chosen


def test_when_everything_fails_the_first_cause_is_raised():
    """The budget ends the tries; the root cause is more telling than what came of it."""
    errors = [TransferFailed("a", "checksum"), PeerUnavailable("p1", "gone"), EngineFailed("d0", "oom")]
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=errors)
    assert world.fail(prompt(500), TransferFailed).cause == "checksum"
    assert len(world.story.attempts) == PARAMS.max_attempts


@pytest.mark.parametrize(
    ("choice", "pairs"),
    [
        (OnPrefillFailure.RETRY, 2),
        (OnPrefillFailure.LOCAL, 2),
        (OnPrefillFailure.FAIL, 1),
    ],
)
def test_field_C18_what_follows_a_failed_prefill_is_a_choice(choice, pairs):
    """Retry elsewhere, compute it on the decode node, or fail, as the operator wants it and within a budget."""
    world = World(
        far("p0"),
        far("p1"),
        node("d0", Role.DECODE),
        params=replace(PARAMS, on_prefill_failure=choice),
        prefill=[EngineFailed("p0", "oom")],
    )
    if choice is OnPrefillFailure.FAIL:
        world.fail(prompt(500), EngineFailed)
    else:
        world.complete(prompt(500))
        assert (world.pairs[-1] == ("d0", "d0")) == (choice is OnPrefillFailure.LOCAL)
    assert len(world.pairs) == pairs


def test_field_C7_an_invalid_request_found_by_a_worker_is_the_clients_at_once():
    """The first failure wins: no retry, no waiting for the other side."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=[InvalidRequest("no", param="x")])
    assert world.fail(prompt(500), InvalidRequest).param == "x"
    assert world.endings == [Ending.REFUSED]
    assert world.kernel.now() < 1.0


def test_a_model_whose_nodes_have_left_is_refused_before_anything_is_reserved():
    """Nothing was begun, so nothing is in the story. It may come back: the client did not name it wrongly."""
    world = World(far("p0"), node("d0", Role.DECODE))
    world.fail(prompt(500, model="left"), PeerUnavailable)
    assert world.story.attempts == []


def test_a_pair_that_does_not_match_is_broken_up():
    """The decode node refuses a source whose namespace it does not share; the source is exchanged."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), reserve=[NamespaceMismatch("ns", "other")])
    world.complete(prompt(500))
    assert {prefill for prefill, _ in world.pairs} == {"p0", "p1"}


def test_field_J3_each_attempt_has_its_own_id_and_reservation():
    """A late frame of an attempt that failed cannot meet the reservation of the next."""
    world = World(far("p0"), far("p1"), node("d0", Role.DECODE), prefill=[TransferFailed("a", "link")])
    story = world.complete(prompt(500))
    first, second = (attempt.id for attempt in story.attempts)
    assert first != second


@pytest.mark.parametrize("call", ["reserve", "prefill", "decode"])
def test_field_C1_no_call_is_waited_for_without_end(call):
    """Each call that is never answered ends by its deadline, on every attempt, and leaves nothing behind."""
    world = World(
        far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE), **{call: [Lost.COMMAND] * PARAMS.max_attempts}
    )
    world.fail(prompt(500), DeadlineExceeded)
    assert set(world.endings) == {Ending.PREFILL_LOST if call == "prefill" else Ending.DECODE_LOST}
    assert world.kernel.now() < 60


def test_a_decode_node_that_dies_in_mid_stream_and_is_not_replaced_ends_the_stream_with_an_error():
    """Tokens already sent are not sent again: the client gets a prefix and the reason."""
    params = replace(PARAMS, max_migrations=0)
    world = World(far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE), params=params)
    request = prompt(500)

    def kill_after_two() -> None:
        if len(world.received) == 8:
            assert world.story.route is not None
            world.cluster.kill(world.story.route.decode)

    with pytest.raises(PeerUnavailable):
        world.kernel.run(world.client(request, kill_after_two))
    assert world.received == expected_output(request)[:8]
    assert world.endings == [Ending.DECODE_LOST]
    world.nothing_left()


def test_a_decode_node_that_dies_before_the_first_token_is_replaced():
    """Nothing was sent yet, so the whole request may move."""
    world = World(far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE))

    async def main() -> None:
        client = world.kernel.spawn(world.client(prompt(500)), "client")
        await world.prefilled()
        assert world.story.route is not None
        world.cluster.kill(world.story.route.decode)
        await client

    world.kernel.run(main())
    assert world.received == expected_output(prompt(500))
    assert world.endings == [Ending.DECODE_LOST, Ending.DONE]
    world.nothing_left()


def test_field_C3_a_decode_node_that_restarts_during_prefill_gets_no_stale_kv():
    """The new incarnation knows nothing of the reservation, so the transfer fails and the request begins anew."""
    world = World(far("p0"), node("d0", Role.DECODE))

    async def main() -> None:
        client = world.kernel.spawn(world.client(prompt(500)), "client")
        await world.kernel.sleep(0.1)
        assert world.cluster.workers[NodeId("p0")].registration().load.queued_prefill_tokens == 500
        world.cluster.kill(NodeId("d0"))
        world.cluster.restart(NodeId("d0"))
        await client

    world.kernel.run(main())
    assert world.received == expected_output(prompt(500))
    assert world.endings == [Ending.PREFILL_LOST, Ending.DONE]
    assert "released" in world.story.attempts[0].detail
    world.nothing_left()


class CutPorts(SimServePorts):
    """Streams end after so many batches, without an error and without a finish."""

    batches = 0

    async def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        left = self.batches
        async for batch in super().decode(reservation, request):
            if not left:
                return
            left -= 1
            yield batch


@pytest.mark.parametrize("batches", [0, 2])
def test_a_stream_that_just_ends_is_a_lost_decode_node(batches):
    """An answer without a finish is never passed off as a whole one."""
    params = replace(PARAMS, max_migrations=0)
    world = World(far("p0"), node("d0", Role.DECODE), node("d1", Role.DECODE), params=params)
    world.ports = CutPorts(world.cluster, ROUTING)
    world.ports.batches = batches
    world.fail(prompt(500), PeerUnavailable)
    assert world.received == expected_output(prompt(500))[: 4 * batches]
    assert world.endings == [Ending.DECODE_LOST] * (1 if batches else 2)


def test_a_stalled_stream_ends_by_the_gap_deadline():
    """Silence between tokens is a failure too."""
    world = World(far("p0"), node("d0", Role.DECODE), costs=Costs(step_s=3.0))
    world.fail(prompt(500), DeadlineExceeded)
    assert world.received == expected_output(prompt(500))[:4]
    assert world.endings == [Ending.DECODE_LOST]


def waits_of_a_client() -> int:
    """How often the client of an undisturbed remote request waits."""
    world = World(far("p0"), node("d0", Role.DECODE))
    task = world.kernel.spawn(world.client(prompt(500)), "client")
    world.kernel.run_until(60.0)
    return task.waits


@pytest.mark.parametrize("at", range(1, waits_of_a_client() + 1))
def test_field_A7_a_client_may_leave_at_any_await(at):
    """Whichever await the cancellation meets, both workers let go of everything within half a second."""
    world = World(far("p0"), node("d0", Role.DECODE))
    task = world.kernel.spawn(world.client(prompt(500)), "client")
    task.cancel_at_wait = at
    while not task.done and world.kernel.now() < 60.0:
        world.kernel.run_until(world.kernel.now() + 0.1)
    with pytest.raises(Cancelled):
        task.result()
    world.nothing_left()
    assert world.story.attempts[-1].ending in (Ending.CANCELLED, Ending.DONE)


def test_field_A8_a_client_leaves_between_prefill_and_decode():
    """KV lies complete on the decode node and nobody comes for it: the flow releases it at once, not by a timeout."""
    world = World(far("p0"), node("d0", Role.DECODE))

    async def main() -> None:
        client = world.kernel.spawn(world.client(prompt(500)), "client")
        await world.prefilled()
        decode = world.cluster.workers[NodeId("d0")].registration().load
        assert decode.kv_free_bytes < decode.kv_total_bytes and decode.decoding == 0
        client.cancel()
        with pytest.raises(Cancelled):
            await client

    world.kernel.run(main())
    assert world.endings == [Ending.CANCELLED]
    world.nothing_left()


def test_field_D1_a_prefill_stops_when_its_client_leaves():
    """A prompt that takes minutes is not computed for nobody: the next one in the queue starts at once."""
    world = World(
        far("p0"),
        node("d0", Role.DECODE),
        costs=Costs(prefill_s_per_token=0.5),
        params=replace(PARAMS, prefill_timeout_s=3600),
    )

    async def main() -> float:
        client = world.kernel.spawn(world.client(prompt(500)), "client")
        await world.kernel.sleep(1.0)
        assert world.cluster.workers[NodeId("p0")].registration().load.queued_prefill_tokens == 500
        client.cancel()
        await world.kernel.sleep(1.0)
        return world.cluster.workers[NodeId("p0")].registration().load.queued_prefill_tokens

    assert world.kernel.run(main()) == 0
    world.nothing_left()


@pytest.mark.parametrize("batches", [1, 3])
def test_closing_the_stream_between_batches_releases(batches):
    """A client that stops reading closes the generator; that is a cancellation like any other."""
    world = World(far("p0"), node("d0", Role.DECODE))

    async def main() -> None:
        stream = serve(prompt(500), NO_MATCHES, PARAMS, world.ports, world.story)
        for _ in range(batches):
            await anext(stream)
        await stream.aclose()

    world.kernel.run(main())
    assert world.endings == [Ending.CANCELLED]
    world.nothing_left()


def test_a_client_that_leaves_with_the_last_token_is_done():
    """Whoever has all tokens was served, even if it never asks for more."""
    world = World(far("p0"), node("d0", Role.DECODE))

    async def main() -> None:
        stream = serve(prompt(500, max_tokens=1), NO_MATCHES, PARAMS, world.ports, world.story)
        await anext(stream)
        await stream.aclose()

    world.kernel.run(main())
    assert world.endings == [Ending.DONE]
    world.nothing_left()


def test_demand_is_told_once_per_request():
    """A retry is not another arrival, and a request that finds no node is none at all."""
    world = World(*TRIO, prefill=[EngineFailed("p0", "once"), EngineFailed("d0", "twice")])
    assert len(world.complete(prompt(500)).attempts) > 1
    assert world.ports.demand == 1
    nobody = World(far("p0"))
    nobody.fail(prompt(500), PeerUnavailable)
    assert nobody.ports.demand == 0


def test_no_room_for_kv_on_its_way_is_no_reason_to_turn_the_client_away():
    """A prompt whose KV no pool can take is prefilled where it decodes: nothing has to move there."""
    world = World(*TRIO, reserve=[Overloaded(KV_ROOM)])
    story = world.complete(prompt(500))
    assert world.endings == [Ending.REFUSED, Ending.DONE]
    assert story.route is not None and story.route.prefill == story.route.decode == world.pairs[0][1]
    assert story.route.reason is Reason.FALLBACK
