"""The token link over TCP with certificates on both sides: who gets in, who does not, and new ones while it runs."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import uvloop

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId
from prfaas.errors import PeerUnavailable
from prfaas.live.link import LinkParams
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.node.link_tcp import LinkServer, serve_link
from prfaas.request import AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Reserve, Reserved
from prfaas.rpc.identity import Identity
from prfaas.rpc.link_connection import who_answers
from prfaas.rpc.link_frames import greeting, read_greeting
from prfaas.security import PeerRole, Refusal
from services.certificates import issue, new_authority, paths, pem_files, write, write_all
from tests.integration.link_adapters import RawTcp
from tests.integration.scripted_worker import ScriptedRuntime

#: Longer than anything here takes on a busy machine; reached only when something hangs.
LIVENESS_S = 10.0
GREETING_S = 1.0
D0, LIFE, ATTEMPT = NodeId("d0"), Incarnation(1), AttemptId("ab" * 16)
ROUTER, DECODE, PREFILL = PeerRole.ROUTER, PeerRole.DECODE_WORKER, PeerRole.PREFILL_WORKER


def identity(folder: Path, role: PeerRole) -> Identity:
    ca, cert, key = pem_files(folder, role)
    return Identity(role, ca=ca, cert=cert, key=key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_all(tmp_path)
    return tmp_path


@asynccontextmanager
async def serving(own: Identity | None) -> AsyncIterator[LinkServer]:
    server = await serve_link(ScriptedRuntime(D0, LIFE), "127.0.0.1", 0, own, greeting_s=GREETING_S)
    try:
        async with asyncio.timeout(4 * LIVENESS_S):
            yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def link(server: LinkServer, own: Identity | None, peer: PeerRole = DECODE) -> AsyncIterator[TcpTokenLink]:
    params = LinkParams(connect_s=LIVENESS_S, backoff_s=0.01)
    address = f"127.0.0.1:{server.port}"
    made = TcpTokenLink(address, D0, LIFE, params=params, counters=LinkCounters(), identity=own, peer=peer)
    try:
        yield made
    finally:
        await made.close()


async def answered(over: TcpTokenLink, attempt: AttemptId = ATTEMPT) -> bool:
    leg = await over.open(attempt, 8)
    leg.send(
        Reserve(
            request_id=RequestId("r"),
            prompt=bytes(8),
            sampling=Sampling(max_tokens=1),
            source_node=D0,
            source_region=RegionId("b"),
            source_namespace=Namespace("n"),
            deadline_s=10.0,
        )
    )
    return isinstance(await asyncio.wait_for(leg.next(), LIVENESS_S), Reserved)


async def refused(server: LinkServer, own: Identity | None, peer: PeerRole = DECODE) -> str:
    """What a router with this identity is told when it wants to link."""
    async with link(server, own, peer) as refusing:
        with pytest.raises(PeerUnavailable) as failed:
            await refusing.open(ATTEMPT, 8)
    return failed.value.detail


async def counted(server: LinkServer, **expected: int) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while {kind.value: count for kind, count in server.refused.items()} != expected:  # noqa: ASYNC110 - a count
            await asyncio.sleep(0.02)


async def cut_off(server: LinkServer, own: ssl.SSLContext | None) -> None:
    """Whoever comes with this, or in plain, gets no link."""
    name = None if own is None else DECODE.dns_name
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=own, server_hostname=name)
        writer.write(greeting(D0, LIFE))
        answer = await asyncio.wait_for(RawTcp(reader, writer).frame(), LIVENESS_S)
        assert answer is None or read_greeting(*answer).refused
        writer.close()
    except OSError:
        pass


# -- who gets in ------------------------------------------------------------------------------------------------------


async def test_a_router_links_and_is_answered(folder: Path):
    """The whole way of a command and its answer, with nobody counted as refused."""
    async with serving(identity(folder, DECODE)) as server, link(server, identity(folder, ROUTER)) as linked:
        assert await answered(linked)
        assert server.refused == {Refusal.HANDSHAKE: 0, Refusal.ROLE: 0}


def test_on_uvloop_as_in_production(folder: Path):
    """Its TLS is another implementation: one that gets in, one that does not."""

    async def story() -> str:
        async with serving(identity(folder, DECODE)) as server:
            async with link(server, identity(folder, ROUTER)) as linked:
                assert await answered(linked)
            reason = await refused(server, identity(folder, PREFILL))
            await refused(server, None)
            await counted(server, handshake=1, role=1)
            return reason

    assert "not for a certificate of prefill-worker" in uvloop.run(story())


async def test_a_worker_may_ask_itself_who_it_is(folder: Path):
    """Its self-check comes with its own certificate, and no other worker's will do."""
    async with serving(identity(folder, DECODE)) as server:
        address = f"127.0.0.1:{server.port}"
        assert await who_answers(address, identity(folder, DECODE), DECODE) == LIFE
        assert await who_answers(address, identity(folder, ROUTER), DECODE) == LIFE
        assert await who_answers(address, identity(folder, PREFILL), DECODE) is None
        await counted(server, handshake=0, role=1)


# -- who does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [role for role in PeerRole if role is not ROUTER], ids=lambda role: role.value)
async def test_only_a_router_may_link(folder: Path, role: PeerRole):
    """A worker's own certificate makes nobody a router: refused, counted, and a line in the log says who it was."""
    async with serving(identity(folder, DECODE)) as server:
        with structlog.testing.capture_logs() as lines:
            assert f"not for a certificate of {role.value}" in await refused(server, identity(folder, role))
        await counted(server, handshake=0, role=1)
        [line] = [line for line in lines if line["event"] == "refused a call"]
        assert (line["certificate"], line["method"]) == (role.value, "token link")


@pytest.mark.parametrize(
    "who", ["in plain", "without a certificate", "of another authority", "expired", "without role"]
)
async def test_who_shows_no_acceptable_certificate_is_turned_away(folder: Path, tmp_path_factory, who: str):
    """Before it can say anything, or for what its certificate does not say; the others are served on."""
    made = new_authority()
    write(folder, "ca", made)
    write(folder, DECODE.value, issue(made, (DECODE,)))
    write(folder, ROUTER.value, issue(made, (ROUTER,)))
    async with serving(identity(folder, DECODE)) as server:
        match who:
            case "in plain":
                await cut_off(server, None)
            case "without a certificate":
                await cut_off(server, context(folder))
            case "of another authority":
                other = tmp_path_factory.mktemp("other")
                write_all(other)
                await cut_off(server, context(folder, *paths(other, ROUTER.value)))
            case "expired":
                await cut_off(server, context(folder, *write(folder, "old", issue(made, (ROUTER,), days=-1.0))))
            case "without role":
                await cut_off(server, context(folder, *write(folder, "guest", issue(made, ()))))
        await counted(server, handshake=int(who != "without role"), role=int(who == "without role"))
        async with link(server, identity(folder, ROUTER)) as linked:
            assert await answered(linked)


def context(folder: Path, *pair: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(cadata=paths(folder, "ca")[0].read_text())
    if pair:
        made.load_cert_chain(*pair)
    return made


async def test_a_router_speaks_only_to_the_role_it_wants(folder: Path):
    """Another process of ours at the address, with a good certificate, is not a decode worker; nor is one in plain."""
    async with serving(identity(folder, PREFILL)) as prefill, serving(None) as plain:
        assert "Hostname mismatch" in await refused(prefill, identity(folder, ROUTER), DECODE)
        assert await refused(plain, identity(folder, ROUTER), DECODE)
        async with link(prefill, identity(folder, ROUTER), PREFILL) as linked:
            assert await answered(linked)


async def test_strangers_that_say_nothing_are_counted_and_let_go(folder: Path):
    """Also within the TLS handshake; a standing link goes on meanwhile."""
    async with serving(identity(folder, DECODE)) as server, link(server, identity(folder, ROUTER)) as standing:
        assert await answered(standing)
        strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        await counted(server, handshake=20, role=0)
        for reader, writer in strangers:
            assert await asyncio.wait_for(reader.read(), LIVENESS_S) == b""
            writer.close()
        assert await answered(standing, AttemptId("cd" * 16))
        assert server.connections == 1


# -- new certificates -------------------------------------------------------------------------------------------------


async def test_new_certificates_are_used_without_a_restart(folder: Path):
    """All is replaced, authority included: links that stand stay, the old gets in no more, and the new does."""
    router = identity(folder, ROUTER)
    before = context(folder, *paths(folder, ROUTER.value))
    async with serving(identity(folder, DECODE)) as server, link(server, router) as standing:
        assert await answered(standing)
        write_all(folder, days=3.0)
        await cut_off(server, before)
        async with link(server, router) as anew:
            assert await answered(anew, AttemptId("ef" * 16))
        assert await answered(standing, AttemptId("cd" * 16))


async def test_what_travels_is_not_in_plain(folder: Path):
    """The bytes on the line are TLS's: no greeting and no attempt is seen in them."""
    seen = bytearray()

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                seen.extend(data)
                target.write(data)
            target.close()

        await asyncio.gather(pipe(reader, far_writer), pipe(far_reader, writer), return_exceptions=True)

    async with serving(identity(folder, DECODE)) as server, await asyncio.start_server(tap, "127.0.0.1", 0) as line:
        address = f"127.0.0.1:{line.sockets[0].getsockname()[1]}"
        own, params = identity(folder, ROUTER), LinkParams(connect_s=LIVENESS_S)
        over = TcpTokenLink(address, D0, LIFE, params=params, counters=LinkCounters(), identity=own, peer=DECODE)
        assert await answered(over)
        await over.close()
    assert seen and b"prfaas link" not in seen and bytes.fromhex(ATTEMPT) not in seen
