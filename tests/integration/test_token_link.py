"""The token link end to end, over loopback between the router's ports and a worker that answers by rule: one contract
for both adapters, gRPC and plain TCP. What is special about either is in test_token_link_grpc and test_token_link_tcp.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import structlog
import uvloop

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import DeadlineExceeded, EngineFailed, Overloaded, PeerUnavailable, Stopping
from prfaas.flows.ports import PrefillReport, Reservation
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Story
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import LinkParams, LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.steering import Steering
from prfaas.node.link_server import MAX_WAITING_EVENTS
from prfaas.request import AttemptId, Pull, Reason, Request, RequestId, Route, Sampling
from prfaas.request import Path as Way
from prfaas.rpc.commands import Cancel, Decode, Prefill, Reserve, Reserved, Tokens
from prfaas.rpc.translate import MAX_COMMAND_BYTES, MAX_MESSAGE_BYTES
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from tests.integration.link_adapters import ADAPTERS, GRPC, TCP, Adapter, Server
from tests.integration.scripted_worker import COMMANDS, ScriptedRuntime, completion, permit

#: Longer than anything here takes on a busy machine; reached only when something hangs.
PATIENCE_S = 10.0
#: In these tests everything long goes to the prefill worker, everything else stays.
LONG_TOKENS = 32

P0, D0, D1 = NodeId("p0"), NodeId("d0"), NodeId("d1")


def node(node_id: NodeId, port: int, incarnation: int = 1) -> Node:
    prefills = node_id.startswith("p")
    return Node(
        id=node_id,
        region=RegionId("east" if prefills else "west"),
        kind=NodeKind.PREFILL_WORKER if prefills else NodeKind.PD,
        role=Role.PREFILL if prefills else Role.MIXED,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("n"),
        model="m",
        rpc_address=f"127.0.0.1:{port}",
        link_address=f"127.0.0.1:{port}",
        kv_addresses={"": "127.0.0.1:1"},
        max_context_tokens=2_000_000,
    )


def view(*nodes: Node) -> ClusterView:
    decode = tuple(n.id for n in nodes if n.kind is NodeKind.PD)
    prefill = tuple(n.id for n in nodes if n.kind is not NodeKind.PD)
    return ClusterView(nodes={n.id: n for n in nodes}, remote_prefill=prefill, local_prefill=decode, decode=decode)


def route(request: Request, decode: NodeId, prefill: NodeId, pull: Pull | None = None) -> Route:
    return Route(
        prefill=prefill,
        decode=decode,
        path=Way.LOCAL if prefill == decode else Way.REMOTE,
        reason=Reason.MODE_ALWAYS,
        uncached_tokens=request.prompt_tokens,
        transfer_tokens=0,
        threshold_tokens=0,
        pull=pull,
    )


class Router:
    """A router process as far as its links go: a view, a pool of links and the ports over them."""

    def __init__(self, via: Adapter, *nodes: Node, params: LinkParams | None = None) -> None:
        self.view, self.counters, self._ids = view(*nodes), LinkCounters(), count(1)
        params = params or LinkParams()
        self.links = LinkPool(lambda n: via.link(n, params, self.counters))
        routing = RoutingParams(threshold_tokens=LONG_TOKENS)
        self.steering = Steering(RegionId("west"), routing, time.monotonic(), DemandParams())
        self.ports = LiveServePorts(AsyncioClock(), lambda: self.view, self.links, self.new_id, self.steering)

    def new_id(self) -> AttemptId:
        return AttemptId(f"{next(self._ids):032x}")

    async def reserve(
        self, request: Request, decode: NodeId = D0, source: NodeId | None = None, pull: Pull | None = None
    ) -> Reservation:
        return await self.ports.reserve(self.new_id(), request, route(request, decode, source or decode, pull))

    async def prefill(
        self, request: Request, reservation: Reservation, source: NodeId, pull: Pull | None = None
    ) -> PrefillReport:
        way = route(request, reservation.decode, source, pull)
        return await self.ports.prefill(way, reservation.attempt, request, reservation)

    async def complete(self, request: Request, story: Story | None = None, **limits: float) -> list[int]:
        params = serve_params(**limits)
        stream = serve(request, {}, params, self.ports, story if story is not None else Story())
        async with aclosing(stream):
            return [token async for batch in stream for token in unpack(batch.tokens)]


def serve_params(**changed: float) -> ServeParams:
    limits = {
        "reserve_timeout_s": PATIENCE_S,
        "prefill_timeout_s": PATIENCE_S,
        "first_token_timeout_s": PATIENCE_S,
        "token_gap_timeout_s": PATIENCE_S,
    }
    return ServeParams(prefill_timeout_s_per_token=0.0, **(limits | changed))


@asynccontextmanager
async def router(via: Adapter, *nodes: Node, params: LinkParams | None = None) -> AsyncIterator[Router]:
    process = Router(via, *nodes, params=params)
    try:
        async with asyncio.timeout(4 * PATIENCE_S):
            yield process
    finally:
        await process.links.close()


@asynccontextmanager
async def serving(via: Adapter, runtime: ScriptedRuntime, port: int = 0) -> AsyncIterator[Server]:
    server = await via.serve(runtime, "127.0.0.1", port)
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(
    via: Adapter, node_id: NodeId, incarnation: int = 1, port: int = 0, silent: str | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A worker process of its own, and its port."""
    script = Path(__file__).with_name("scripted_worker.py")
    arguments = [str(script), node_id, str(incarnation), str(port), "--link", via.name]
    arguments += ["--silent", silent] if silent else []
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert worker.stdout is not None
        line = await asyncio.wait_for(worker.stdout.readline(), 3 * PATIENCE_S)
        yield worker, int(line)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


def prompt(tokens: int, first: int = 1) -> Request:
    ids = struct.pack(f"<{tokens}I", *(first + position for position in range(tokens)))
    return Request(id=RequestId(f"{first:032x}"), model="m", prompt=ids, sampling=Sampling(max_tokens=20))


def unpack(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}I", tokens)


async def failures(tasks: Iterable[asyncio.Task[object]], within_s: float = PATIENCE_S) -> list[BaseException | None]:
    done, pending = await asyncio.wait(list(tasks), timeout=within_s)
    assert not pending
    return [task.exception() for task in done]


@pytest.fixture(params=ADAPTERS.values(), ids=ADAPTERS)
def via(request: pytest.FixtureRequest) -> Adapter:
    adapter: Adapter = request.param
    return adapter


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 64], ids=["prefilled where it decodes", "prefilled in another region"])
async def test_many_requests_share_one_link_and_keep_their_order(via: Adapter, tokens: int):
    """Each of 64 requests at once gets exactly its own tokens, in order, over one connection per worker; commands and
    events that come together travel together."""
    prefill, decode = ScriptedRuntime("p0", 1), ScriptedRuntime("d0", 1)
    async with (
        serving(via, prefill) as p,
        serving(via, decode) as d,
        router(via, node(P0, p.port), node(D0, d.port)) as process,
    ):
        requests = [prompt(tokens, first) for first in range(1, 65)]
        answers = await asyncio.gather(*(process.complete(request) for request in requests))
        assert answers == [completion(request.prompt, 20) for request in requests]
        counters = process.counters
        assert counters.connections == (2 if tokens > LONG_TOKENS else 1)
        assert counters.events >= 64 * 23
        assert counters.messages_received * 4 < counters.events
        assert counters.messages_sent * 4 < counters.commands
        assert counters.late_events == 0
        assert not decode.sessions[0].held


async def test_the_worker_hears_the_whole_request(via: Adapter):
    """Reserve, prefill and decode carry what the flow decided: source, destination, sampling, prompt."""
    prefill, decode = ScriptedRuntime("p0", 1), ScriptedRuntime("d0", 5)
    async with (
        serving(via, prefill) as p,
        serving(via, decode) as d,
        router(via, node(P0, p.port), node(D0, d.port, 5)) as process,
    ):
        request, story = prompt(64), Story()
        await process.complete(request, story)
        assert story.prefill is not None
        assert (story.prefill.prefill_tokens, story.prefill.kv_bytes, story.recomputed_tokens) == (63, 630, 1)
        await prefill.heard(Cancel)
        (_, reserve), (_, take_over) = decode.sessions[0].heard
        (_, compute), _ = prefill.sessions[0].heard
    assert isinstance(reserve, Reserve)
    assert isinstance(compute, Prefill)
    assert take_over == Decode()
    assert (reserve.request_id, reserve.prompt, reserve.sampling) == (request.id, request.prompt, request.sampling)
    assert (reserve.source_node, reserve.source_region, reserve.source_namespace) == ("p0", "east", "n")
    assert compute.destination is not None
    assert (compute.destination.node, compute.destination.incarnation) == ("d0", 5)
    assert (compute.destination.kv_address, compute.destination.generation) == ("kv.d0.for.east:1", 7)


@pytest.mark.parametrize("regions", ["one region", "two regions"])
async def test_a_hand_over_reaches_the_node_that_decodes_inside_a_region_only(via: Adapter, regions: str):
    """Where both engines have the same network of their own, all commands of the attempt name it, and what the prefill
    hands over goes along with the decode; between regions nobody hears of it."""
    prefill, decode = ScriptedRuntime("d1", 1), ScriptedRuntime("d0", 1)
    inside = regions == "one region"
    prefill.handover = b"where it is" if inside else b""
    can = ("network:x",)
    async with serving(via, prefill) as p, serving(via, decode) as d:
        source = replace(node(D1, p.port), capabilities=can, region=RegionId("west" if inside else "east"))
        async with router(via, source, replace(node(D0, d.port), capabilities=can)) as process:
            request = prompt(64)
            reservation = await process.reserve(request, D0, D1)
            await process.prefill(request, reservation, D1)
            async for _ in process.ports.decode(reservation, request):
                pass
            (_, reserve), (_, take_over) = decode.sessions[0].heard
            [(_, compute)] = prefill.sessions[0].heard
    assert isinstance(reserve, Reserve) and isinstance(compute, Prefill) and compute.destination is not None
    assert {reserve.network, compute.destination.network} == {"x" if inside else ""}
    assert take_over == Decode(handover=prefill.handover)


async def test_the_permit_of_a_reservation_reaches_the_prefill_node_and_nobody_else(via: Adapter):
    """The ticket and the keys of an attempt are in no log line, story or text of what carried them."""
    decode, prefill, story = ScriptedRuntime(D0, 1), ScriptedRuntime(P0, 1), Story()
    with structlog.testing.capture_logs() as lines:
        async with (
            serving(via, decode) as d0,
            serving(via, prefill) as p0,
            router(via, node(D0, d0.port), node(P0, p0.port)) as process,
        ):
            await process.complete(prompt(64), story)
    [(attempt, heard)] = [
        each for session in prefill.sessions for each in session.heard if isinstance(each[1], Prefill)
    ]
    assert heard.destination is not None and heard.destination.permit == permit(attempt)
    reservation = Reservation(
        decode=D0, attempt=attempt, kv_address="", generation=1, incarnation=1, permit=permit(attempt)
    )
    shown = repr((lines, story, heard, reservation, permit(attempt)))
    assert "key" not in shown.replace("key_", "") and "ticket" not in shown


async def test_prompts_of_a_million_tokens_pass(via: Adapter):
    """A burst of prompts that together exceed a message goes out in several, and all are answered."""
    request = Request(id=RequestId("1" * 32), model="m", prompt=bytes(4_000_000), sampling=Sampling(max_tokens=1))
    burst = MAX_MESSAGE_BYTES // len(request.prompt) + 4
    async with serving(via, ScriptedRuntime("d0", 1)) as d, router(via, node(D0, d.port)) as process:
        reserved = await asyncio.gather(*(process.reserve(request) for _ in range(burst)))
        assert len({reservation.attempt for reservation in reserved}) == burst
        assert 1 < process.counters.messages_sent < burst


async def test_a_refusal_reaches_the_router_with_its_facts(via: Adapter):
    """A worker without room says when to come back."""
    async with serving(via, ScriptedRuntime("d0", 1, room=1)) as d, router(via, node(D0, d.port)) as process:
        await process.reserve(prompt(8))
        with pytest.raises(Overloaded) as refused:
            await process.reserve(prompt(8))
        assert (refused.value.resource, refused.value.retry_after_s) == ("kv", 0.25)


def test_both_ends_run_on_uvloop(via: Adapter):
    """The router's event loop in production."""

    async def story() -> list[int]:
        async with serving(via, ScriptedRuntime("d0", 1)) as d, router(via, node(D0, d.port)) as process:
            return await process.complete(prompt(8))

    assert uvloop.run(story()) == completion(prompt(8).prompt, 20)


# -- letting go -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["reserve", "prefill", "decode"])
async def test_field_D1_a_client_that_leaves_cancels_both_workers(via: Adapter, stage: str):
    """Wherever the request waits when its client leaves, each worker that heard of it is told, and holds nothing."""
    kind = COMMANDS[stage]
    prefill, decode = ScriptedRuntime("p0", 1, silent=kind), ScriptedRuntime("d0", 1, silent=kind)
    async with (
        serving(via, prefill) as p,
        serving(via, decode) as d,
        router(via, node(P0, p.port), node(D0, d.port)) as process,
    ):
        client = asyncio.create_task(process.complete(prompt(64)))
        attempt = await (prefill if kind is Prefill else decode).heard(kind)
        client.cancel()
        assert await decode.heard(Cancel) == attempt
        assert not decode.sessions[0].held
        if kind is not Reserve:
            assert await prefill.heard(Cancel) == attempt


async def test_field_A8_a_client_that_leaves_between_prefill_and_decode_strands_nothing(via: Adapter):
    """The hand-off is the router's: the reservation is given back although the worker never heard of its decode."""
    prefill, decode = ScriptedRuntime("p0", 1), ScriptedRuntime("d0", 1)
    async with (
        serving(via, prefill) as p,
        serving(via, decode) as d,
        router(via, node(P0, p.port), node(D0, d.port)) as process,
    ):
        request = prompt(64)
        reservation = await process.reserve(request, D0, P0)
        await process.prefill(request, reservation, P0)
        assert list(decode.sessions[0].held) == [reservation.attempt]
        process.ports.release(P0, reservation.attempt)
        process.ports.release(D0, reservation.attempt)
        assert await decode.heard(Cancel) == reservation.attempt
        assert not decode.sessions[0].held


async def test_field_D2_what_has_ended_is_not_cancelled_and_release_may_be_repeated(via: Adapter):
    """After its last token a worker holds nothing; a second release of the same attempt says nothing more."""
    decode = ScriptedRuntime("d0", 1, room=1)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        await process.complete(prompt(8))
        reservation = await process.reserve(prompt(8))
        with pytest.raises(Overloaded):
            await process.complete(prompt(8), max_attempts=1)
        for _ in range(3):
            process.ports.release(D0, reservation.attempt)
        assert await decode.heard(Cancel) == reservation.attempt
        await process.complete(prompt(8))
        assert [owner for owner, said in decode.sessions[0].heard if said == Cancel()] == [reservation.attempt]


async def test_events_of_a_released_attempt_are_dropped_and_counted(via: Adapter):
    """A worker that goes on after a cancel disturbs nobody."""
    decode = ScriptedRuntime("d0", 1, deaf=True)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        request = prompt(8)
        reservation = await process.reserve(request)
        await process.prefill(request, reservation, D0)
        async with aclosing(process.ports.decode(reservation, request)) as stream:
            await anext(stream)
            process.ports.release(D0, reservation.attempt)
            with pytest.raises(PeerUnavailable):
                await anext(stream)
        other = prompt(8, 500)
        assert await process.complete(other) == completion(other.prompt, 20)
        assert process.counters.late_events > 0


async def test_a_router_that_closes_its_links_leaves_nothing_behind(via: Adapter):
    """The end of the stream ends the session, and with it every reservation of that router and of no other."""
    decode = ScriptedRuntime("d0", 1)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as stays:
        await stays.reserve(prompt(8))
        async with router(via, node(D0, d.port)) as leaves:
            await leaves.reserve(prompt(8))
            held = decode.sessions[1].held
            assert held
        await asyncio.wait_for(decode.sessions[1].closed.wait(), PATIENCE_S)
        assert not held
        assert decode.sessions[0].held


async def test_a_router_that_stops_blames_itself_and_begins_nothing_anew(via: Adapter):
    """No worker has failed: the request ends with the router's own name, and none of the others gets it."""
    silent, other = ScriptedRuntime("d0", 1, silent=Decode), ScriptedRuntime("d1", 1)
    async with serving(via, silent) as d0, serving(via, other) as d1, router(via, node(D0, d0.port)) as process:
        reservation = await process.reserve(prompt(8))
        await process.prefill(prompt(8), reservation, D0)
        tokens = process.ports.decode(reservation, prompt(8))
        waiting = [
            asyncio.create_task(process.complete(prompt(8), max_attempts=3)),
            asyncio.ensure_future(anext(tokens)),
        ]
        await silent.heard(Decode, times=2)
        process.view = view(node(D0, d0.port), node(D1, d1.port))
        await process.links.close()
        errors = await failures(waiting)
        assert [(type(error), str(error)) for error in errors] == [(Stopping, "the router is stopping")] * 2
        with pytest.raises(Stopping):
            await process.reserve(prompt(8), D1)
        assert other.sessions == []


async def test_what_the_cache_has_to_do_with_it_reaches_the_workers(via: Adapter):
    """The tenant's salt and the trace go to both; the tenant's weight, what the decode node has already, and where else
    to look, to the prefill node; and what came of it back into the report. After a failure neither uses a cache."""
    prefill, decode = ScriptedRuntime("p0", 1), ScriptedRuntime("d0", 1)
    decode.held_tokens, prefill.cached_tokens, prefill.pulled_bytes = 128, 512, 4096
    async with (
        serving(via, prefill) as p,
        serving(via, decode) as d,
        router(via, node(P0, p.port), node(D0, d.port)) as process,
    ):
        traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
        request = replace(prompt(640), salt=b"salt", tenant="acme", weight=2.5, traceparent=traceparent)
        pull = Pull(source=D0, tokens=64, chosen=True)
        reservation = await process.reserve(request, D0, P0, pull)
        report = await process.prefill(request, reservation, P0, pull)
        ((_, reserve),) = decode.sessions[0].heard
        ((_, told),) = prefill.sessions[0].heard
        assert isinstance(reserve, Reserve) and isinstance(told, Prefill) and told.destination is not None
        for command in (reserve, told):
            assert (command.salt, command.tenant, command.use_cache) == (b"salt", "acme", True)
            assert command.traceparent == traceparent
        assert told.weight == 2.5
        assert (told.destination.held_tokens, told.pull_region) == (128, process.view.nodes[D0].region)
        assert (report.cached_tokens, report.pulled_bytes) == (512, 4096)
        without = replace(route(request, D0, P0), use_cache=False)
        kept = await process.ports.reserve(process.new_id(), request, without)
        await process.ports.prefill(without, kept.attempt, request, kept)
        for session in (prefill.sessions[0], decode.sessions[0]):
            last = session.heard[-1][1]
            assert isinstance(last, (Reserve, Prefill)) and not last.use_cache
        assert isinstance(last := prefill.sessions[0].heard[-1][1], Prefill) and last.pull_region is None


# -- workers that die, hang or are not there --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["reserve", "prefill", "decode"])
async def test_field_C2_a_killed_worker_fails_every_open_attempt_at_once(via: Adapter, stage: str):
    """SIGKILL at each step: nobody waits for a deadline, and other workers' requests go on."""
    async with (
        running(via, D0, silent=stage) as (worker, port),
        serving(via, ScriptedRuntime("d1", 1)) as other,
        router(via, node(D0, port), node(D1, other.port)) as process,
    ):

        async def attempt(first: int) -> None:
            request = prompt(8, first)
            reservation = await process.reserve(request)
            await process.prefill(request, reservation, D0)
            async for _ in process.ports.decode(reservation, request):
                pass

        attempts = [asyncio.create_task(attempt(first)) for first in range(1, 17)]
        assert worker.stdout is not None
        for _ in attempts:
            assert await asyncio.wait_for(worker.stdout.readline(), PATIENCE_S)
        elsewhere = await process.reserve(prompt(8), D1)
        worker.kill()
        errors = await failures(attempts, within_s=2.0)
        assert [(type(error), getattr(error, "peer", None)) for error in errors] == [(PeerUnavailable, D0)] * 16
        process.ports.release(D1, elsewhere.attempt)
        assert await process.complete(prompt(8), max_attempts=2) == completion(prompt(8).prompt, 20)


async def test_a_lost_reservation_ends_the_prefill_that_was_meant_for_it(via: Adapter):
    """The decode worker dies while another prefills toward it: the router does not wait for the prefill to find out."""
    prefill = ScriptedRuntime("p0", 1, silent=Prefill)
    async with (
        serving(via, prefill) as p,
        running(via, D0) as (worker, port),
        router(via, node(P0, p.port), node(D0, port)) as process,
    ):
        request = prompt(64)
        reservation = await process.reserve(request, D0, P0)
        waiting = asyncio.create_task(process.prefill(request, reservation, P0))
        await prefill.heard(Prefill)
        worker.kill()
        (error,) = await failures([waiting])
        assert isinstance(error, PeerUnavailable)
        assert error.peer == D0


async def test_a_worker_that_stops_answering_is_noticed_by_its_silence(via: Adapter):
    """A half-open connection: the peer's machine still takes bytes, nobody reads them."""
    params = LinkParams(keepalive_s=0.5, keepalive_timeout_s=0.5)
    async with (
        running(via, D0, silent="prefill") as (worker, port),
        router(via, node(D0, port), params=params) as process,
    ):
        request = prompt(8)
        reservation = await process.reserve(request)
        waiting = asyncio.create_task(process.prefill(request, reservation, D0))
        worker.send_signal(signal.SIGSTOP)
        (error,) = await failures([waiting])
        assert isinstance(error, PeerUnavailable)


@pytest.mark.parametrize("via", [pytest.param(GRPC, id="grpc", marks=pytest.mark.slow), pytest.param(TCP, id="tcp")])
async def test_an_idle_link_stays_open_however_often_it_is_checked(via: Adapter):
    """Keepalive pings on an idle link, one a second, are not taken for an attack, as the third would be by default."""
    params, wait_s = LinkParams(keepalive_s=0.1, keepalive_timeout_s=5.0), 6.0
    if via is TCP:
        params, wait_s = LinkParams(keepalive_s=0.1, keepalive_timeout_s=0.5), 1.5
    async with serving(via, ScriptedRuntime("d0", 1)) as d, router(via, node(D0, d.port), params=params) as process:
        reservation = await process.reserve(prompt(8))
        lost = asyncio.create_task(process.ports._held(reservation).lost())
        done, _ = await asyncio.wait({lost}, timeout=wait_s)
        lost.cancel()
        assert not done


@pytest.mark.parametrize("accepts", [False, True], ids=["never accepts", "accepts and is silent"])
async def test_field_C12_a_black_hole_costs_its_own_requests_the_connect_timeout_and_others_nothing(
    via: Adapter, accepts: bool
):
    """Whoever needs the dead worker hears of it in time, then at once; requests of a live worker go on meanwhile."""
    params = LinkParams(connect_s=0.5, backoff_s=PATIENCE_S, max_backoff_s=PATIENCE_S)
    accepted = []
    with closing(socket.create_server(("127.0.0.1", 0), backlog=1)) as hole:
        if accepts:
            asyncio.get_running_loop().add_reader(hole, lambda: accepted.append(hole.accept()))
        async with (
            serving(via, ScriptedRuntime("d1", 1)) as d,
            router(via, node(D0, hole.getsockname()[1]), node(D1, d.port), params=params) as process,
        ):
            stuck = [asyncio.create_task(process.reserve(prompt(8))) for _ in range(4)]
            await process.reserve(prompt(8), D1)
            assert not any(task.done() for task in stuck)
            errors = await failures(stuck)
            assert all(isinstance(error, PeerUnavailable) and "within 0.5 s" in error.detail for error in errors)
            again = asyncio.create_task(process.reserve(prompt(8)))
            (error,) = await failures([again], within_s=params.connect_s / 2)
            assert isinstance(error, PeerUnavailable)
        asyncio.get_running_loop().remove_reader(hole)
    for connection, _ in accepted:
        connection.close()


async def test_an_address_where_nobody_listens_is_known_at_once(via: Adapter):
    """A refused connection does not use up the connect timeout."""
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    async with router(via, node(D0, port), params=LinkParams(connect_s=3 * PATIENCE_S)) as process:
        (error,) = await failures([asyncio.create_task(process.reserve(prompt(8)))])
        assert isinstance(error, PeerUnavailable)


async def test_a_restarted_worker_is_another_life_on_the_same_port(via: Adapter):
    """Until the view knows the new incarnation, nothing is sent to it; with it, requests flow again."""
    params = LinkParams(backoff_s=0.01, max_backoff_s=0.01)
    async with router(via, params=params) as process:
        async with running(via, D0, 1) as (worker, port):
            process.view = view(node(D0, port, 1))
            await process.complete(prompt(8))
            worker.kill()
        async with running(via, D0, 2, port):
            with pytest.raises(PeerUnavailable, match="another life"):
                await process.reserve(prompt(8))
            process.view = view(node(D0, port, 2))
            assert (await process.reserve(prompt(8))).incarnation == 2


async def test_a_broken_link_is_made_anew_when_it_is_next_used(via: Adapter):
    """The worker goes on living while its connection does not: same incarnation, new stream."""
    decode = ScriptedRuntime("d0", 1)
    async with router(via, params=LinkParams(backoff_s=0.01, max_backoff_s=0.01)) as process:
        async with serving(via, decode) as d:
            process.view = view(node(D0, d.port))
            reservation = await process.reserve(prompt(8))
            lost = asyncio.create_task(process.ports._held(reservation).lost())
        (error,) = await failures([lost])
        assert isinstance(error, PeerUnavailable)
        async with serving(via, decode, d.port):
            assert await process.complete(prompt(8)) == completion(prompt(8).prompt, 20)
        assert process.counters.connections == 2


@pytest.mark.parametrize("stage", ["reserve", "prefill", "decode"])
async def test_field_C1_an_answer_that_never_comes_ends_with_its_deadline(via: Adapter, stage: str):
    """Each answer is dropped once: the request ends with an error that names the wait, and the worker is told."""
    decode = ScriptedRuntime("d0", 1, silent=COMMANDS[stage])
    limits = {"reserve_timeout_s": 0.2, "prefill_timeout_s": 0.2, "first_token_timeout_s": 0.2}
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        with pytest.raises(DeadlineExceeded) as late:
            await process.complete(prompt(8), max_attempts=1, **limits)
        assert late.value.stage == {"decode": "first token"}.get(stage, stage)
        await decode.heard(Cancel)
        assert not decode.sessions[0].held


# -- the pool ---------------------------------------------------------------------------------------------------------


async def test_a_node_that_leaves_the_view_keeps_its_link_until_its_last_attempt_ends(via: Adapter):
    """A lost lease is not a lost worker: what it is serving goes on, and nothing new is sent there."""
    decode = ScriptedRuntime("d0", 1)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        request = prompt(8)
        reservation = await process.reserve(request)
        process.view = view()
        with pytest.raises(PeerUnavailable, match="left"):
            await process.reserve(request)
        stream = process.ports.decode(reservation, request)
        assert [t async for batch in stream for t in unpack(batch.tokens)] == completion(request.prompt, 20)
        process.ports.release(D0, reservation.attempt)
        process.view = view()
        process.ports.view()
        await asyncio.wait_for(decode.sessions[0].closed.wait(), PATIENCE_S)


async def test_the_link_to_an_earlier_life_is_dropped_with_its_attempts(via: Adapter):
    """Once the view shows a new incarnation, whoever still waits for the old one hears that it is gone."""
    decode = ScriptedRuntime("d0", 1, silent=Prefill)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        request = prompt(8)
        reservation = await process.reserve(request)
        waiting = asyncio.create_task(process.prefill(request, reservation, D0))
        await decode.heard(Prefill)
        process.view = view(node(D0, d.port, 2))
        process.ports.view()
        (error,) = await failures([waiting])
        assert isinstance(error, PeerUnavailable)
        await asyncio.wait_for(decode.sessions[0].closed.wait(), PATIENCE_S)


# -- nonsense on the wire ---------------------------------------------------------------------------------------------


GOOD = bytes(range(16))


@pytest.mark.parametrize(
    ("nonsense", "param"),
    [
        (pb.Command(attempt=b"short", cancel=pb.Cancel()), "attempt"),
        (pb.Command(attempt=bytes(100_000), cancel=pb.Cancel()), "attempt"),
        (pb.Command(attempt=GOOD), "kind"),
        (pb.Command(attempt=GOOD, reserve=pb.Reserve(prompt=b"12345")), "prompt"),
        (pb.Command(attempt=GOOD, prefill=pb.Prefill(prompt=bytes(MAX_COMMAND_BYTES))), "prompt"),
    ],
    ids=["short attempt", "long attempt", "no kind", "odd prompt", "too large"],
)
async def test_nonsense_is_answered_and_the_stream_lives_on(via: Adapter, nonsense: pb.Command, param: str):
    """A command that cannot be read fails by itself; the next one on the same stream is carried out."""
    good = pb.Command(attempt=bytes(16), reserve=pb.Reserve(prompt=b"1234"))
    async with serving(via, ScriptedRuntime("d0", 1)) as server, via.raw(node(D0, server.port)) as raw:
        await raw.write(pb.ToWorker(commands=[nonsense, good]))
        events: list[pb.Event] = []
        while len(events) < 2:
            events.extend((await raw.read()).events)
        assert (events[0].failed.code, events[0].failed.param) == ("invalid_request", param)
        assert events[0].attempt == nonsense.attempt[:32]
        assert events[1].attempt == bytes(16)
        assert events[1].WhichOneof("kind") == "reserved"


async def test_nonsense_about_an_attempt_ends_what_the_attempt_holds(via: Adapter):
    """After Failed the worker holds nothing, also when the worker's own link has failed it."""
    runtime = ScriptedRuntime("d0", 1)
    async with serving(via, runtime) as server, via.raw(node(D0, server.port)) as raw:
        await raw.write(pb.ToWorker(commands=[pb.Command(attempt=GOOD, reserve=pb.Reserve(prompt=b"1234"))]))
        await runtime.heard(Reserve)
        assert runtime.sessions[0].held
        await raw.write(pb.ToWorker(commands=[pb.Command(attempt=GOOD, prefill=pb.Prefill(prompt=b"1"))]))
        await runtime.heard(Cancel)
        assert not runtime.sessions[0].held


async def test_a_router_that_does_not_read_loses_its_link(via: Adapter):
    """The worker's memory is bounded: the session is closed, not grown."""
    runtime = ScriptedRuntime("d0", 1)
    async with serving(via, runtime) as server, via.raw(node(D0, server.port)) as raw:
        await raw.write(pb.ToWorker(commands=[pb.Command(attempt=GOOD, cancel=pb.Cancel())]))
        attempt = await runtime.heard(Cancel)
        for _ in range(MAX_WAITING_EVENTS + 1):
            runtime.sessions[0].emit(attempt, Tokens(tokens=b"1234"))
        await asyncio.wait_for(runtime.sessions[0].closed.wait(), PATIENCE_S)
        await raw.cut()


async def test_a_worker_that_says_too_much_fails_its_attempt_alone(via: Adapter):
    """The router's memory is bounded by what an attempt may produce; the worker is told to stop."""
    decode = ScriptedRuntime("d0", 1)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        request = prompt(8)
        reservation, other = await process.reserve(request), await process.reserve(request)
        for _ in range(100):
            decode.sessions[0].emit(reservation.attempt, Tokens(tokens=b"1234"))
        with pytest.raises(PeerUnavailable, match="more than"):
            await process.ports._held(reservation).lost()
        process.ports.release(D0, reservation.attempt)
        assert await decode.heard(Cancel) == reservation.attempt
        stream = process.ports.decode(other, request)
        assert [t async for batch in stream for t in unpack(batch.tokens)] == completion(request.prompt, 20)


async def test_a_worker_that_answers_something_else_fails_its_attempt(via: Adapter):
    """Reserved twice is no report of a prefill."""
    decode = ScriptedRuntime("d0", 1, silent=Prefill)
    async with serving(via, decode) as d, router(via, node(D0, d.port)) as process:
        request = prompt(8)
        reservation = await process.reserve(request)
        again = Reserved(kv_address="x", generation=1, incarnation=Incarnation(1))
        decode.sessions[0].emit(reservation.attempt, again)
        with pytest.raises(EngineFailed, match="out of order"):
            await process.prefill(request, reservation, D0)


async def test_a_port_is_one_workers(via: Adapter):
    """A second worker on the same port is an error, not a lottery."""
    async with serving(via, ScriptedRuntime("d0", 1)) as server:
        with pytest.raises(OSError, match="cannot listen"):
            await via.serve(ScriptedRuntime("d1", 1), "127.0.0.1", server.port)
