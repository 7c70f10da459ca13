"""The relay behaves like a WAN line: one rate for all, half the round trip each way, bytes and endings intact.

Real sockets on loopback. Rates and shares are compared within one run; the only times asserted are lower bounds that
the line promises and limits for liveness.
"""

import asyncio
import random
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from prfaas.live.wan_relay import RelayRoute, WanRelay

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MBIT = 1e6
LIMIT_S = 30


def payload(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@asynccontextmanager
async def target(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """The far side of the line, listening on the port that is yielded."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def line(port: int, *, mbit_per_s: float, rtt_s: float) -> Awaitable[WanRelay]:
    return WanRelay.start([RelayRoute("127.0.0.1", 0, "127.0.0.1", port)], bits_per_s=mbit_per_s * MBIT, rtt_s=rtt_s)


async def connect(relay: WanRelay) -> Streams:
    return await asyncio.open_connection("127.0.0.1", relay.ports[0])


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


class Sink:
    """A target that keeps what each connection sent, and when its bytes came."""

    def __init__(self) -> None:
        self.received: list[bytearray] = []
        self.times: list[list[float]] = []
        self.done: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = len(self.received)
        self.received.append(bytearray())
        self.times.append([])
        while data := await reader.read(1 << 16):
            self.received[index] += data
            self.times[index].append(asyncio.get_running_loop().time())
        writer.close()
        self.done.put_nowait(index)

    def bytes_per_s(self, index: int) -> float:
        """Goodput between the first and the last arrival."""
        return len(self.received[index]) / (self.times[index][-1] - self.times[index][0])


async def goodput(mbit_per_s: float, nbytes: int) -> float:
    sink = Sink()
    async with target(sink.serve) as port, await line(port, mbit_per_s=mbit_per_s, rtt_s=0.02) as relay:
        _, writer = await connect(relay)
        await send(writer, payload(nbytes))
        await asyncio.wait_for(sink.done.get(), LIMIT_S)
        return sink.bytes_per_s(0)


async def test_goodput_follows_the_asked_rate():
    """Four times the rate carries four times the bytes, at 50 and at 200 Mbit/s."""
    slow, fast = await goodput(50, 2_500_000), await goodput(200, 10_000_000)
    assert fast / slow == pytest.approx(4, rel=0.1)


async def test_the_rate_can_be_changed_while_bytes_cross():
    """Half of the bytes at 200 Mbit/s, then at 20: the rest comes ten times slower, on the connection that is open."""
    sink, half = Sink(), 2_000_000
    async with target(sink.serve) as port, await line(port, mbit_per_s=200, rtt_s=0.02) as relay:
        _, writer = await connect(relay)
        sending = asyncio.create_task(send(writer, payload(2 * half)))
        async with asyncio.timeout(LIMIT_S):
            while not sink.received or len(sink.received[0]) < half:  # noqa: ASYNC110 - another task's state
                await asyncio.sleep(0.001)
        assert relay.command_rate("mbit=20")[0] == 200
        changed_at, at_change = asyncio.get_running_loop().time(), len(sink.received[0])
        await asyncio.wait_for(sink.done.get(), LIMIT_S)
        await sending
        before = at_change / (changed_at - sink.times[0][0])
        after = (2 * half - at_change) / (sink.times[0][-1] - changed_at)
        assert after < 0.2 * before
        assert sink.received[0] == payload(2 * half)


@pytest.mark.parametrize("query", ["", "mbit=", "mbit=fast", "mbit=0", "mbit=-1", "mbit=nan", "mbit=inf", "rate=5"])
async def test_a_rate_that_makes_no_sense_is_refused(query: str):
    """The line stays as it was."""
    async with await line(1, mbit_per_s=50, rtt_s=0.02) as relay:
        assert relay.command_rate(query)[0] == 400


async def test_connections_share_one_line_evenly():
    """Two connections with work each get half: when one has finished, the other is nearly there."""
    sink = Sink()
    async with target(sink.serve) as port, await line(port, mbit_per_s=50, rtt_s=0.01) as relay:
        writers = [(await connect(relay))[1] for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            for writer in writers:
                tasks.create_task(send(writer, payload(1_000_000)))
            first = await asyncio.wait_for(sink.done.get(), LIMIT_S)
            assert len(sink.received[1 - first]) > 0.8 * 1_000_000
            await asyncio.wait_for(sink.done.get(), LIMIT_S)


async def test_the_directions_do_not_share():
    """Full rate one way leaves the other way its own: both together take about as long as one."""
    alone = await goodput(50, 1_000_000)
    sink = Sink()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(writer, payload(1_000_000)))
            tasks.create_task(sink.serve(reader, writer))

    async with target(serve) as port, await line(port, mbit_per_s=50, rtt_s=0.02) as relay:
        reader, writer = await connect(relay)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(writer, payload(1_000_000)))
            back = tasks.create_task(reader.read(-1))
            await asyncio.wait_for(sink.done.get(), LIMIT_S)
        assert back.result() == payload(1_000_000)
        assert sink.bytes_per_s(0) > 0.75 * alone


async def test_every_byte_takes_the_round_trip_and_many_are_under_way_at_once():
    """A byte there and back takes the RTT at least; twenty in a row do not take twenty RTT, and keep their order."""
    rtt_s = 0.1
    clock = asyncio.get_running_loop().time
    async with target(echo) as port, await line(port, mbit_per_s=100, rtt_s=rtt_s) as relay:
        reader, writer = await connect(relay)
        sent: list[float] = []

        async def speak() -> None:
            for number in range(20):
                sent.append(clock())
                writer.write(bytes([number]))
                await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(speak())
            for number in range(20):
                assert await asyncio.wait_for(reader.readexactly(1), LIMIT_S) == bytes([number])
                assert clock() - sent[number] >= rtt_s
        assert clock() - sent[0] < 10 * rtt_s


async def test_bytes_cross_unchanged_both_ways():
    """Whatever the sizes of writes and reads, the bytes come out as they went in."""
    data = payload(1_234_567, seed=7)
    async with target(echo) as port, await line(port, mbit_per_s=200, rtt_s=0.01) as relay:
        reader, writer = await connect(relay)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(writer, data))
            back = tasks.create_task(reader.read(-1))
        assert back.result() == data


async def test_a_half_close_is_passed_on_and_the_answer_still_comes():
    """The client says it has finished; the target sees the end and answers on the same connection."""

    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await reader.read(-1)
        await asyncio.sleep(0)
        writer.write(b"you said " + question)
        writer.close()

    async with target(answer_at_the_end) as port, await line(port, mbit_per_s=100, rtt_s=0.02) as relay:
        reader, writer = await connect(relay)
        await send(writer, b"hello")
        assert await asyncio.wait_for(reader.read(-1), LIMIT_S) == b"you said hello"


async def test_a_target_that_resets_resets_the_client():
    """A dead peer is an error at the other end, never an orderly end of stream."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        reset(writer)

    async with target(die) as port, await line(port, mbit_per_s=100, rtt_s=0.02) as relay:
        reader, writer = await connect(relay)
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(-1), LIMIT_S)


async def test_a_client_that_resets_resets_the_target_behind_what_it_had_sent():
    """The reset travels like data: the target first reads what was sent, then the error."""
    ending: asyncio.Queue[str] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        try:
            ending.put_nowait((await reader.readexactly(5)).decode())
            await reader.readexactly(1)
        except ConnectionResetError:
            ending.put_nowait("reset")
        except asyncio.IncompleteReadError:
            ending.put_nowait("end of stream")

    async with target(listen) as port, await line(port, mbit_per_s=100, rtt_s=0.02) as relay:
        _, writer = await connect(relay)
        writer.write(b"hello")
        await writer.drain()
        assert await asyncio.wait_for(ending.get(), LIMIT_S) == "hello"
        reset(writer)
        assert await asyncio.wait_for(ending.get(), LIMIT_S) == "reset"


async def test_an_unreachable_target_resets_the_client():
    """Nobody listens behind the line: the client is told, not left hanging."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with await line(port, mbit_per_s=100, rtt_s=0.02) as relay:
        reader, _ = await connect(relay)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(-1), LIMIT_S)


async def test_a_target_that_does_not_read_stops_its_sender_and_nobody_else():
    """What a connection can push into a stalled line is bounded; its neighbour runs on; nothing is lost afterwards."""
    data, may_read, stalled = payload(8 << 20), asyncio.Event(), asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"e":
            await echo(reader, writer)
        else:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            await may_read.wait()
            stalled.put_nowait(await reader.read(-1))
            writer.close()

    async with target(serve) as port, await line(port, mbit_per_s=200, rtt_s=0.01) as relay:
        _, writer = await connect(relay)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sending = asyncio.create_task(send(writer, b"s" + data))
        unsent = await unsent_once_still(writer)
        assert len(data) - unsent < 4 << 20

        reader, neighbour = await connect(relay)
        await send(neighbour, b"e" + data[:100_000])
        assert await asyncio.wait_for(reader.read(-1), LIMIT_S) == data[:100_000]

        may_read.set()
        assert await asyncio.wait_for(stalled.get(), LIMIT_S) == data
        await sending


async def unsent_once_still(writer: asyncio.StreamWriter) -> int:
    """Bytes that the sender still holds when none has moved for far longer than the line takes."""
    before, still = -1, 0
    while still < 5:
        await asyncio.sleep(0.1)
        unsent = writer.transport.get_write_buffer_size()
        still = still + 1 if unsent == before else 0
        before = unsent
    return before


async def test_the_process_serves_metrics_and_ends_on_sigterm():
    """`run_relay` is a process of its own: it counts bytes per direction from 0 and stops when it is told."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        relay_port, metrics_port = first.getsockname()[1], second.getsockname()[1]
    async with target(echo) as port:
        code = (
            "from prfaas.live.wan_relay import RelayRoute, run_relay\n"
            f"run_relay([RelayRoute('127.0.0.1', {relay_port}, '127.0.0.1', {port})], bits_per_s=1e8, rtt_s=0.01,"
            f" metrics_address=('127.0.0.1', {metrics_port}))"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        try:
            async with asyncio.timeout(LIMIT_S):
                before = await scrape(metrics_port)
                assert b'prfaas_relay_bytes_total{direction="backward"} 0.0\n' in before
                reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
                await send(writer, payload(5000))
                assert await reader.read(-1) == payload(5000)
                after = await scrape(metrics_port)
                assert b'prfaas_relay_bytes_total{direction="forward"} 5000.0\n' in after
                assert b'prfaas_relay_bytes_total{direction="backward"} 5000.0\n' in after
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def scrape(port: int) -> bytes:
    """The page, waiting for the process to listen."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
            continue
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: relay\r\n\r\n")
        answer = await reader.read(-1)
        writer.close()
        return answer
