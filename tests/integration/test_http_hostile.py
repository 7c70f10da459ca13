"""Clients that take more than is theirs: they are stopped, it costs little memory, and others do not notice."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from prfaas.process import raise_open_files
from services.router.http.limits import Limits
from tests.integration.router_under_test import ECHO, ENDLESS, LIVENESS_S, STALLS
from tests.integration.wire import Wire, request
from tests.unit.tokenizer.byte_level import write_model_dir

MIB = 1 << 20
LIMITS = Limits(max_body_bytes=4 * MIB, max_connections=6000, write_timeout_s=1.0, head_timeout_s=1.0, linger_s=1.0)
LIVE = request("GET", "/live")


class Front:
    """A router in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.port = int(process.stdout.readline())
        self._process = psutil.Process(process.pid)

    @property
    def rss(self) -> int:
        return self._process.memory_info().rss

    def connections(self) -> int:
        """That are established, this one not counted."""
        own = self._process.net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == self.port for each in own)

    def settles(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIVENESS_S
        while not holds():
            assert time.monotonic() < deadline, f"{self.rss:,} bytes"
            time.sleep(0.01)

    @contextmanager
    def grows_by_less_than(self, size: int) -> Iterator[None]:
        """Its memory, at any moment."""
        before, highest, done = self.rss, [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                highest[0] = max(highest[0], self.rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        assert max(highest[0], self.rss) - before < size

    @contextmanager
    def serves_others(self) -> Iterator[None]:
        """All the while, and without delay. The limit is one for liveness on a busy machine, not a figure."""
        done, slowest, answered = threading.Event(), [0.0], [0]

        def ask() -> None:
            with Wire(self.port) as wire:
                while not done.wait(0.005):
                    begun = time.monotonic()
                    assert wire.send(LIVE).read().status == 200
                    slowest[0] = max(slowest[0], time.monotonic() - begun)
                    answered[0] += 1

        other = threading.Thread(target=ask)
        other.start()
        try:
            yield
        finally:
            done.set()
            other.join()
        assert answered[0] > 0 and slowest[0] < 5.0


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    model_dir = write_model_dir(tmp_path_factory.mktemp("model"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.integration.front_process", str(model_dir)]
    with subprocess.Popen(
        [*command, msgspec.json.encode(LIMITS).decode()],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        front = Front(process)
        with Wire(front.port) as wire:  # what is made at first use is made
            wire.ask("POST", "/v1/completions", {"model": ECHO, "prompt": "x", "stream": True})
        yield front
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIVENESS_S) == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def completion(model: str, **fields: Any) -> bytes:
    return request("POST", "/v1/completions", {"model": model, "prompt": [70, 71, 72], "max_tokens": 500} | fields)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_gigabyte_is_refused_before_it_is_sent(front: Front):
    """When its length is said."""
    with Wire(front.port) as wire, front.grows_by_less_than(4 * MIB):
        answer = wire.send(POST + b"Content-Length: %d\r\n\r\n" % (1 << 30)).read()
        assert (answer.status, answer.headers["connection"]) == (413, "close")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"Content-Length: 1073741824\r\n\r\n", id="length", marks=pytest.mark.slow),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n40000000\r\n", id="chunked"),
    ],
)
def test_a_gigabyte_that_comes_nevertheless_is_not_kept(front: Front, head: bytes):
    """The client that sends on is told so, and cut off."""
    with front.serves_others(), front.grows_by_less_than(5 * LIMITS.max_body_bytes), Wire(front.port) as wire:
        wire.send(POST + head)
        piece, sent = b"x" * MIB, 0
        answers: list[int] = []
        reader = threading.Thread(target=lambda: answers.append(wire.read().status))
        reader.start()
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                wire.send(piece)
                sent += len(piece)
        reader.join()
        assert answers == [413]


def test_a_body_in_the_smallest_chunks_takes_no_more_memory(front: Front):
    """Each part by itself would take ten times its bytes."""
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = b"2\r\nxy\r\n" * (MIB // 8)
    with Wire(front.port) as wire, front.grows_by_less_than(3 * LIMITS.max_body_bytes):
        wire.send(head)
        for _ in range(12):
            wire.send(chunks)
        assert wire.send(b"0\r\n\r\n").read().status == 400  # 3 MiB, and no JSON


def test_what_bodies_took_goes_back_when_their_clients_leave(front: Front):
    """Also of bodies whose end never came."""
    before, size = front.rss, LIMITS.max_body_bytes - 1
    with ExitStack() as stack:
        for _ in range(40):
            wire = stack.enter_context(Wire(front.port))
            wire.send(POST + b"Content-Length: %d\r\n\r\n" % size + b"x" * (size - 1))
        front.settles(lambda: front.rss > before + 30 * size)
    front.settles(lambda: front.rss < before + 10 * size)


def test_a_hundred_thousand_headers_are_refused(front: Front):
    """With the first ones too many; the others are not kept."""
    lines = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 400) for number in range(100_000))
    with front.serves_others(), front.grows_by_less_than(16 * MIB), Wire(front.port) as wire:
        answers: list[int] = []
        reader = threading.Thread(target=lambda: answers.append(wire.read().status))
        reader.start()
        with contextlib.suppress(ConnectionError):
            wire.send(POST + lines + b"\r\n")
        reader.join()
        assert answers == [431]


def test_readers_that_do_not_read_are_held_and_let_go(front: Front):
    """What is on its way to each is bounded, and so is the time."""
    count = 20
    with ExitStack() as stack:
        stack.enter_context(front.serves_others())
        stack.enter_context(front.grows_by_less_than(16 * MIB))
        wires = [stack.enter_context(Wire(front.port, receive_buffer=4096)) for _ in range(count)]
        for wire in wires:
            wire.send(completion(ENDLESS, stream=True))
        until(lambda: front.connections() >= count)
        until(lambda: front.connections() <= 1)


def test_writers_that_do_not_write_are_let_go(front: Front):
    """Each with 408, however slowly it drips."""
    with front.serves_others(), ExitStack() as stack:
        wires = [stack.enter_context(Wire(front.port)) for _ in range(50)]
        for wire in wires:
            wire.send(b"GET / HT")
        assert {wire.read().status for wire in wires} == {408}


def test_a_client_that_closes_half_is_answered(front: Front):
    """As far as that can be done at once; it hears nothing of what would take long, which is ended."""
    with Wire(front.port) as wire:
        wire.send(LIVE + request("GET", "/v1/models")).socket.shutdown(socket.SHUT_WR)
        assert [wire.read().status, wire.read().status] == [200, 200]
        assert wire.rest() == b""
    with Wire(front.port) as wire:
        wire.send(completion(STALLS)).socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert wire.rest() == b""
    until(lambda: front.connections() == 0)


def test_a_storm_of_connections_is_served(front: Front):
    """Many come at once, ask at once and leave at once, some in the middle of a word."""
    raise_open_files()
    with front.serves_others(), ExitStack() as stack:
        wires = [stack.enter_context(Wire(front.port)) for _ in range(1000)]
        for number, wire in enumerate(wires):
            wire.send(LIVE[:20] if number % 5 == 0 else LIVE)
        assert {wire.read().status for number, wire in enumerate(wires) if number % 5} == {200}
    until(lambda: front.connections() == 0)


@pytest.mark.parametrize("count", [2000, pytest.param(5000, marks=pytest.mark.slow)])
def test_field_C13_thousands_of_streams_are_held(front: Front, count: int):
    """Each has shown its first tokens and waits for more; others are served meanwhile."""
    raise_open_files()
    body = completion(STALLS, stream=True)
    with ExitStack() as stack:
        stack.enter_context(front.serves_others())
        stack.enter_context(front.grows_by_less_than(count * 64 * 1024))
        wires = []
        for _ in range(count // 100):
            wires += [stack.enter_context(Wire(front.port)) for _ in range(100)]
            for wire in wires[-100:]:
                wire.send(body)
        for wire in wires:
            assert wire.read_head()[0] == 200
            shown = b""
            while shown.count(b"data: ") < 3:
                shown += wire.read_chunk()
    until(lambda: front.connections() == 0)
