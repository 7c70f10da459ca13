"""The token link with certificates on both sides: who gets in, who does not, and new certificates while it runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.live.link import LinkParams
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.etcd_calls import Tls
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.node.link_server import serve_worker
from prfaas.node.rpc_server import RpcServer
from prfaas.request import AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Reserve, Reserved
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub
from prfaas.security import PeerRole, Refusal
from services.certificates import Issued, existing, issue, new_authority, paths, pem_files, write, write_all
from tests.integration.scripted_worker import ScriptedRuntime

#: Longer than anything here takes on a busy machine; reached only when something hangs.
LIVENESS_S = 10.0
#: How long a server waits for a connection's first call.
FIRST_CALL_S = 0.5
D0, LIFE, ATTEMPT = NodeId("d0"), Incarnation(1), AttemptId("ab" * 16)

ROUTER, DECODE, PREFILL = PeerRole.ROUTER, PeerRole.DECODE_WORKER, PeerRole.PREFILL_WORKER


def identity(folder: Path, role: PeerRole) -> Identity:
    ca, cert, key = pem_files(folder, role)
    return Identity(role, ca=ca, cert=cert, key=key)


def authority(folder: Path) -> Issued:
    """A new authority, whose certificate every process in the folder trusts."""
    made = new_authority()
    write(folder, "ca", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_all(tmp_path)
    return tmp_path


@asynccontextmanager
async def serving(own: Identity | None) -> AsyncIterator[RpcServer]:
    server = await serve_worker(ScriptedRuntime(D0, LIFE), "127.0.0.1", 0, own, first_call_s=FIRST_CALL_S)
    await server.set_serving(True)
    try:
        async with asyncio.timeout(4 * LIVENESS_S):
            yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def link(
    server: RpcServer, own: Identity | None, peer: PeerRole = DECODE, counters: LinkCounters | None = None
) -> AsyncIterator[GrpcTokenLink]:
    made = GrpcTokenLink(
        f"127.0.0.1:{server.port}",
        D0,
        LIFE,
        params=LinkParams(connect_s=LIVENESS_S),
        counters=counters or LinkCounters(),
        channel=partial(dial, own, peer),
    )
    try:
        yield made
    finally:
        await made.close()


async def refused(server: RpcServer, own: Identity | None, peer: PeerRole = DECODE) -> str:
    """What a router with this identity is told when it wants to link."""
    counters = LinkCounters()
    with structlog.testing.capture_logs() as lines:
        async with link(server, own, peer, counters) as refusing:
            with pytest.raises(PeerUnavailable) as failed:
                await refusing.open(ATTEMPT, 8)
    assert (counters.connections, counters.failed_connections) == (0, 1)
    [line] = [line for line in lines if line["event"] == "no link to a worker"]
    assert (line["node"], line["detail"]) == (D0, failed.value.detail)
    return failed.value.detail


async def counted(server: RpcServer, refusal: Refusal, count: int) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while server.refused[refusal] != count:  # noqa: ASYNC110 - counted by a timer of the server's
            await asyncio.sleep(0.02)


async def described(server: RpcServer, own: Identity, peer: PeerRole = DECODE) -> pb.DescribeResponse:
    async with dial(own, peer, f"127.0.0.1:{server.port}") as channel:
        return await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=LIVENESS_S)


# -- who gets in ------------------------------------------------------------------------------------------------------


async def test_a_router_links_and_is_answered(folder: Path):
    """The whole way of a command and its answer, with nobody counted as refused."""
    async with serving(identity(folder, DECODE)) as server, link(server, identity(folder, ROUTER)) as linked:
        leg = await linked.open(ATTEMPT, 8)
        leg.send(reserve())
        answer = await asyncio.wait_for(leg.next(), LIVENESS_S)
        assert isinstance(answer, Reserved)
        await asyncio.sleep(3 * FIRST_CALL_S)  # not a condition: in this time nothing may be counted
        assert server.refused == {Refusal.HANDSHAKE: 0, Refusal.ROLE: 0}


async def test_health_and_reflection_are_for_every_role(folder: Path):
    """Of each of gRPC's kinds of call one, all checked alike."""
    async with serving(identity(folder, DECODE)) as server:
        for role in PeerRole:
            async with dial(identity(folder, role), DECODE, f"127.0.0.1:{server.port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=LIVENESS_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=LIVENESS_S)
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                watch.cancel()
                reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=LIVENESS_S
                )
                names = [service.name async for told in reflection for service in told.list_services_response.service]
                assert "prfaas.rpc.v1.Worker" in names


async def test_a_worker_may_ask_itself_who_it_is(folder: Path):
    """Its self-check comes with its own certificate, and no other worker's will do."""
    async with serving(identity(folder, DECODE)) as server:
        assert (await described(server, identity(folder, DECODE))).node == D0
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await described(server, identity(folder, PREFILL))
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED


# -- who does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [role for role in PeerRole if role is not ROUTER], ids=lambda role: role.value)
async def test_only_a_router_may_link(folder: Path, role: PeerRole):
    """A worker's own certificate makes nobody a router: refused, counted, and a line in the log says who it was."""
    async with serving(identity(folder, DECODE)) as server:
        with structlog.testing.capture_logs() as lines:
            async with dial(identity(folder, role), DECODE, f"127.0.0.1:{server.port}") as channel:
                call = WorkerStub(channel).Link(timeout=LIVENESS_S)
                with pytest.raises(grpc.aio.AioRpcError) as denied:
                    await call.read()
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert server.refused[Refusal.ROLE] == 1
        [line] = [line for line in lines if line["event"] == "refused a call"]
        assert (line["certificate"], line["method"]) == (role.value, "/prfaas.rpc.v1.Worker/Link")


async def test_a_certificate_without_a_role_may_call_nothing(folder: Path):
    """Signed by the right authority, but for something else: the certificate of a member of the store, for example."""
    made = authority(folder)
    write(folder, DECODE.value, issue(made, (DECODE,)))
    write(folder, "guest", issue(made, ()))
    ca, (cert, key) = paths(folder, "ca")[0], paths(folder, "guest")
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    name = [("grpc.ssl_target_name_override", DECODE.dns_name)]
    async with (
        serving(identity(folder, DECODE)) as server,
        grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, name) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIVENESS_S)
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "no role" in (denied.value.details() or "")


@pytest.mark.parametrize("who", ["in plain", "without a certificate", "of another authority", "expired"])
async def test_who_shows_no_acceptable_certificate_is_turned_away(folder: Path, tmp_path_factory, who: str):
    """Before it can say anything: the router learns at once that it has no link, the worker counts and logs it."""
    made = authority(folder)
    write(folder, DECODE.value, issue(made, (DECODE,)))
    write(folder, ROUTER.value, issue(made, (ROUTER,)))
    async with serving(identity(folder, DECODE)) as server:
        with structlog.testing.capture_logs() as lines:
            match who:
                case "in plain":
                    await refused(server, None)
                case "without a certificate":
                    await assert_cut_off(server, grpc.ssl_channel_credentials(authority_pem(folder)))
                case "of another authority":
                    other = tmp_path_factory.mktemp("other")
                    write_all(other)
                    stranger = [paths(other, ROUTER.value)[1].read_bytes(), paths(other, ROUTER.value)[0].read_bytes()]
                    await assert_cut_off(server, grpc.ssl_channel_credentials(authority_pem(folder), *stranger))
                case "expired":
                    old = write(folder, "old", issue(made, (ROUTER,), days=-1.0))
                    stale = [old[1].read_bytes(), old[0].read_bytes()]
                    await assert_cut_off(server, grpc.ssl_channel_credentials(authority_pem(folder), *stale))
            await counted(server, Refusal.HANDSHAKE, 1)
            async with asyncio.timeout(LIVENESS_S):
                while not [line for line in lines if line["event"].startswith("connections without")]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        # The others are served on.
        assert (await described(server, identity(folder, ROUTER))).node == D0
        assert server.refused == {Refusal.HANDSHAKE: 1, Refusal.ROLE: 0}


async def test_a_router_speaks_only_to_the_role_it_wants(folder: Path):
    """Another process of ours at the address, with a good certificate, is not a decode worker; nor is one in plain, or
    one of another authority."""
    async with serving(identity(folder, PREFILL)) as prefill, serving(None) as plain:
        assert "Hostname Verification" in await refused(prefill, identity(folder, ROUTER), DECODE)
        assert await refused(plain, identity(folder, ROUTER), DECODE)
        async with link(prefill, identity(folder, ROUTER), PREFILL) as linked:
            await linked.open(ATTEMPT, 8)


async def test_a_flood_of_strangers_is_counted_and_bounded(folder: Path):
    """Connections that say nothing cost the others nothing, and each is counted, however many calls somebody else
    makes meanwhile."""
    async with serving(identity(folder, DECODE)) as server:
        strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
        async with dial(identity(folder, ROUTER), DECODE, f"127.0.0.1:{server.port}") as channel:
            for _ in range(60):
                described = await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=LIVENESS_S)
                assert described.node == D0
        await counted(server, Refusal.HANDSHAKE, 50)
        for _, writer in strangers:
            writer.close()


# -- new certificates -------------------------------------------------------------------------------------------------


async def test_new_certificates_are_used_without_a_restart(folder: Path):
    """All is replaced, authority included: links that stand stay, the old gets in no more, and the new does."""
    with structlog.testing.capture_logs() as lines:
        own, router = identity(folder, DECODE), identity(folder, ROUTER)
        before = router.channel_credentials()
        async with serving(own) as server, link(server, router) as standing:
            await standing.open(ATTEMPT, 8)
            write_all(folder, days=3.0)
            await assert_cut_off(server, before)
            assert (await described(server, router)).node == D0
            assert 0 < own.valid_s <= 3 * 86400
            leg = await standing.open(AttemptId("cd" * 16), 8)
            leg.send(reserve())
            await asyncio.wait_for(leg.next(), LIVENESS_S)
    assert {line["role"] for line in lines if line["event"] == "new certificate"} == {"decode-worker", "router"}


async def test_files_that_cannot_be_used_leave_the_old_ones_in_force(folder: Path):
    """A key that does not fit yet, or a certificate of another role: complained about once, and nobody is cut off."""
    own, router = identity(folder, DECODE), identity(folder, ROUTER)
    cert, key = paths(folder, DECODE.value)
    async with serving(own) as server:
        good = key.read_bytes()
        for wrong in (paths(folder, PREFILL.value)[1].read_bytes(), b"", b"no PEM"):
            key.write_bytes(wrong)
            with structlog.testing.capture_logs() as lines:
                for _ in range(3):
                    assert (await described(server, router)).node == D0
            assert [line["event"] for line in lines] == ["the certificate was not replaced"]
        key.unlink()
        assert (await described(server, router)).node == D0
        key.write_bytes(good)
        cert.write_bytes(paths(folder, PREFILL.value)[0].read_bytes())
        assert (await described(server, router)).node == D0


def test_files_that_cannot_be_used_end_the_start(folder: Path):
    """By the name of the setting, before anything listens."""
    made = authority(folder)
    ca, cert, key = pem_files(folder, DECODE)
    with pytest.raises(ConfigError, match=r"security\.cert.*no name decode-worker\.prfaas\.internal"):
        Identity(DECODE, ca=ca, cert=pem_files(folder, ROUTER)[1], key=pem_files(folder, ROUTER)[2])
    with pytest.raises(ConfigError, match=r"security\.cert.*no pair"):
        Identity(DECODE, ca=ca, cert=cert, key=pem_files(folder, ROUTER)[2])
    with pytest.raises(ConfigError, match=r"security\.key"):
        Identity(DECODE, ca=ca, cert=cert, key=folder / "none")
    with pytest.raises(ConfigError, match=r"security\.ca"):
        Identity(DECODE, ca=key, cert=cert, key=key)
    with pytest.raises(ConfigError, match=r"security\.ca.*did not sign"):
        Identity(DECODE, ca=ca, cert=cert, key=key)
    old_cert, old_key = write(folder, "old", issue(made, (DECODE,), days=-1.0))
    with pytest.raises(ConfigError, match=r"security\.cert.*expired"):
        Identity(DECODE, ca=ca, cert=old_cert, key=old_key)


# -- the embedded store -----------------------------------------------------------------------------------------------


async def test_the_embedded_store_asks_for_certificates_too(folder: Path):
    """Who could write there could become a worker of the cluster."""
    credentials = identity(folder, PeerRole.STORE).server_credentials(lambda: None)
    server = EmbeddedStoreServer(MemoryStore(), "127.0.0.1", 0, credentials)
    await server.start()
    address = [f"127.0.0.1:{server.port}"]
    try:
        member, guest = EtcdStore(address, tls=Tls(*pem_files(folder, ROUTER))), EtcdStore(address)
        await member.put("a", b"1")
        entry = await member.get("a")
        assert entry is not None and entry.value == b"1"
        with pytest.raises(PeerUnavailable):
            await guest.get("a")
        await member.close()
        await guest.close()
    finally:
        await server.stop()


# -- the files --------------------------------------------------------------------------------------------------------


def test_keys_are_for_their_owner_alone(folder: Path):
    """Whatever the umask; and what is replaced keeps that."""
    write_all(folder)
    keys = [path for path in existing(folder) if path.suffix == ".key"]
    assert len(keys) == 1 + len(PeerRole)
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    assert {path.name for path in folder.iterdir()} == {path.name for path in existing(folder)}
    assert identity(folder, ROUTER).material().expires_at > datetime.now(UTC)


def authority_pem(folder: Path) -> bytes:
    return paths(folder, "ca")[0].read_bytes()


async def assert_cut_off(server: RpcServer, credentials: grpc.ChannelCredentials) -> None:
    name = [("grpc.ssl_target_name_override", DECODE.dns_name)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, name) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=LIVENESS_S)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def reserve() -> Reserve:
    return Reserve(
        request_id=RequestId("r"),
        prompt=bytes(8),
        sampling=Sampling(max_tokens=1),
        source_node=D0,
        source_region=RegionId("b"),
        source_namespace=Namespace("n"),
        deadline_s=10.0,
    )
