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
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended.is_set()
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended.set()

    def close(self) -> None:
        self.ended.set()

    def abort(self) -> None:
        self.aborted = True
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

    def __init__(self, room_bytes: int = 1 << 20) -> None:
        self.open = asyncio.Event()
        self.handled: list[str] = []
        self.gone_connections = 0
        self.room_bytes = room_bytes
        self.refusals: list[int] = []

    async def handle(self, request: HttpRequest) -> Response:
        await self.open.wait()
        self.handled.append(request.path)
        return Response(200)

    def opened(self, connection: Connection) -> Response | None:
        return None

    def gone(self, connection: Connection) -> None:
        self.gone_connections += 1

    def take_room(self, size: int) -> bool:
        taken = size <= self.room_bytes
        self.room_bytes -= size if taken else 0
        return taken

    def give_room(self, size: int) -> None:
        self.room_bytes += size

    def refused(self, status: int) -> None:
        self.refusals.append(status)


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


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_stops_ends_the_connection_at_any_point_of_an_answer(tcp: socket.socket, turns: int):
    """Before it, in it, or in the very turn in which it ends; the answer is whole."""
    gate = Gate()
    gate.open.set()
    connection, transport = connect(gate, tcp)
    connection.data_received(request("a"))
    for _ in range(turns):
        await asyncio.sleep(0)
    connection.finish()
    async with asyncio.timeout(LIVENESS_S):
        await transport.ended.wait()
    assert (transport.statuses, transport.aborted) == ([200], False)
    connection.connection_lost(None)


async def test_a_client_that_leaves_is_gone_once(tcp: socket.socket):
    """After the socket has closed and the handler has ended, whichever comes last. Waiting for answers that do not come
    at once is taken for leaving."""
    gate = Gate()
    connection, transport = connect(gate, tcp)
    connection.data_received(request("a"))
    await asyncio.sleep(0)
    connection.eof_received()
    async with asyncio.timeout(LIVENESS_S):
        await transport.ended.wait()
    assert transport.aborted
    assert gate.gone_connections == 0
    connection.connection_lost(None)
    await until(lambda: gate.gone_connections > 0)
    assert (gate.gone_connections, gate.handled) == (1, [])


async def test_a_client_that_has_closed_half_gets_what_it_asked_for(tcp: socket.socket):
    """If that can be answered at once; then the connection ends."""
    gate = Gate()
    gate.open.set()
    connection, transport = connect(gate, tcp)
    connection.data_received(request("a") + request("b"))
    assert connection.eof_received()
    await until(lambda: len(transport.statuses) == 2)
    assert transport.ended.is_set() and not transport.aborted
    assert transport.written.count(b"connection: close") == 1
    connection.connection_lost(None)
    await until(lambda: gate.gone_connections == 1)


@pytest.mark.parametrize("head", [b"Content-Length: 700\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2bc\r\n"])
async def test_bodies_of_all_connections_share_room(head: bytes):
    """What has no room is refused; there is room again when an answer has begun, or a client has gone."""
    gate, head = Gate(room_bytes=1000), b"POST / HTTP/1.1\r\nHost: x\r\n" + head
    with socket.socket() as one, socket.socket() as other, socket.socket() as third:
        first, _ = connect(gate, one)
        first.data_received(head + b"x" * 600)
        second, transport = connect(gate, other)
        second.data_received(head + b"x" * 500)
        await until(lambda: transport.statuses == [503])
        assert gate.refusals == [503]
        second.connection_lost(None)
        assert gate.room_bytes == 400
        first.connection_lost(None)
        assert gate.room_bytes == 1000
        answered, transport = connect(gate, third)
        answered.data_received(request("a", b"x" * 900))
        assert gate.room_bytes == 100
        gate.open.set()
        await until(lambda: transport.statuses == [200])
        assert gate.room_bytes == 1000
        answered.connection_lost(None)


async def test_small_packets_are_not_held_back(tcp: socket.socket):
    """Or a token may wait for the acknowledgement of the one before."""
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
    connection, _ = connect(Gate(), tcp)
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    connection.connection_lost(None)
