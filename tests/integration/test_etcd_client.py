"""The etcd client where networks and logins fail, and the embedded server before etcd's own command line."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from prfaas.errors import PeerUnavailable
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.etcd_calls import CALL_S, Login, Refused, Tls
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.membership.store import Put
from tests.etcd_process import ETCD, ETCDCTL, EtcdProcess, etcdctl, start_etcd

LIMIT_S = 20.0
OPENSSL = shutil.which("openssl")


@asynccontextmanager
async def serving(memory: MemoryStore | None = None) -> AsyncIterator[EmbeddedStoreServer]:
    server = EmbeddedStoreServer(memory or MemoryStore(), "127.0.0.1", 0)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Wire:
    """A relay to the server, over TLS if wanted, that can go deaf: accept, pass requests on, and let no answer
    through."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._deaf = False
        self._connections: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as pumps:
            self._pumps = pumps
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
            try:
                yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                server.close()
                self.cut()

    def go_deaf(self) -> None:
        self._deaf = True

    def cut(self) -> None:
        """Reset what is connected and pass everything on again."""
        self._deaf = False
        for connection in self._connections:
            connection.transport.abort()
        self._connections.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        self._connections += [writer, server_writer]
        self._pumps.create_task(self._pump(reader, server_writer, answers=False))
        self._pumps.create_task(self._pump(server_reader, writer, answers=True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                if not (answers and self._deaf):
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


async def test_a_dead_endpoint_is_passed_over():
    """With several endpoints, calls and watches move to one that answers; one that is dead costs no error."""
    async with serving() as server:
        async with serving() as gone:
            dead = gone.endpoint
        store = EtcdStore([dead, server.endpoint])
        await store.put("/x", b"1")
        async with aclosing(store.watch("/")) as batches, asyncio.timeout(LIMIT_S):
            await anext(batches)
            await store.put("/y", b"2")
            (event,) = await anext(batches)
            assert isinstance(event, Put) and event.entry.key == "/y"
        await store.close()


async def test_an_endpoint_that_never_answers_is_passed_over():
    """An attempt ends after a second, also where the connection looks alive."""
    async with serving() as server, Wire(server.endpoint).open() as fine:
        deaf = Wire(server.endpoint)
        deaf.go_deaf()
        async with deaf.open() as silent:
            store = EtcdStore([silent, fine])
            async with asyncio.timeout(LIMIT_S):
                await store.put("/x", b"1")
                entry = await store.get("/x")
            assert entry is not None and entry.value == b"1"
            await store.close()


async def test_with_no_endpoint_left_a_call_ends_in_time():
    """PeerUnavailable after the budget, not a hang."""
    async with serving() as server:
        dead = server.endpoint
    store = EtcdStore([dead])
    async with asyncio.timeout(2 * CALL_S):
        failures = await asyncio.gather(store.get("/x"), store.list("/"), store.grant(30), return_exceptions=True)
    assert [type(failure) for failure in failures] == [PeerUnavailable] * 3
    await store.close()


async def test_a_compare_and_put_whose_answer_was_lost_is_still_ours():
    """It was carried out before the connection broke: the next attempt finds our value and says so, once."""
    memory = MemoryStore()
    async with serving(memory) as server:
        wire = Wire(server.endpoint)
        async with wire.open() as endpoint:
            store = EtcdStore([endpoint])
            await store.put("/before", b"")
            wire.go_deaf()
            with memory.open() as data:
                before = data.revision
            claim = asyncio.create_task(store.compare_and_put("/leader", b"me", 0))
            async with asyncio.timeout(LIMIT_S):
                await memory.moved(before)
                wire.cut()
                revision = await claim
            entry = await memory.get("/leader")
            assert entry is not None and revision == entry.mod_revision == before + 1
            await store.close()


async def test_a_compare_and_put_that_another_won_meanwhile_is_lost():
    """The same broken connection, but the key holds another's value: None, and the other's value stays."""
    memory = MemoryStore()
    async with serving(memory) as server:
        wire = Wire(server.endpoint)
        async with wire.open() as endpoint:
            store = EtcdStore([endpoint])
            await store.put("/before", b"")
            wire.go_deaf()
            with memory.open() as data:
                before = data.revision
            claim = asyncio.create_task(store.compare_and_put("/leader", b"me", 0))
            async with asyncio.timeout(LIMIT_S):
                await memory.moved(before)
                await memory.put("/leader", b"you")
                wire.cut()
                assert await claim is None
            entry = await memory.get("/leader")
            assert entry is not None and entry.value == b"you"
            await store.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd that asks for a login. When it starts again it knows none of the tokens it gave."""
    if ETCD is None or ETCDCTL is None:
        pytest.skip("needs a real etcd and etcdctl: install etcd-server and etcd-client")
    etcd = start_etcd(tmp_path / "etcd")
    try:
        etcd.ctl("user", "add", "root:secret")
        etcd.ctl("user", "grant-role", "root", "root")
        etcd.ctl("auth", "enable")
        yield etcd
    finally:
        etcd.stop()


async def test_a_login_that_has_expired_is_renewed(guarded: EtcdProcess):
    """Calls and leases go on with a new token."""
    store = EtcdStore([guarded.endpoint], login=Login("root", "secret"))
    lease = await store.grant(60)
    for expire in (guarded.kill, guarded.stop):
        await store.put("/x", b"1", lease)
        expire()
        guarded.start_again()
    assert await store.keep_alive(lease) > 0
    assert await store.get("/x") is not None
    await store.close()


async def test_a_watch_renews_its_login(guarded: EtcdProcess):
    """A watch that nobody else logs in for goes on by itself."""
    store = EtcdStore([guarded.endpoint], login=Login("root", "secret"))
    async with aclosing(store.watch("/")) as batches, asyncio.timeout(LIMIT_S):
        await anext(batches)
        for turn in ("1", "2"):
            await asyncio.to_thread(guarded.ctl, "--user=root:secret", "put", "/x", turn)
            (event,) = await anext(batches)
            assert isinstance(event, Put) and event.entry.value == turn.encode()
            guarded.kill()
            guarded.start_again()
    await store.close()


async def test_a_wrong_password_is_refused_at_once(guarded: EtcdProcess):
    """It is not tried again until the budget is spent."""
    store = EtcdStore([guarded.endpoint], login=Login("root", "wrong"))
    with pytest.raises(Refused):
        await store.get("/x")
    await store.close()


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
async def test_with_tls_both_sides_prove_who_they_are(tmp_path: Path):
    """A client with a certificate of the trusted authority is served; one without is not, nor one that speaks
    plainly."""
    make_certificates(tmp_path)
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "peer.pem", tmp_path / "peer.key"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    async with serving() as server, Wire(server.endpoint, context).open() as endpoint:
        trusted = EtcdStore([endpoint], tls=Tls(ca, cert, key))
        async with aclosing(trusted.watch("/")) as batches, asyncio.timeout(LIMIT_S):
            await anext(batches)
            await trusted.put("/x", b"1")
            assert isinstance((await anext(batches))[0], Put)
        strangers = [EtcdStore([endpoint], tls=Tls(ca)), EtcdStore([endpoint])]
        refusals = await asyncio.gather(*(stranger.get("/x") for stranger in strangers), return_exceptions=True)
        assert [type(refusal) for refusal in refusals] == [PeerUnavailable] * 2
        for stranger in strangers:
            await stranger.close()
        await trusted.close()


def make_certificates(directory: Path) -> None:
    """An authority and one certificate for 127.0.0.1, as `ca.pem`, `peer.pem` and `peer.key`."""
    assert OPENSSL is not None
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {new} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        f"req {new} -keyout peer.key -out peer.csr -subj /CN=peer",
        "x509 -req -in peer.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out peer.pem -days 2 -extfile san",
    ):
        subprocess.run([OPENSSL, *command.split()], cwd=directory, check=True, capture_output=True, timeout=30)


@pytest.mark.skipif(ETCDCTL is None, reason="needs etcdctl: install etcd-client")
async def test_etcdctl_works_with_the_embedded_server():
    """Operators read, write and watch an embedded store with the tool they know."""
    memory = MemoryStore()
    async with serving(memory) as server:

        async def ctl(*arguments: str) -> str:
            return await asyncio.to_thread(etcdctl, server.endpoint, *arguments)

        assert await ctl("put", "/prfaas/c/a", "one") == "OK\n"
        await memory.put("/prfaas/c/b", b"two")
        await memory.put("/other", b"x")
        assert await ctl("get", "--prefix", "/prfaas/") == "/prfaas/c/a\none\n/prfaas/c/b\ntwo\n"
        assert await ctl("get", "/prfaas/c/b", "--print-value-only") == "two\n"
        assert await ctl("get", "", "--prefix", "--keys-only") == "/other\n\n/prfaas/c/a\n\n/prfaas/c/b\n\n"
        assert await ctl("del", "/prfaas/c/a") == "1\n"
        assert await memory.get("/prfaas/c/a") is None
        with pytest.raises(AssertionError, match="requested lease not found"):
            await ctl("put", "/x", "x", "--lease=1f")
        with pytest.raises(AssertionError, match="needs a real etcd"):
            await asyncio.to_thread(etcdctl, server.endpoint, "txn", stdin='mod("/a") > "0"\n\nput /a x\n\n\n')
        assert await memory.get("/a") is None


@pytest.mark.skipif(ETCDCTL is None, reason="needs etcdctl: install etcd-client")
async def test_etcdctl_watches_the_embedded_server():
    """It sees past and new changes as they happen."""
    memory = MemoryStore()
    first = await memory.put("/w/a", b"1")
    async with serving(memory) as server:
        assert ETCDCTL is not None
        watch = await asyncio.create_subprocess_exec(
            *(ETCDCTL, f"--endpoints={server.endpoint}", "watch", "--prefix", "/w/", f"--rev={first}"),
            env={"ETCDCTL_API": "3"},
            stdout=subprocess.PIPE,
        )
        try:
            assert watch.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                assert [await watch.stdout.readline() for _ in range(3)] == [b"PUT\n", b"/w/a\n", b"1\n"]
                await memory.delete("/w/a")
                assert [await watch.stdout.readline() for _ in range(2)] == [b"DELETE\n", b"/w/a\n"]
        finally:
            watch.kill()
            await watch.wait()
