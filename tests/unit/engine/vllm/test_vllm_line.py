"""A server that outlives its workers: it waits for none of them for long, and takes the next one."""

import array
import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from prfaas.engine.vllm import line
from prfaas.engine.vllm.bridge import Begun, Grant, Hello, Order
from prfaas.engine.vllm.line import Line
from prfaas.ipc import Channel
from tests.unit.engine.vllm.conftest import GEOMETRY, LIVENESS_S


class Server:
    """The connector's end, in a server that stays. What it hears of its workers is in `said`."""

    def __init__(self, path: Path) -> None:
        self.said: queue.Queue[object] = queue.Queue()
        self.line = Line(
            str(path),
            Hello(GEOMETRY, "none"),
            lambda _: self.said.put("came"),
            self.said.put,
            lambda: self.said.put("left"),
            stays=True,
        )

    def until(self, what: object) -> None:
        """Before the first worker it has looked for one in vain, now and then."""
        while self.said.get(timeout=LIVENESS_S) != what:
            pass


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[], socket.socket]]:
    """The next one that the server connects to."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(tmp_path / "bridge"))
        listener.listen(1)
        listener.settimeout(LIVENESS_S)

        def accept() -> socket.socket:
            sock = stack.enter_context(listener.accept()[0])
            memory = [os.memfd_create(name) for name in ("pool", "shelf")]
            for descriptor in memory:
                os.ftruncate(descriptor, 4096)
            sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", memory))])
            for descriptor in memory:
                os.close(descriptor)
            return sock

        yield accept


def test_a_worker_that_reads_nothing_does_not_hold_up_its_server(
    worker: Callable[[], socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others are served meanwhile: it is given up, and the next one is heard."""
    monkeypatch.setattr(line, "STALLED_S", 0.2)
    server = Server(tmp_path / "bridge")
    stuck = worker()
    server.until("came")

    given_up = threading.Event()

    def tell() -> None:
        while not given_up.is_set():
            server.line.tell(Begun("a", 0, 0.0))

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    server.until("left")
    given_up.set()
    telling.join(LIVENESS_S)
    assert not telling.is_alive() and stuck.fileno() >= 0
    _speaks(Channel(worker(), None), Grant("b"), server)


def test_a_worker_of_another_version_is_followed_by_the_next(worker: Callable[[], socket.socket], tmp_path: Path):
    class Other(msgspec.Struct, tag="Other"):
        """What this version does not know."""

    server = Server(tmp_path / "bridge")
    first: Channel[Order] = Channel(worker(), None)
    server.until("came")
    first.send(Other())
    server.until("left")
    _speaks(Channel(worker(), None), Grant("b"), server)


def _speaks(channel: Channel[Order], order: Grant, server: Server) -> None:
    server.until("came")
    channel.send(order)
    server.until(order)
