"""The engine process as its node sees it: commands in, events out, memory shared, nothing left behind at the end."""

import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from prfaas.engine.cost_model import write_config
from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Event,
    Finished,
    Load,
    PoolRead,
    Prefill,
    Prefilled,
    Ready,
    RowsReady,
    Tokens,
)
from prfaas.ipc import Channel
from prfaas.kvcache.layout import Window, chunk_ends

POOL_BYTES = 64 << 20
#: Nothing here takes a tenth of this unless it hangs.
LIVENESS_S = 20.0

E = TypeVar("E", bound=msgspec.Struct)


class EngineProcess:
    """One engine process with a pool of its own."""

    def __init__(self, model: Path) -> None:
        ours, theirs = socket.socketpair()
        pool_fd = os.memfd_create("pool")
        os.ftruncate(pool_fd, POOL_BYTES)
        self.pool = mmap.mmap(pool_fd, POOL_BYTES)
        command = [sys.executable, "-m", "prfaas.node.engine_process", "--model", str(model)]
        fds = (theirs.fileno(), pool_fd)
        self.process = subprocess.Popen([*command, "--fd", str(fds[0]), "--pool-fd", str(fds[1])], pass_fds=fds)
        theirs.close()
        os.close(pool_fd)
        self.channel = Channel[Event](ours, Event)
        self.send = self.channel.send
        self.seen: list[Event] = []
        self._unread: list[Event] = []

    def next(self) -> Event | None:
        """The next event, None once the process has closed its end."""
        deadline_s = time.monotonic() + LIVENESS_S
        while not self._unread:
            events = self.channel.receive(max(0.0, deadline_s - time.monotonic()))
            if events is None:
                return None
            assert events, f"no event within {LIVENESS_S} s"
            self._unread += events
        self.seen.append(self._unread.pop(0))
        return self.seen[-1]

    def until(self, kind: type[E], attempt: str | None = None) -> E:
        """The next event of this kind (of this attempt)."""
        deadline_s = time.monotonic() + LIVENESS_S
        while time.monotonic() < deadline_s:
            event = self.next()
            assert event is not None, "the engine has ended"
            if isinstance(event, kind) and attempt in (None, getattr(event, "attempt", None)):
                return event
        raise AssertionError(f"no {kind.__name__} within {LIVENESS_S} s")

    def answer(self, attempt: str) -> bytes:
        return b"".join(event.tokens for event in self.seen if isinstance(event, Tokens) and event.attempt == attempt)

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.pool.close()


@pytest.fixture
def spawn() -> Iterator[Callable[[Path], EngineProcess]]:
    with ExitStack() as stack:

        def spawn(model: Path) -> EngineProcess:
            engine = EngineProcess(model)
            stack.callback(engine.close)
            return engine

        yield spawn


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes hardly any time."""
    directory = tmp_path_factory.mktemp("quick")
    write_config(directory, time_scale=0.001)
    return directory


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model at the speed of the paper: 128K tokens take longer than any wait of these tests would notice."""
    directory = tmp_path_factory.mktemp("slow")
    write_config(directory, time_scale=10)
    return directory


def prefill(attempt: str, tokens: bytes, stop: int, out_at: int | None = None) -> Prefill:
    out = None if out_at is None else Window(0, stop, out_at, state=True)
    return Prefill(attempt=attempt, prompt=tokens, stop=stop, ends=chunk_ends(stop, 256), out=out)


def prompt(tokens: int) -> bytes:
    return struct.pack(f"<{tokens}I", *(3 + 31 * place % 500 for place in range(tokens)))


def test_kv_copied_between_two_processes_decodes_like_a_local_run(
    spawn: Callable[[Path], EngineProcess], quick: Path
) -> None:
    """Prefill in one process, memory carried over, decode in another: the tokens of a run that never left."""
    tokens, text = 2000, prompt(2001)
    source_engine, decode = spawn(quick), spawn(quick)
    layout = source_engine.until(Ready).info.layout
    assert decode.until(Ready).info == source_engine.seen[0].info  # type: ignore[union-attr]

    source, target, nbytes = 4096, 1 << 20, layout.span_bytes(tokens)
    source_engine.send(prefill("remote", text, tokens, out_at=source))
    source_engine.until(Prefilled, "remote")
    announced = [(event.layer, event.stop) for event in source_engine.seen if isinstance(event, RowsReady)]
    made = [(part.layer, part.stop) for part in layout.parts(tokens, chunk_ends(tokens, 256))]
    assert announced == list(dict.fromkeys(made))
    decode.pool[target : target + nbytes] = source_engine.pool[source : source + nbytes]
    decode.send(
        Decode(
            attempt="remote", prompt=text, tokens=tokens, max_tokens=20, held=(Window(0, tokens, target, state=True),)
        )
    )
    decode.until(PoolRead, "remote")
    decode.pool[target : target + nbytes] = bytes(nbytes)
    finished = decode.until(Finished, "remote")

    source_engine.send(prefill("local", text, tokens))
    source_engine.until(Prefilled, "local")
    source_engine.send(Decode(attempt="local", prompt=text, tokens=tokens, max_tokens=20))
    assert source_engine.until(Finished, "local").output_tokens == finished.output_tokens == 20
    assert decode.answer("remote") == source_engine.answer("local")
    assert len(decode.answer("remote")) == 80


def test_a_cancel_is_answered_in_the_middle_of_a_long_prefill(
    spawn: Callable[[Path], EngineProcess], slow: Path
) -> None:
    """The wait is one chunk, not the prompt; afterwards the engine is free and silent about the attempt."""
    engine = spawn(slow)
    engine.send(prefill("long", prompt(131072), 131072, out_at=0))
    engine.until(RowsReady, "long")
    engine.send(Cancel("long"))
    engine.until(Cancelled, "long")
    assert not [event for event in engine.seen if isinstance(event, Prefilled)]
    cancelled_at = len(engine.seen)
    engine.send(Decode(attempt="short", prompt=prompt(1), tokens=0, max_tokens=2))
    engine.until(Finished, "short")
    assert not [event for event in engine.seen[cancelled_at:] if getattr(event, "attempt", "") == "long"]


def test_a_stream_flows_while_a_long_prompt_is_prefilled(spawn: Callable[[Path], EngineProcess], slow: Path) -> None:
    engine = spawn(slow)
    engine.send(prefill("long", prompt(131072), 131072, out_at=0))
    engine.until(RowsReady, "long")
    engine.send(Decode(attempt="stream", prompt=prompt(1), tokens=0, max_tokens=3))
    engine.until(Finished, "stream")
    assert not [event for event in engine.seen if isinstance(event, Prefilled)]


def test_load_is_reported_without_work_and_when_the_engine_falls_idle(
    spawn: Callable[[Path], EngineProcess], quick: Path
) -> None:
    engine = spawn(quick)
    engine.until(Load)
    engine.until(Load)
    engine.send(prefill("a", prompt(600), 600))
    engine.until(Prefilled, "a")
    load = engine.until(Load)
    assert (load.queued_prefill_tokens, load.kept_sequences, load.prefill_tokens_total) == (0, 1, 600)
    assert load.prefill_busy_s_total > 0


@pytest.mark.parametrize("working", [False, True])
def test_the_engine_ends_when_its_node_closes_the_socket(
    spawn: Callable[[Path], EngineProcess], slow: Path, working: bool
) -> None:
    engine = spawn(slow)
    engine.until(Ready)
    if working:
        engine.send(prefill("long", prompt(131072), 131072, out_at=0))
        engine.until(RowsReady)
    engine.channel.close()
    assert engine.process.wait(LIVENESS_S) == 0


@pytest.mark.parametrize("working", [False, True])
def test_the_engine_leaves_stopping_to_its_node(
    spawn: Callable[[Path], EngineProcess], slow: Path, working: bool
) -> None:
    """Ctrl-C and SIGTERM may reach the whole process group; only the node answers them."""
    engine = spawn(slow)
    engine.until(Ready)
    if working:
        engine.send(prefill("long", prompt(131072), 131072, out_at=0))
        engine.until(RowsReady)
    for signum in (signal.SIGINT, signal.SIGTERM):
        engine.process.send_signal(signum)
        engine.send(Cancel("anybody"))
        engine.until(Cancelled, "anybody")
    engine.channel.close()
    assert engine.process.wait(LIVENESS_S) == 0


def test_a_killed_engine_is_noticed_by_its_socket(spawn: Callable[[Path], EngineProcess], quick: Path) -> None:
    engine = spawn(quick)
    engine.until(Ready)
    engine.process.kill()
    while engine.next() is not None:
        pass
    assert engine.process.wait(LIVENESS_S) == -signal.SIGKILL


def test_a_folder_without_a_model_ends_the_process_before_it_is_ready(
    spawn: Callable[[Path], EngineProcess], tmp_path: Path
) -> None:
    engine = spawn(tmp_path)
    assert engine.next() is None
    assert engine.process.wait(LIVENESS_S) != 0


NODE = """
import os, socket, subprocess, sys
fds = tuple(map(int, sys.argv[2:4]))
engine = subprocess.Popen(
    [sys.executable, "-m", "prfaas.node.engine_process", "--model", sys.argv[1],
     "--fd", sys.argv[2], "--pool-fd", sys.argv[3]], pass_fds=fds)
print(engine.pid, flush=True)
engine.wait()
"""


def test_a_killed_node_leaves_no_engine_behind(slow: Path) -> None:
    """Even while somebody else still holds the node's end of the socket."""
    ours, theirs = socket.socketpair()
    pool_fd = os.memfd_create("pool")
    os.ftruncate(pool_fd, POOL_BYTES)
    fds = (theirs.fileno(), pool_fd)
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(slow), *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
    )
    with ours, theirs, node:
        try:
            assert node.stdout is not None
            engine_fd = os.pidfd_open(int(node.stdout.readline()))
            channel = Channel[Event](ours, Event)
            assert isinstance((channel.receive(LIVENESS_S) or [None])[0], Ready)
            node.kill()
            assert select.select([engine_fd], [], [], LIVENESS_S)[0], "the engine is still there"
            os.close(engine_fd)
        finally:
            node.kill()
            os.close(pool_fd)
