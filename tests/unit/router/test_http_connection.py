"""What one client may send ahead, independent of when the kernel delivers it."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response
from services.router.http.protocol import Connection

LIMITS = Limits(max_pipelined=5, max_body_bytes=1000)
LIVENESS_S = 20.0


class Recorder(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self, tcp: socket.socket) -> None:
        super().__init__({"socket": tcp})
        self.written = b""
        self.ended = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended.is_set()
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended.set()

    def abort(self) -> None:
        self.ended.set()

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", self.written)]


class Gate:
    """A handler that lets nothing through until it is opened; owns the connection as a server does."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.handled: list[str] = []
        self.gone_connections = 0

    async def handle(self, request: HttpRequest) -> Response:
        await self.open.wait()
        self.handled.append(request.path)
        return Response(200)

    def opened(self, connection: Connection) -> Response | None:
        return None

    def gone(self, connection: Connection) -> None:
        self.gone_connections += 1


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until the condition holds."""
    async with asyncio.timeout(LIVENESS_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with socket.socket() as tcp:
        yield tcp


def connect(gate: Gate, tcp: socket.socket) -> tuple[Connection, Recorder]:
    connection, transport = Connection(gate, gate.handle, LIMITS, now=lambda: 0.0), Recorder(tcp)
    connection.connection_made(transport)
    return connection, transport


def request(path: str, body: bytes = b"") -> bytes:
    return b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


@pytest.mark.parametrize(
    ("ahead", "statuses"),
    [
        ([request(str(number)) for number in range(5)], [200] * 5),
        ([request(str(number)) for number in range(6)], [200] * 5 + [503]),
        ([request("a"), request("b", b"x" * 500), request("c", b"x" * 500)], [200] * 3),
        ([request("a"), request("b", b"x" * 500), request("c", b"x" * 501)], [200] * 2 + [503]),
        ([request("a", b"x" * 1000)], [200]),
        ([request("a"), b"garbage", request("b")], [200, 400]),
    ],
)
async def test_what_is_sent_ahead_is_bounded(tcp: socket.socket, ahead: list[bytes], statuses: list[int]):
    """In number and in bytes. What fits is answered in order, the rest with one refusal, and then it is over."""
    gate = Gate()
    connection, transport = connect(gate, tcp)
    connection.data_received(b"".join(ahead))
    connection.data_received(request("late") if statuses[-1] != 200 else b"")
    gate.open.set()
    await until(lambda: len(transport.statuses) >= len(statuses))
    assert transport.statuses == statuses
    assert len(gate.handled) == statuses.count(200)
    assert transport.ended.is_set() == (statuses[-1] != 200)
    connection.connection_lost(None)


async def test_requests_that_come_while_one_is_answered_are_not_forgotten(tcp: socket.socket):
    """Also one that comes in the very turn in which the answer ends."""
    gate = Gate()
    gate.open.set()
    connection, transport = connect(gate, tcp)
    connection.data_received(request("0"))
    for count in range(1, 200):
        await until(lambda: len(transport.statuses) == count)  # noqa: B023
        connection.data_received(request(str(count)))
    connection.connection_lost(None)
    assert gate.handled == [f"/{number}" for number in range(199)]


async def test_a_client_that_leaves_is_gone_once(tcp: socket.socket):
    """After the socket has closed and the handler has ended, whichever comes last."""
    gate = Gate()
    connection, transport = connect(gate, tcp)
    connection.data_received(request("a"))
    await asyncio.sleep(0)
    connection.eof_received()
    assert transport.ended.is_set()
    assert gate.gone_connections == 0
    connection.connection_lost(None)
    await until(lambda: gate.gone_connections > 0)
    assert (gate.gone_connections, gate.handled) == (1, [])


async def test_small_packets_are_not_held_back(tcp: socket.socket):
    """Or a token may wait for the acknowledgement of the one before."""
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
    connection, _ = connect(Gate(), tcp)
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    connection.connection_lost(None)
