"""HTTPS at the endpoint: what clients are shown, and what becomes of a certificate that is renewed."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from prfaas.errors import ConfigError
from services.certificates import Issued, issue, new_authority, paths, write
from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response
from services.router.http.server import HttpServer
from services.router.http.tls import ServerTls

LIVENESS_S = 20.0
NAME = "endpoint"


class Files:
    """A certificate and its key as an operator, or cert-manager, puts them in place."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.authority = folder, new_authority()
        self.cert, self.key = paths(folder, NAME)
        self.put(issue(self.authority, ()))

    def put(self, issued: Issued) -> int:
        """Its serial number."""
        write(self._folder, NAME, issued)
        return issued.certificate.serial_number

    def trusting(self) -> ssl.SSLContext:
        """The client's side."""
        context = ssl.create_default_context()
        context.load_verify_locations(cadata=self.authority.certificate.public_bytes(Encoding.PEM).decode())
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a story on each event loop."""

    def run(story: Callable[[], object]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(story(), LIVENESS_S))  # type: ignore[arg-type]

    return run


async def handle(request: HttpRequest) -> Response:
    return Response(200, request.body)


@asynccontextmanager
async def serving(tls: ServerTls, limits: Limits = Limits(linger_s=0.2)) -> AsyncIterator[int]:  # noqa: B008
    server = HttpServer(handle, limits)
    yield await server.start("127.0.0.1", 0, ssl=tls.context)
    await server.drain(0.1)


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext) -> AsyncIterator["Client"]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.ssl = writer.get_extra_info("ssl_object")

    @property
    def serial(self) -> int:
        """Of the certificate that was shown."""
        return x509.load_der_x509_certificate(self.ssl.getpeercert(True)).serial_number

    async def ask(self, body: bytes = b"hello") -> bytes:
        self._writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        return await self._reader.readexactly(len(body))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_clients_are_served_over_tls(run: Callable[..., None], files: Files):
    """Old versions of TLS are refused, HTTP/1.1 is agreed on, and bodies of many records come whole."""

    async def story() -> None:
        async with serving(ServerTls(files.cert, files.key)) as port:
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = files.trusting()
                context.maximum_version = context.minimum_version = version
                context.set_alpn_protocols(["h2", "http/1.1"])
                async with connected(port, context) as client:
                    assert client.ssl.selected_alpn_protocol() == "http/1.1"
                    assert client.ssl.version() == version.name.replace("v1_", "v1.")
                    body = bytes(range(256)) * 4000
                    assert await client.ask(body) == body
            old = files.trusting()
            old.minimum_version = ssl.TLSVersion.TLSv1_1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                async with connected(port, old):
                    pass
            async with connected(port, files.trusting()) as client:
                assert await client.ask() == b"hello"

    run(story)


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_renewed_certificate_is_used_without_a_restart(run: Callable[..., None], files: Files, kind: str):
    """For new connections, also when its key is of another kind; those that stand go on."""

    async def story() -> None:
        tls = ServerTls(files.cert, files.key)
        async with serving(tls) as port, connected(port, files.trusting()) as first:
            renewed = issue(files.authority, ())
            serial = files.put(renewed if kind == "ec" else with_rsa_key(files.authority, renewed))
            await tls.look()
            for _ in range(2):
                async with connected(port, files.trusting()) as second:
                    assert second.serial == serial != first.serial
                    assert await second.ask() == b"hello"
            assert await first.ask() == b"hello"
            assert tls.loaded == 2 and tls.valid_s > 0

    run(story)


def with_rsa_key(authority: Issued, like: Issued) -> Issued:
    key = rsa.generate_private_key(65537, 2048)
    old = like.certificate
    builder = x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            builder = builder.add_extension(extension.value, extension.critical)
    assert old.signature_hash_algorithm is not None
    return Issued(builder.sign(authority.key, old.signature_hash_algorithm), key)  # type: ignore[arg-type]


def test_files_that_cannot_be_used_leave_the_old_certificate(run: Callable[..., None], files: Files):
    """Half replaced, of nonsense, or gone for a moment; what follows is used again."""

    async def story() -> None:
        tls = ServerTls(files.cert, files.key)
        async with serving(tls) as port:
            async with connected(port, files.trusting()) as client:
                serial = client.serial
            key = files.key.read_bytes()
            files.put(issue(files.authority, ()))
            files.key.write_bytes(key)  # of the old one
            await tls.look()
            files.cert.write_text("nonsense")
            await tls.look()
            files.cert.unlink()
            await tls.look()
            await tls.look()  # nothing new is nothing to complain about
            assert (tls.loaded, tls.failed) == (1, 3)
            async with connected(port, files.trusting()) as client:
                assert client.serial == serial
            serial = files.put(issue(files.authority, ()))
            await tls.look()
            async with connected(port, files.trusting()) as client:
                assert client.serial == serial

    run(story)


def test_a_handshake_that_does_not_end_is_ended(run: Callable[..., None], files: Files):
    """In the time that the headers of a request have."""

    async def story() -> None:
        async with serving(ServerTls(files.cert, files.key), Limits(head_timeout_s=0.2)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01")
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass
            writer.close()

    run(story)


def encrypted(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")))


def expired(files: Files) -> None:
    files.put(issue(files.authority, (), days=-1.0))


def of_another(files: Files) -> None:
    other = issue(files.authority, ()).key
    files.key.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize(
    ("spoil", "setting", "said"),
    [
        (lambda files: files.cert.unlink(), "router.tls_cert", "No such file"),
        (lambda files: files.key.unlink(), "router.tls_key", "No such file"),
        (lambda files: files.cert.write_text("nonsense"), "router.tls_cert", "no pair"),
        (lambda files: files.key.write_text("nonsense"), "router.tls_cert", "no pair"),
        (of_another, "router.tls_cert", "no pair"),
        (encrypted, "router.tls_key", "encrypted"),
        (expired, "router.tls_cert", "has expired"),
    ],
)
def test_files_that_cannot_be_used_from_the_start_are_named(
    files: Files, spoil: Callable[[Files], object], setting: str, said: str
):
    """With the setting and the path, and nobody is asked for a password."""
    spoil(files)
    with pytest.raises(ConfigError) as refused:
        ServerTls(files.cert, files.key)
    assert refused.value.path == setting
    assert said in refused.value.message
    assert str(files.cert) in refused.value.message or str(files.key) in refused.value.message
