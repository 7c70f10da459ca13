"""`prfaas router --workers`: several whole routers on one port, as their operator and their clients see them."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from prfaas.config import Config, RouterConfig
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.process import end
from services.router.supervisor import MAX_PAUSE_S, PAUSE_S, of_worker, pause_s
from tests.unit.tokenizer.byte_level import write_model_dir

LIVENESS_S = 60.0
WORKERS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


class Client:
    """One connection to whichever worker the kernel gave it to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, str]:
        async with asyncio.timeout(LIVENESS_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", head)
            assert length is not None, head
            return int(head.split()[1]), (await self._reader.readexactly(int(length[1]))).decode()

    async def get(self, path: str) -> tuple[int, str]:
        self.send(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        return await self.answer()

    async def ended(self) -> bool:
        """Whether the other end closes without saying anything more."""
        try:
            async with asyncio.timeout(LIVENESS_S):
                return await self._reader.read() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._writer.close()


async def page(port: int, path: str = "/metrics") -> tuple[int, str]:
    """One that a worker has to itself."""
    client = await Client.connect(port)
    with closing(client):
        return await client.get(path)


async def connections(metrics_port: int) -> int:
    text = (await page(metrics_port))[1]
    found = re.search(r"^prfaas_router_http_open_connections (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not await condition():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def prfaas_router(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.router",
        *options,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("PRFAAS_")},
    )


class Routers:
    """`prfaas router --workers`, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.said = process, list[str]()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said.append(line.decode())

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Of its log, those about this."""
        parsed = [json.loads(line) for line in self.said if line.startswith("{")]
        return [line for line in parsed if line["event"] == event]

    @property
    def port(self) -> int:
        port: int = self.lines("all workers are serving")[0]["port"]
        return port

    def page(self, worker: int) -> int:
        """The port of its newest page."""
        newest = [line for line in self.lines("router is serving") if line["worker"] == worker][-1]
        return int(newest["metrics"].rpartition(":")[2])

    @property
    def pages(self) -> list[int]:
        return [self.page(number) for number in range(WORKERS)]

    async def has_said(self, event: str) -> bool:
        return bool(self.lines(event))

    async def is_closed_to_others(self) -> bool:
        try:
            (await Client.connect(self.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@asynccontextmanager
async def routers(model_dir: Path) -> AsyncIterator[Routers]:
    """Running, each with its page."""
    memory = MemoryStore()
    store = EmbeddedStoreServer(memory, "127.0.0.1", 0)
    await store.start()
    process = await prfaas_router(
        *("--workers", str(WORKERS), "--port", "0", "--metrics-port", "0", "--model-dir", str(model_dir)),
        *("--store-endpoints", store.endpoint, "--log-format", "json"),
    )
    running = Routers(process)
    try:

        async def announced() -> bool:
            assert process.returncode is None, running.said
            routers = sum("router" in entry.key for entry in (await memory.list("/prfaas/")).entries)
            return routers >= WORKERS and bool(running.lines("all workers are serving"))

        await until(announced)
        yield running
    finally:
        await end(process, LIVENESS_S)
        await store.stop()


async def everything(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read()).decode()


async def one_each(running: Routers) -> list[Client]:
    """A client of every worker, in their order; the kernel spreads them by their ports."""
    found, metrics_ports = dict[int, Client](), running.pages
    for _ in range(200):
        before = [await connections(each) for each in metrics_ports]
        client = await Client.connect(running.port)
        assert (await client.get("/live"))[0] == 200
        after = [await connections(each) for each in metrics_ports]
        (whose,) = (number for number, count in enumerate(after) if count > before[number])
        if found.setdefault(whose, client) is not client:
            client.close()
            await until(lambda counts=before: _same(metrics_ports, counts))  # type: ignore[misc]
        if len(found) == len(metrics_ports):
            return [found[number] for number in range(len(metrics_ports))]
    raise AssertionError("a worker gets no connections")


async def _same(metrics_ports: list[int], counts: list[int]) -> bool:
    return [await connections(each) for each in metrics_ports] == counts


BODY = b'{"model": "nobody", "prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


async def test_workers_share_the_port_and_nothing_else(model_dir: Path):
    """Each gets connections and has a page of its own. One that is killed takes its own connections with it and is
    started again; meanwhile the port is served. SIGTERM lets both answer what has begun, and ends all with 0."""
    async with routers(model_dir) as running:
        first, second = await one_each(running)
        assert [(await page(each, "/live"))[0] for each in running.pages] == [200, 200]
        killed, left = sorted(running.workers(), key=lambda child: child.create_time())
        killed.send_signal(signal.SIGKILL)
        assert await first.ended()
        await until(lambda: running.has_said("a worker ended"))  # till then the kernel may still give it connections
        assert (await second.get("/live"))[0] == 200
        for _ in range(10):
            client = await Client.connect(running.port)
            assert (await client.get("/live"))[0] == 200
            client.close()
        await until(lambda: running.has_said("a worker serves again"))
        assert left.is_running()
        second.close()
        clients = await one_each(running)
        for client in clients:
            client.send(HEAD)
        idle = await one_each(running)
        children = running.workers()
        running.process.send_signal(signal.SIGTERM)
        await until(running.is_closed_to_others)
        for client in clients:
            client.send(BODY)
        assert [status for status, _ in await asyncio.gather(*(client.answer() for client in clients))] == [503, 503]
        assert all(await asyncio.gather(*(client.ended() for client in clients)))
        for client in (*clients, *idle):
            client.close()
        async with asyncio.timeout(LIVENESS_S):
            assert await running.process.wait() == 0
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
async def test_a_second_signal_ends_the_drain(model_dir: Path):
    """Requests that have begun are cut off, and it ends with 0 all the same. Ctrl-C in a terminal, and a manager that
    tells every process of a group, do not count twice."""
    async with routers(model_dir) as running:
        clients = await one_each(running)
        for client in clients:
            client.send(HEAD)
        await one_each(running)
        for child in running.workers():
            child.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.process.wait(), 1.0)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIVENESS_S):
            assert await running.process.wait() == 0
        assert all(await asyncio.gather(*(client.ended() for client in clients)))


@pytest.mark.slow
async def test_workers_end_with_their_parent(model_dir: Path):
    """However it ends: nothing holds the port without anybody to stop it. What has begun is answered first."""
    async with routers(model_dir) as running:
        clients = await one_each(running)
        for client in clients:
            client.send(HEAD)
        idle = await one_each(running)
        workers = running.workers()
        running.process.kill()
        await until(running.is_closed_to_others)
        for client in clients:
            client.send(BODY)
        assert [status for status, _ in await asyncio.gather(*(client.answer() for client in clients))] == [503, 503]
        for client in (*clients, *idle):
            client.close()

        async def all_gone() -> bool:
            return not any(worker.is_running() for worker in workers)

        await until(all_gone)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens, and would let us listen as well."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


async def test_a_port_that_is_taken_is_said_once(taken: int):
    """By the parent, before it starts anything: sharing the port hides from workers that it is somebody else's."""
    options = ("--workers", "2", "--port", str(taken), "--metrics-port", "0")
    process = await prfaas_router(*options)
    said = await everything(process)
    assert await process.wait() == 2
    assert said.count("router.port: cannot listen") == 1


async def test_what_workers_are_refused_for_is_said_once(tmp_path: Path):
    """In the words of a router that is alone, and with its exit code."""
    options = ("--workers", "3", "--port", "0", "--metrics-port", "0", "--model-dir", str(tmp_path / "nowhere"))
    process = await prfaas_router(*options)
    said = await everything(process)
    assert await process.wait() == 2
    assert said.count("nowhere") == 1 and "Traceback" not in said


def test_a_worker_that_ends_again_and_again_is_started_more_and_more_seldom():
    """But always again, however often it has ended."""
    assert [pause_s(times) for times in (1, 2, 3)] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pause_s(20) == pause_s(100_000) == MAX_PAUSE_S


def test_each_worker_has_ports_of_its_own():
    """Counted from the ones given; a free one stays a free one, and none stays none."""
    config = Config(router=RouterConfig(workers=3, port=1, admin_port=7000, metrics_port=9000))
    mine = of_worker(config, 8000, 2).router
    assert (mine.port, mine.admin_port, mine.metrics_port, mine.workers) == (8000, 7002, 9002, 1)
    free = of_worker(Config(router=RouterConfig(workers=3, metrics_port=0)), 8000, 2).router
    assert (free.admin_port, free.metrics_port) == (0, 0)
