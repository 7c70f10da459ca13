"""A stream whose decode node is lost goes on elsewhere: what its client sees of that, and what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prfaas.cluster import SEEDED_DRAWS, ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Ending, Moved, Story
from prfaas.request import NO_MATCHES, TOKEN_BYTES, FinishReason, Matches, Path, Request, RequestId, Route, Sampling
from prfaas.scheduling.routing import RoutingParams, choose
from prfaas.sim.cluster import Fault, Lost, SimCluster
from prfaas.sim.instance import Costs
from prfaas.sim.kernel import Kernel
from prfaas.sim.serve_ports import SimServePorts
from tests.right_answers import expected_output

ROUTING = RoutingParams(threshold_tokens=100)
PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=5.0,
    prefill_timeout_s_per_token=0.01,
    first_token_timeout_s=5.0,
    token_gap_timeout_s=2.0,
    migration_timeout_s=20.0,
)
COSTS = Costs()
ANSWER = 12


def node(name: str, role: Role = Role.DECODE, kind: NodeKind = NodeKind.PD, **changes: Any) -> Node:
    made = Node(
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
        capabilities=(SEEDED_DRAWS,),
    )
    return replace(made, **changes)


FAR = node("p0", Role.PREFILL, NodeKind.PREFILL_WORKER)


def prompt(tokens: int = 500, max_tokens: int = ANSWER, **sampling: Any) -> Request:
    packed = b"".join(i.to_bytes(4, "little") for i in range(tokens))
    return Request(
        id=RequestId("r"), model="m", prompt=packed, sampling=Sampling(max_tokens=max_tokens, **sampling), top_logits=0
    )


class World:
    """A cluster, one client, and what is to happen once the client has so many tokens."""

    def __init__(self, *nodes: Node, params: ServeParams = PARAMS, costs: Costs = COSTS) -> None:
        self.kernel = Kernel(seed=0)
        self.cluster = SimCluster(self.kernel, nodes, costs)
        self.ports = SimServePorts(self.cluster, ROUTING)
        self.params, self.story, self.received = params, Story(), b""
        self.batch_times: list[float] = []

    @property
    def decoding(self) -> NodeId:
        return self.story.attempts[-1].route.decode

    async def client(self, request: Request, at: dict[int, Callable[[], None]]) -> None:
        async for batch in serve(request, NO_MATCHES, self.params, self.ports, self.story):
            self.received += batch.tokens
            self.batch_times.append(self.kernel.now())
            if (happen := at.get(len(self.received) // TOKEN_BYTES)) is not None and batch.tokens:
                happen()

    def complete(self, request: Request, at: dict[int, Callable[[], None]]) -> Story:
        self.kernel.run(self.client(request, at))
        assert self.received == expected_output(request), "tokens are wrong, lost or repeated"
        return self.nothing_left()

    def fail(self, request: Request, at: dict[int, Callable[[], None]], error: type[PrfaasError]) -> Any:
        with pytest.raises(error) as caught:
            self.kernel.run(self.client(request, at))
        assert expected_output(request).startswith(self.received)
        self.nothing_left()
        return caught.value

    def kill(self) -> None:
        self.cluster.kill(self.decoding)

    def kill_and_meet(self, call: str, *faults: Fault) -> Callable[[], None]:
        """The node that decodes dies, and the calls after that meet these faults."""

        def happen() -> None:
            self.cluster.plan(call, *faults)
            self.kill()

        return happen

    def nothing_left(self) -> Story:
        self.kernel.run_until(self.kernel.now() + 0.5)
        self.cluster.check_idle()
        assert not self.story.generated, "tokens of a request that has ended are still kept"
        return self.story

    @property
    def endings(self) -> list[Ending]:
        return [attempt.ending for attempt in self.story.attempts]

    @property
    def outcomes(self) -> list[Moved]:
        return [move.outcome for move in self.story.migrations]


SAMPLINGS = ({}, {"temperature": 0.7, "seed": 11})


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("after", [1, 2, ANSWER - 1])
def test_a_stream_goes_on_where_it_was(sampling: dict[str, Any], after: int):
    """Nothing is sent twice and nothing is left out; the other node was given what the client had."""
    world = World(FAR, node("d0"), node("d1"))
    story = world.complete(prompt(**sampling), {after: world.kill})
    assert world.endings == [Ending.DECODE_LOST, Ending.DONE]
    assert [attempt.replayed_tokens for attempt in story.attempts] == [0, after]
    assert {attempt.route.decode for attempt in story.attempts} == {"d0", "d1"}
    assert (story.output_tokens, story.finish, story.moves) == (ANSWER, FinishReason.LENGTH, 1)


def test_a_seed_makes_a_difference():
    """Else the runs with one would show no more than greedy ones."""
    assert (
        len({expected_output(prompt(**sampling)) for sampling in (*SAMPLINGS, {"temperature": 0.7, "seed": 12})}) == 3
    )


def test_what_the_first_token_was_measured_by_stays():
    """The account, the report and the route are those of the first token; the replay's have a place of their own."""
    quiet, world = World(FAR, node("d0"), node("d1")), World(FAR, node("d0"), node("d1"))
    quiet.complete(prompt(), {})
    story = world.complete(prompt(), {3: world.kill})
    assert (story.terms, story.first_s, story.prefill) == (quiet.story.terms, quiet.story.first_s, quiet.story.prefill)
    assert story.route == story.attempts[0].route
    assert world.ports.demand == 1
    [move] = story.migrations
    assert (move.after_tokens, move.outcome, move.path) == (3, Moved.MOVED, Path.REMOTE)
    assert move.prefill is not None and move.prefill.prefill_tokens == 499 + 3
    assert move.gap_s is not None and 0 < move.gap_s <= world.batch_times[3] - world.batch_times[2]


def test_the_replay_is_routed_by_the_same_rule():
    """A long one goes where long prompts go; a short one with its tokens stays on the node that decodes."""
    for tokens, path in ((500, Path.REMOTE), (20, Path.LOCAL)):
        world = World(FAR, node("d0"), node("d1"))
        story = world.complete(prompt(tokens), {2: world.kill})
        assert [attempt.route.path for attempt in story.attempts] == [path, path]


def test_two_failures_in_a_row():
    """The second node dies as well, in mid-stream or before it has drawn anything."""
    world = World(FAR, node("d0"), node("d1"), node("d2"))
    story = world.complete(prompt(), {2: world.kill, 5: world.kill})
    assert [attempt.replayed_tokens for attempt in story.attempts] == [0, 2, 5]
    world = World(FAR, node("d0"), node("d1"), node("d2"))
    story = world.complete(prompt(), {2: world.kill_and_meet("decode", PeerUnavailable("d1", "gone"))})
    assert [attempt.replayed_tokens for attempt in story.attempts] == [0, 2, 2]
    assert len({attempt.route.decode for attempt in story.attempts}) == 3
    assert world.outcomes == [Moved.MOVED]


def test_the_budget_ends_it():
    """So many attempts after the first token, over all losses together; then the client hears why its node was lost."""
    world = World(FAR, *(node(f"d{i}") for i in range(6)), params=replace(PARAMS, max_migrations=2))
    error = world.fail(prompt(), dict.fromkeys(range(1, ANSWER), world.kill), PeerUnavailable)
    assert len(world.story.attempts) == 3
    assert error.peer == world.decoding
    assert world.outcomes == [Moved.MOVED, Moved.MOVED, Moved.EXHAUSTED]
    assert len(world.received) == 3 * TOKEN_BYTES


def test_without_a_budget_a_loss_ends_the_stream():
    """`max_migrations` 0 is the client's error in the stream, at once."""
    world = World(FAR, node("d0"), node("d1"), params=replace(PARAMS, max_migrations=0))
    world.fail(prompt(), {2: world.kill}, PeerUnavailable)
    assert (world.endings, world.outcomes) == ([Ending.DECODE_LOST], [Moved.EXHAUSTED])


@pytest.mark.parametrize(
    ("error", "ending"),
    [(TransferFailed("a", "link"), Ending.PREFILL_LOST), (EngineFailed("p0", "oom"), Ending.PREFILL_LOST)],
    ids=["transfer", "engine"],
)
def test_a_replay_whose_prefill_fails_is_tried_again(error: PrfaasError, ending: Ending):
    """As before the first token; an attempt that failed counts against the budget."""
    world = World(FAR, node("p1", Role.PREFILL, NodeKind.PREFILL_WORKER), node("d0"), node("d1"))
    world.complete(prompt(), {2: world.kill_and_meet("prefill", error)})
    assert world.endings == [Ending.DECODE_LOST, ending, Ending.DONE]
    world = World(FAR, node("d0"), node("d1"), params=replace(PARAMS, max_migrations=1))
    world.fail(prompt(), {2: world.kill_and_meet("prefill", error)}, PeerUnavailable)


def test_the_last_attempt_needs_nobody_but_the_decode_node():
    """After a prefill node failed the replay, the decode node goes on with what has arrived."""
    world = World(FAR, node("d0"), node("d1"), params=replace(PARAMS, max_migrations=2))
    world.complete(prompt(), {2: world.kill_and_meet("prefill", TransferFailed("a", "link"))})
    *_, failed, done = world.story.attempts
    assert done.id == failed.id and done.route.prefill == done.route.decode


def test_nodes_without_room_cost_only_time():
    """All are full for a while, more often than the budget counts: the stream waits and goes on."""
    full = [Overloaded("kv") for _ in range(9)]
    world = World(FAR, node("d0"), node("d1"), node("d2"), params=replace(PARAMS, max_migrations=1))
    world.complete(prompt(), {2: world.kill_and_meet("reserve", *full)})
    assert world.endings == [Ending.DECODE_LOST, *[Ending.REFUSED] * 9, Ending.DONE]
    [move] = world.story.migrations
    assert move.gap_s is not None and move.gap_s > 0.3


def test_nodes_that_stay_full_end_it_in_time():
    """The client has waited `migration_timeout_s` for its next token, and not much more or less."""
    world = World(FAR, node("d0"), node("d1"))
    world.fail(prompt(), {2: world.kill_and_meet("reserve", *[Overloaded("kv")] * 200)}, PeerUnavailable)
    waited_s = world.kernel.now() - world.batch_times[-1]
    assert PARAMS.migration_timeout_s - 2 < waited_s < PARAMS.migration_timeout_s + 1
    assert world.outcomes == [Moved.EXHAUSTED]
    assert len(world.story.attempts) < 40


@pytest.mark.parametrize("call", ["reserve", "prefill", "decode"])
def test_a_replay_that_nobody_answers_ends_in_time(call: str):
    """The deadlines of calls are cut to what is left of the client's wait."""
    params = replace(PARAMS, migration_timeout_s=0.5, max_migrations=9)
    world = World(FAR, node("d0"), node("d1"), params=params)
    world.fail(prompt(), {2: world.kill_and_meet(call, *[Lost.COMMAND] * 9)}, PeerUnavailable)
    assert world.kernel.now() - world.batch_times[-1] < 2.0


def test_a_node_that_returns_may_serve_again():
    """Another life of the only decode node had no part in the loss. Until it is there, the stream waits."""
    world = World(FAR, node("d0"))

    def kill_and_return() -> None:
        world.kill()
        world.kernel.call_later(3.0, lambda: world.cluster.restart(NodeId("d0")))

    world.complete(prompt(), {2: kill_and_return})
    assert {attempt.route.decode for attempt in world.story.attempts} == {"d0"}
    [move] = world.story.migrations
    assert move.gap_s is not None and move.gap_s > 2.5


def test_a_node_that_lives_on_is_not_asked_again():
    """Its engine has failed this request once; the other node may be as busy as it likes."""
    world = World(FAR, node("d0"), params=replace(PARAMS, migration_timeout_s=1.0))

    def fail_decode() -> None:
        for answers in [each for all_of in world.cluster.workers[NodeId("d0")]._answers.values() for each in all_of]:
            answers.put(EngineFailed("d0", "a step failed"))

    world.fail(prompt(), {2: fail_decode}, EngineFailed)
    assert len(world.story.attempts) == 1


def test_a_stream_that_falls_silent_moves():
    """Silence between tokens is a failure too: `token_gap_timeout_s` later the stream goes on elsewhere."""
    slow = Costs(step_s=3.0)
    world = World(FAR, node("d0"), node("d1"), node("d2"), node("d3"), costs=slow)
    error = world.fail(prompt(), {}, DeadlineExceeded)
    assert error.stage == "next token"
    assert [move.after_tokens for move in world.story.migrations] == [1, 2, 3, 4]


def others(**changes: Any) -> Sequence[Node]:
    return FAR, node("d0"), node("d1", **changes)


@pytest.mark.parametrize(
    "nodes",
    [others(namespace=Namespace("other")), others(capabilities=())],
    ids=["another namespace", "no seeded draws"],
)
def test_nodes_that_would_draw_other_tokens_are_not_asked(nodes: Sequence[Node]):
    """Tokens of another version, or drawn by another generator, are no continuation, however much room there is."""
    world = World(*nodes, params=replace(PARAMS, migration_timeout_s=1.0))
    world.ports.view = lambda: replace(v := world.cluster.view(), decode=tuple(sorted(v.decode)))  # type: ignore[method-assign]
    world.params = replace(world.params, choose=begin_on_the_first)
    world.fail(prompt(temperature=0.7, seed=3), {2: world.kill}, PeerUnavailable)
    assert all(attempt.route.decode == "d0" for attempt in world.story.attempts)
    assert world.outcomes == [Moved.EXHAUSTED]


def begin_on_the_first(
    request: Request, matches: Matches, view: ClusterView, rule: RoutingParams, avoid: frozenset[NodeId]
) -> Route:
    """As always, but that the first route is over the first decode node."""
    rest = frozenset(view.decode[1:]) if not avoid else frozenset()
    return choose(request, matches, view, rule, avoid | rest)


def test_an_engine_without_the_generator_moves_greedy_streams_only():
    """By chance it would draw other tokens; the best token is the same everywhere."""
    plain = FAR, node("d0", capabilities=()), node("d1", capabilities=())
    world = World(*plain)
    world.complete(prompt(), {2: world.kill})
    assert world.outcomes == [Moved.MOVED]
    world = World(*plain)
    world.fail(prompt(temperature=0.7), {2: world.kill}, PeerUnavailable)
    assert (world.endings, world.outcomes) == ([Ending.DECODE_LOST], [Moved.INEXACT])


def test_an_answer_that_follows_a_grammar_stays():
    """Another engine would begin the grammar with the first token that it draws."""
    world = World(FAR, node("d0"), node("d1"))
    world.fail(prompt(constraint='{"response_format":1}'), {2: world.kill}, PeerUnavailable)
    assert world.outcomes == [Moved.INEXACT]


def test_a_node_lost_after_the_last_token_is_no_loss():
    """All tokens are there; only the word that this was the end is missing, and the flow can say that itself."""
    world = World(FAR, node("d0"), node("d1"))
    world.ports = Endless(world.cluster, ROUTING)
    story = world.complete(prompt(max_tokens=4), {4: world.kill})
    assert (story.finish, story.output_tokens) == (FinishReason.LENGTH, 4)
    assert len(story.attempts) == 1
    assert world.outcomes == [Moved.COMPLETE]


class Endless(SimServePorts):
    """Finishes come by themselves, and after the death of the worker not at all."""

    async def decode(self, reservation: Any, request: Request) -> Any:
        async for batch in super().decode(reservation, request):
            yield replace(batch, finish=None)
            if batch.finish is not None:
                if self._cluster.workers[reservation.decode].died.is_set:
                    raise PeerUnavailable(reservation.decode, "died")
                yield replace(batch, tokens=b"")


def test_an_invalid_replay_is_told_as_the_loss():
    """The client's request was valid: that a node cannot take what is left of it is not the client's mistake."""
    world = World(FAR, node("d0"), node("d1"))
    world.fail(prompt(), {2: world.kill_and_meet("reserve", InvalidRequest("too long"))}, PeerUnavailable)


def test_an_invalid_request_in_mid_stream_does_not_move():
    """Repeating it would not help."""
    world = World(FAR, node("d0"), node("d1"))

    def refuse() -> None:
        for answers in [each for all_of in world.cluster.workers[world.decoding]._answers.values() for each in all_of]:
            answers.put(InvalidRequest("no"))

    world.fail(prompt(), {2: refuse}, InvalidRequest)
    assert (len(world.story.attempts), world.outcomes) == (1, [])


def test_a_client_that_leaves_during_the_replay_leaves_nothing():
    """Its generator is closed while another node is being found."""
    world = World(FAR, node("d0"), node("d1"))

    async def come() -> None:
        task = world.kernel.spawn(world.client(prompt(), {2: world.kill}), "client")
        while not world.story.migrations:
            await world.kernel.sleep(0.0005)
        await world.kernel.sleep(0.0101)
        task.cancel()

    world.kernel.run(come())
    world.nothing_left()
    assert world.outcomes == [Moved.LEFT]
    assert len(world.received) == 2 * TOKEN_BYTES
