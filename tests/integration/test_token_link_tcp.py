"""What the TCP adapter of the token link does by itself: greetings, frames, signs of life, and strangers."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId, WireRange
from prfaas.errors import PeerUnavailable
from prfaas.live.link import LinkParams
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.node.link_server import serve_worker
from prfaas.node.link_tcp import LinkServer, serve_link
from prfaas.request import AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Reserve, Reserved, Tokens
from prfaas.rpc.link_connection import who_answers
from prfaas.rpc.link_frames import (
    MAX_GREETING_BYTES,
    Kind,
    frame,
    greeting,
    header,
    read_greeting,
)
from prfaas.rpc.translate import MAX_MESSAGE_BYTES
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.security import PeerRole
from tests.integration.link_adapters import RawTcp, raw_tcp
from tests.integration.scripted_worker import ScriptedRuntime

#: Longer than anything here takes on a busy machine; reached only when something hangs.
LIVENESS_S = 10.0
GREETING_S = 0.3
D0, LIFE, ATTEMPT = NodeId("d0"), Incarnation(1), AttemptId("ab" * 16)
GOOD = pb.ToWorker(commands=[pb.Command(attempt=bytes(16), reserve=pb.Reserve(prompt=b"1234"))])


@asynccontextmanager
async def serving(runtime: ScriptedRuntime | None = None, **options: float) -> AsyncIterator[LinkServer]:
    server = await serve_link(
        runtime or ScriptedRuntime(D0, LIFE), "127.0.0.1", 0, **{"greeting_s": GREETING_S} | options
    )
    try:
        async with asyncio.timeout(3 * LIVENESS_S):
            yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def link(port: int, node: NodeId = D0, life: Incarnation = LIFE, **params: float) -> AsyncIterator[TcpTokenLink]:
    settings = LinkParams(**{"connect_s": LIVENESS_S} | params)
    made = TcpTokenLink(f"127.0.0.1:{port}", node, life, params=settings, counters=LinkCounters())
    try:
        yield made
    finally:
        await made.close()


def reserve(prompt: bytes = bytes(8)) -> Reserve:
    return Reserve(
        request_id=RequestId("r"),
        prompt=prompt,
        sampling=Sampling(max_tokens=1),
        source_node=D0,
        source_region=RegionId("b"),
        source_namespace=Namespace("n"),
        deadline_s=10.0,
    )


async def linked(raw: RawTcp) -> None:
    raw.writer.write(greeting(D0, LIFE))
    answer = await raw.frame()
    assert answer is not None and not read_greeting(*answer).refused


async def answers(raw: RawTcp) -> None:
    """It is a link that works."""
    await raw.write(GOOD)
    assert (await raw.read()).events[0].WhichOneof("kind") in ("reserved", "failed")


# -- greetings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (greeting(NodeId("d1"), LIFE), "another life, or another node: d0"),
        (greeting(D0, Incarnation(2)), "another life, or another node: d0"),
        (greeting(D0, LIFE, wire=WireRange(7, 9)), "speaks version 1 of the token link, not 7 to 9"),
    ],
    ids=["another node", "another life", "another version"],
)
async def test_a_worker_says_why_there_is_no_link(sent: bytes, reason: str):
    """And who it is; then it closes, and nothing has become a session."""
    runtime = ScriptedRuntime(D0, LIFE)
    async with serving(runtime) as server, raw_tcp(server.port) as raw:
        raw.writer.write(sent)
        answer = await raw.frame()
        assert answer is not None
        said = read_greeting(*answer)
        assert reason in said.refused
        assert (said.node, said.incarnation) == (D0, LIFE)
        assert await raw.frame() is None
        assert not runtime.sessions


async def answering(greeted: bytes) -> asyncio.Server:
    """A worker of another kind: whatever it is told it answers this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(greeted)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("greeted", "reason"),
    [
        (greeting(D0, Incarnation(2)), "another life"),
        (greeting(NodeId("d1"), LIFE), "another node: d1"),
        (greeting(D0, LIFE, wire=WireRange(2, 3)), "speaks versions 2 to 3"),
        (greeting(D0, LIFE, "not today"), "not today"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "malformed"),
        (frame(Kind.MESSAGE, b""), "malformed"),
        (frame(Kind.GREETING, b"prfaas"), "malformed"),
        (header(Kind.GREETING, MAX_GREETING_BYTES + 1), "malformed"),
        (b"", "no answer"),
    ],
    ids=["life", "node", "version", "refused", "http", "no greeting", "no magic", "too long", "silence"],
)
async def test_a_router_takes_nobody_else_for_its_worker(greeted: bytes, reason: str):
    """It says what it found instead, and lets go of the connection."""
    async with await answering(greeted) as server:
        port = server.sockets[0].getsockname()[1]
        async with link(port, connect_s=0.3 if not greeted else LIVENESS_S) as refused:
            with pytest.raises(PeerUnavailable, match=reason):
                await refused.open(ATTEMPT, 8)


async def test_who_only_asks_is_told_and_let_go():
    """As a worker does that checks its own address: it is no session."""
    runtime = ScriptedRuntime(D0, 7)
    async with serving(runtime) as server:
        assert await who_answers(f"127.0.0.1:{server.port}", None, PeerRole.DECODE_WORKER) == 7
        await emptied(server)
        assert not runtime.sessions
    assert await who_answers(f"127.0.0.1:{server.port}", None, PeerRole.DECODE_WORKER) is None


async def test_a_worker_started_anew_on_the_same_port_is_no_stranger_to_the_port():
    """Connections of its earlier life do not keep the port from it."""
    async with serving() as first, link(first.port) as old:
        leg = await old.open(ATTEMPT, 8)
        await first.stop(0)
        with pytest.raises(PeerUnavailable):
            await asyncio.wait_for(leg.lost(), LIVENESS_S)
        second = await serve_link(ScriptedRuntime(D0, 2), "127.0.0.1", first.port)
        with pytest.raises(PeerUnavailable, match="another life"):
            await old.open(ATTEMPT, 8)
        async with link(first.port, life=Incarnation(2)) as new:
            await new.open(ATTEMPT, 8)
        await second.stop(0)


# -- strangers --------------------------------------------------------------------------------------------------------


async def emptied(server: LinkServer, connections: int = 0) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while server.connections != connections:  # noqa: ASYNC110 - counted by callbacks of the server's
            await asyncio.sleep(0.01)


async def test_who_says_nothing_is_cut_off():
    """Also who says one byte at a time: the greeting as a whole has a deadline."""
    async with serving() as server, raw_tcp(server.port) as silent, raw_tcp(server.port) as slow:
        trickle = asyncio.create_task(_trickle(slow))
        async with asyncio.timeout(LIVENESS_S):
            assert await silent.frame() is None
            assert await slow.frame() is None
        trickle.cancel()
        await emptied(server)


async def _trickle(slow: RawTcp) -> None:
    with suppress(ConnectionError):
        for byte in greeting(D0, LIFE):
            slow.writer.write(bytes([byte]))
            await asyncio.sleep(GREETING_S / 3)


async def test_places_are_bounded_and_come_free_again():
    """A flood of connections takes no more than its number of places, and links that stand keep theirs."""
    async with serving(max_connections=8) as server, raw_tcp(server.port) as standing:
        await linked(standing)
        strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]
        assert server.connections <= 8
        await answers(standing)
        for _, writer in strangers:
            writer.close()
        await emptied(server, 1)
        async with raw_tcp(server.port) as next_one:
            await linked(next_one)
            await answers(next_one)


@pytest.mark.parametrize("greeted", [False, True], ids=["before the greeting", "after it"])
async def test_arbitrary_bytes_end_their_own_connection_alone(greeted: bool):
    """Whatever comes, the worker lives on, and so does everybody else's link; nothing stays behind."""
    chance = random.Random(7)
    runtime = ScriptedRuntime(D0, LIFE)
    async with serving(runtime) as server, raw_tcp(server.port) as other:
        await linked(other)
        for _ in range(100):
            async with raw_tcp(server.port) as raw:
                if greeted:
                    await linked(raw)
                raw.writer.write(_nonsense(chance))
                with suppress(ConnectionError):
                    raw.writer.write_eof()
                async with asyncio.timeout(LIVENESS_S):
                    while await raw.frame() is not None:
                        pass
        await answers(other)
        await emptied(server, 1)
        assert all(session.closed.is_set() for session in runtime.sessions[1:])


def _nonsense(chance: random.Random) -> bytes:
    body = chance.randbytes(chance.randrange(200))
    match chance.randrange(4):
        case 0:
            return body
        case 1:
            return frame(Kind.MESSAGE, body)
        case 2:
            return frame(chance.choice(list(Kind)), body) + frame(Kind.MESSAGE, GOOD.SerializeToString()[:-1])
        case _:
            return header(Kind.MESSAGE, chance.randrange(MAX_MESSAGE_BYTES, 1 << 32)) + body


async def test_a_message_that_cannot_be_read_breaks_the_link_and_its_attempts_fail():
    """The router's side of it: a worker that sends nonsense is as good as gone."""
    nonsense = greeting(D0, LIFE) + frame(Kind.MESSAGE, b"\xff\xff\xff")
    async with await answering(nonsense) as server, link(server.sockets[0].getsockname()[1]) as broken:
        with pytest.raises(PeerUnavailable, match="malformed"):
            await asyncio.wait_for((await broken.open(ATTEMPT, 8)).lost(), LIVENESS_S)
        assert broken.open_legs == 0


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "nobody says anything"])
async def test_a_worker_that_cannot_be_reached_over_tcp_is_reached_over_grpc(silent: bool):
    """A firewall that knows of one port alone must not make a worker unreachable. When neither answers, it is."""
    runtime = ScriptedRuntime(D0, LIFE)
    worker = await serve_worker(runtime, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        if not silent:
            door.close()
        params, counters = LinkParams(connect_s=2.0), LinkCounters()
        grpc = GrpcTokenLink(f"127.0.0.1:{worker.port}", D0, LIFE, params=params, counters=counters)
        both = TcpTokenLink(f"127.0.0.1:{port}", D0, LIFE, params=params, counters=counters, otherwise=grpc)
        try:
            async with asyncio.timeout(LIVENESS_S):
                leg = await both.open(ATTEMPT, 8)
                leg.send(reserve())
                assert isinstance(await leg.next(), Reserved)
                assert not both.broken and counters.failed_connections == 0
                await worker.stop(0)
                with pytest.raises(PeerUnavailable):
                    await leg.lost()
                with pytest.raises(PeerUnavailable):
                    await both.open(AttemptId("cd" * 16), 8)
                assert both.broken
        finally:
            await both.close()
            await worker.stop(0)


# -- readers that do not read ----------------------------------------------------------------------------------------


async def test_events_in_the_socket_s_way_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch):
    """Few, but long: a router that does not read is cut off by what its events weigh."""
    monkeypatch.setattr("prfaas.node.link_server.MAX_WAITING_BYTES", 1 << 20)
    runtime = ScriptedRuntime(D0, LIFE)
    async with serving(runtime) as server, raw_tcp(server.port) as deaf:
        await linked(deaf)
        await deaf.write(GOOD)
        await runtime.heard(Reserve)
        emitted = 0
        while not runtime.sessions[0].closed.is_set():
            runtime.sessions[0].emit(ATTEMPT, Tokens(tokens=bytes(40_000)))
            emitted += 40_000
            assert emitted < 64 << 20
            await asyncio.sleep(0)
        await deaf.cut()


async def test_who_pings_and_does_not_read_gathers_no_answers():
    """Answers to pings are bounded by what the peer takes."""
    async with serving() as server, raw_tcp(server.port) as deaf:
        await linked(deaf)
        [session] = server._desk.connections
        ping = frame(Kind.PING) * 10_000
        for _ in range(40):
            deaf.writer.write(ping)
            await asyncio.sleep(0)
        async with asyncio.timeout(LIVENESS_S):
            await deaf.writer.drain()
        assert session.unsent_bytes < 1 << 20


# -- signs of life ----------------------------------------------------------------------------------------------------


async def test_a_worker_notices_a_router_that_has_vanished():
    """Its machine still takes what is sent, nobody answers: the session ends, and with it what it held."""
    runtime = ScriptedRuntime(D0, LIFE)
    async with serving(runtime, keepalive_s=0.2, keepalive_timeout_s=0.2) as server, raw_tcp(server.port) as gone:
        await linked(gone)
        await answers(gone)
        assert runtime.sessions[0].held
        await asyncio.wait_for(runtime.sessions[0].closed.wait(), LIVENESS_S)
        assert not runtime.sessions[0].held


async def test_field_C15_a_line_that_goes_silent_is_noticed():
    """Neither side is told: what they send is swallowed. Every attempt fails as with a dead worker."""
    async with (
        serving() as server,
        relay(server.port) as (port, silent),
        link(port, keepalive_s=0.2, keepalive_timeout_s=0.2) as over,
    ):
        leg = await over.open(ATTEMPT, 8)
        leg.send(reserve())
        assert isinstance(await leg.next(), Reserved)
        silent.set()
        with pytest.raises(PeerUnavailable, match="no sign of life"):
            await asyncio.wait_for(leg.lost(), LIVENESS_S)


async def test_new_commands_do_not_hide_that_nobody_reads_them():
    """A kernel takes small things for a long while. That is no sign of life."""
    async with (
        serving() as server,
        relay(server.port) as (port, silent),
        link(port, keepalive_s=0.2, keepalive_timeout_s=0.2) as over,
    ):
        leg = await over.open(ATTEMPT, 8)
        silent.set()
        lost = asyncio.create_task(leg.lost())
        async with asyncio.timeout(LIVENESS_S):
            while not lost.done():
                with suppress(PeerUnavailable):
                    leg.send(reserve())
                await asyncio.sleep(0.02)
        assert isinstance(lost.exception(), PeerUnavailable)


async def test_a_long_prompt_on_a_slow_line_is_no_silence():
    """The ping waits behind it; while it moves on, nobody is taken for dead."""
    runtime = ScriptedRuntime(D0, LIFE)
    async with (
        serving(runtime) as server,
        relay(server.port, bytes_per_s=6 << 20) as (port, _),
        link(port, keepalive_s=0.2, keepalive_timeout_s=0.5) as over,
    ):
        leg = await over.open(ATTEMPT, 8)
        leg.send(reserve(bytes(12 << 20)))
        assert isinstance(await asyncio.wait_for(leg.next(), LIVENESS_S), Reserved)


@asynccontextmanager
async def relay(to: int, bytes_per_s: float | None = None) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A line to a worker that can be slow, or swallow all that is sent once the event is set."""
    silent, pipes = asyncio.Event(), set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not silent.is_set():
                    writer.write(data)
                    await writer.drain()
                if bytes_per_s is not None:
                    await asyncio.sleep(len(data) / bytes_per_s)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
        pipes.update((asyncio.create_task(pipe(reader, far_writer)), asyncio.create_task(pipe(far_reader, writer))))

    listening = socket.socket()
    # What lies in the kernel of the relay, a real line would have as little of.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listening.bind(("127.0.0.1", 0))
    async with await asyncio.start_server(connected, sock=listening, limit=1 << 16) as server:
        yield server.sockets[0].getsockname()[1], silent
        for each in pipes:
            each.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
