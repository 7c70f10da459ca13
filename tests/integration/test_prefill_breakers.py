"""Prefill nodes that do not answer, behind real token links: requests go round them, and back when they are well."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from prfaas.cluster import Node, NodeId, RegionId
from prfaas.curve import Curve
from prfaas.errors import Overloaded
from prfaas.flows.story import Ending, Story
from prfaas.live.clock import AsyncioClock
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.profile import DecodeProfile, Profile
from prfaas.request import Mode, Path, Reason
from prfaas.rpc.commands import Cancel, Prefill
from prfaas.scheduling.blame import Guard
from prfaas.scheduling.breaker import BreakerParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.hedging import HedgeParams, Hedging
from prfaas.scheduling.routing import RoutingParams
from tests.integration.link_adapters import TCP
from tests.integration.scripted_worker import ScriptedRuntime, completion
from tests.integration.test_token_link import D0, LONG_TOKENS, PATIENCE_S, Router, node, prompt, serving

P0, P1 = NodeId("p0"), NodeId("p1")
#: As fast as scripted workers are, so that a tenth of a second is far too long.
PROFILE = Profile(
    hardware="scripted",
    model="m",
    prefill=Curve.through([(1, 1e-6), (2, 2e-6)], from_zero=True),
    kv=Curve.through([(0, 1), (1, 11)]),
    decode=DecodeProfile(base_s=1e-4, per_sequence_s=0.0, max_batch=1000),
)
BREAKERS = BreakerParams(min_outcomes=3, slow_slack_s=0.2, rest_s=0.3, max_rest_s=0.3)


class Guarded(Router):
    """One that knows how long a prefill should take."""

    def __init__(self, *nodes: Node, hedging: Hedging | None = None) -> None:
        super().__init__(TCP, *(replace(each, hardware="scripted") for each in nodes))
        routing = RoutingParams(threshold_tokens=LONG_TOKENS, mode=Mode.ALWAYS, profiles={"scripted": PROFILE})
        self.steering = Steering(
            RegionId("west"), routing, time.monotonic(), DemandParams(), breakers=BREAKERS, hedging=hedging
        )
        self.ports = LiveServePorts(AsyncioClock(), lambda: self.view, self.links, self.new_id, self.steering)


async def guarded(stack: AsyncExitStack, *workers: ScriptedRuntime, hedging: Hedging | None = None) -> Guarded:
    ports = [(await stack.enter_async_context(serving(TCP, worker))).port for worker in workers]
    router = Guarded(*(node(each.node, port) for each, port in zip(workers, ports, strict=True)), hedging=hedging)
    stack.push_async_callback(router.links.close)
    return router


async def test_field_C20_a_prefill_node_that_falls_silent_is_left_alone_and_then_used_again():
    """It hears commands and never answers. Every request has its right answer long before any timeout; soon no more of
    them go there, and once it answers again they do."""
    stuck, well, decode = ScriptedRuntime("p0", 1, silent=Prefill), ScriptedRuntime("p1", 1), ScriptedRuntime("d0", 1)
    async with asyncio.timeout(4 * PATIENCE_S), AsyncExitStack() as stack:
        router = await guarded(stack, stuck, well, decode)
        breakers = router.steering.breakers
        began_s, first = time.monotonic(), 0
        while (Guard.SOURCE, "p0") not in {state[:2] for state in breakers.states(time.monotonic())}:
            first += 8
            asked = [prompt(64, first + number) for number in range(8)]
            answers = await asyncio.gather(*map(router.complete, asked))
            assert answers == [completion(request.prompt, 20) for request in asked]
        assert time.monotonic() - began_s < PATIENCE_S, "nobody has waited for a timeout"
        breakers.check()

        stories = [Story() for _ in range(20)]
        for number, story in enumerate(stories):
            await router.complete(prompt(64, 1000 + number), story)
        assert sum(story.attempts[0].route.prefill == P0 for story in stories) <= 2, "but for probes"
        assert all(story.attempts[-1].route.prefill == P1 for story in stories)

        stuck.silent = None
        await asyncio.sleep(BREAKERS.max_rest_s)
        used, number = False, 2000
        while not used:
            number += 1
            await router.complete(prompt(64, number), story := Story())
            used = story.attempts[0].route.prefill == P0 and story.attempts[0].ending is Ending.DONE
        assert not list(breakers.states(time.monotonic()))
        assert not decode.sessions[0].held and not stuck.sessions[0].held


async def test_where_everything_is_open_prompts_stay_and_refusals_say_when_to_come_back():
    """Nobody hangs: the decode node does it all, as long as it has room."""
    stuck, decode = ScriptedRuntime("p0", 1, silent=Prefill), ScriptedRuntime("d0", 1)
    async with asyncio.timeout(4 * PATIENCE_S), AsyncExitStack() as stack:
        router = await guarded(stack, stuck, decode)
        for number in range(1, BREAKERS.min_outcomes + 1):
            await router.complete(prompt(64, number))
        await router.complete(prompt(64, 100), story := Story())
        [attempt] = story.attempts
        assert (attempt.route.prefill, attempt.route.reason) == (D0, Reason.BREAKER_OPEN)

        decode.room = 0
        with pytest.raises(Overloaded) as refused:
            await router.complete(prompt(64, 101))
        assert refused.value.retry_after_s >= 0.25


async def test_a_hedge_answers_for_a_prefill_that_is_stuck():
    """The decode node begins the same and is first; the stuck one is told to let go, and nothing is held anywhere."""
    stuck, decode = ScriptedRuntime("p0", 1, silent=Prefill), ScriptedRuntime("d0", 1)
    async with asyncio.timeout(4 * PATIENCE_S), AsyncExitStack() as stack:
        hedging = Hedging(HedgeParams(least_s=0.05))
        router = await guarded(stack, stuck, decode, hedging=hedging)
        answer = await router.complete(prompt(64), story := Story())
        assert answer == completion(prompt(64).prompt, 20)
        assert [attempt.ending for attempt in story.attempts] == [Ending.CANCELLED, Ending.DONE]
        assert (story.attempts[1].route.path, story.attempts[1].route.reason) == (Path.LOCAL, Reason.HEDGE)
        assert await stuck.heard(Cancel) == story.attempts[0].id
        assert (hedging.started, hedging.won) == (1, 1)
        assert not decode.sessions[0].held
