"""A worker as its operator and its routers see it: one process and its two children, from start to exit code."""

import asyncio
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from prfaas.cluster import NodeId, RegionId
from prfaas.engine.cost_model import write_config
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.node.run import STOP_GRACE_S
from prfaas.process import end
from prfaas.request import TOKEN_BYTES, AttemptId, RequestId, Sampling
from prfaas.rpc.commands import Decode, Done, Event, Prefill, PrefillDone, Reserve, Reserved, Tokens
from prfaas.rpc.translate import pack_command, unpack_description, unpack_event
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub

LIVENESS_S = 40.0
GRACE_S = 10.0
NODE = NodeId("w")
#: With these a stream outlasts by far what the gRPC server grants to calls in progress when it is stopped.
TOKEN_S, OUTPUT_TOKENS = 0.02, 50 * int(STOP_GRACE_S) * 4
ATTEMPT = AttemptId("ab" * 16)
PROMPT = struct.pack("<300I", *range(300))


class WorkerProcess:
    """`prfaas decode-worker`, with what it says on its standard error."""

    def __init__(self, process: asyncio.subprocess.Process, store: MemoryStore) -> None:
        self.process, self.store, self.said = process, store, ""

    async def registered(self) -> bool:
        return bool((await self.store.list("/prfaas/")).entries)

    async def serving(self) -> dict[str, Any]:
        """The log line with which it begins to serve."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIVENESS_S):
            while line := (await self.process.stderr.readline()).decode():
                self.said += line
                if '"worker is serving"' in line:
                    fields: dict[str, Any] = json.loads(line)
                    return fields
        raise AssertionError(f"it never served: {self.said}")

    async def exit_code(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(LIVENESS_S):
            self.said += (await self.process.stderr.read()).decode()
            return await self.process.wait()

    def child(self, module: str) -> psutil.Process:
        [found] = [one for one in psutil.Process(self.process.pid).children() if module in one.cmdline()]
        return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "cost"
    directory.mkdir()
    write_config(directory, time_scale=0.1, decode_base_s=TOKEN_S / 0.1)
    return directory


@asynccontextmanager
async def worker(model_dir: Path, *options: str) -> AsyncIterator[WorkerProcess]:
    kept = MemoryStore()
    store = EmbeddedStoreServer(kept, "127.0.0.1", 0)
    await store.start()
    command = [sys.executable, "-m", "services.cli", "decode-worker", "--id", NODE, "--region", "b"]
    place = ["--model-dir", str(model_dir), "--store-endpoints", store.endpoint, "--log-format", "json"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *place,
        "--kv-pool-bytes",
        str(1 << 20),
        *options,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield WorkerProcess(process, kept)
    finally:
        await end(process, GRACE_S)
        await store.stop()


# ---- settings that cannot work ------------------------------------------------


@pytest.mark.parametrize(
    ("option", "setting"),
    [("--rpc-port", "worker.rpc_port"), ("--metrics-port", "worker.metrics_port"), ("--kv-port", "kv.port")],
)
async def test_a_port_that_is_taken_is_named(model_dir: Path, option: str, setting: str):
    """One line that says which setting and which address, and the exit code of a wrong configuration."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with worker(model_dir, option, str(port)) as started:
            assert await started.exit_code() == 2, started.said
    assert f"{setting}: " in started.said and str(port) in started.said
    assert "Traceback" not in started.said


async def test_a_pool_beyond_the_machines_memory_is_named(model_dir: Path):
    """Before a child is started on it."""
    async with worker(model_dir, "--kv-pool-bytes", str(1 << 60)) as started:
        assert await started.exit_code() == 2, started.said
    assert f"kv.pool_bytes: {1 << 60} is more than this machine's memory" in started.said
    assert "Traceback" not in started.said


# ---- children that freeze -----------------------------------------------------


async def test_field_C15_a_silent_child_ends_the_worker(model_dir: Path):
    """Its process lives and its socket is open, but it says nothing: a new incarnation has to begin."""
    async with worker(model_dir, "--engine-silence-s", "1") as started:
        await started.serving()
        os.kill(started.child("prfaas.node.engine_process").pid, signal.SIGSTOP)
        assert await started.exit_code() == 1, started.said
    assert "engine of w is unavailable: not a word for" in started.said


@pytest.mark.parametrize(
    ("module", "name"), [("prfaas.node.engine_process", "engine"), ("prfaas.transfer.pump", "pump")]
)
async def test_field_C15_a_stopped_child_ends_the_worker_within_seconds(model_dir: Path, module: str, name: str):
    """However long an engine may take for one operator: it can be seen that this one takes none."""
    async with worker(model_dir) as started:
        await started.serving()
        os.kill(started.child(module).pid, signal.SIGSTOP)
        begun = asyncio.get_running_loop().time()
        assert await started.exit_code() == 1, started.said
        assert asyncio.get_running_loop().time() - begun < LIVENESS_S / 2
    assert f"{name} is unavailable: its process was stopped" in started.said


# ---- the end ------------------------------------------------------------------


class Link:
    """A router's end of the token link, with one attempt."""

    def __init__(self, stub: WorkerStub) -> None:
        self._call = stub.Link()
        self._events: list[Event] = []

    async def ask(self, command: Reserve | Prefill | Decode) -> Event:
        await self._call.write(pb.ToWorker(commands=[pack_command(ATTEMPT, command)]))
        return await self.next()

    async def next(self) -> Event:
        async with asyncio.timeout(LIVENESS_S):
            while not self._events:
                message = await self._call.read()
                assert message is not grpc.aio.EOF, "the worker hung up"
                self._events += [event for one in message.events if (event := unpack_event(one, ATTEMPT, NODE))]
        return self._events.pop(0)


@asynccontextmanager
async def decoding(started: WorkerProcess) -> AsyncIterator[tuple[Link, Tokens]]:
    """A stream that has begun, and its first tokens."""
    address = (await started.serving())["rpc"]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = WorkerStub(channel)
        namespace = unpack_description(await stub.Describe(pb.DescribeRequest())).namespace
        link = Link(stub)
        reserve = Reserve(
            request_id=RequestId("r"),
            prompt=PROMPT,
            sampling=Sampling(max_tokens=OUTPUT_TOKENS),
            source_node=NODE,
            source_region=RegionId("b"),
            source_namespace=namespace,
            deadline_s=60.0,
        )
        assert isinstance(await link.ask(reserve), Reserved)
        prefill = Prefill(request_id=RequestId("r"), prompt=PROMPT, destination=None, deadline_s=60.0)
        assert isinstance(await link.ask(prefill), PrefillDone)
        first = await link.ask(Decode())
        assert isinstance(first, Tokens)
        yield link, first


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["the node", "its group"])
async def test_sigterm_lets_a_stream_finish(model_dir: Path, send: Callable[[int, int], None]):
    """What runs comes to its end while nothing new is taken, and then the process ends well. Supervisors may signal the
    whole group: engine and pump leave it to the node."""
    async with worker(model_dir) as started, decoding(started) as (link, first):
        send(started.process.pid, signal.SIGTERM)
        received = len(first.tokens)
        while isinstance(event := await link.next(), Tokens):
            received += len(event.tokens)
        assert isinstance(event, Done) and event.output_tokens == OUTPUT_TOKENS
        assert received == OUTPUT_TOKENS * TOKEN_BYTES
        assert await started.exit_code() == 0, started.said
    assert "Traceback" not in started.said


@pytest.mark.parametrize(
    ("module", "name"), [("prfaas.node.engine_process", "engine"), ("prfaas.transfer.pump", "pump")]
)
async def test_a_child_that_dies_under_a_stream_ends_the_worker_without_a_traceback(
    model_dir: Path, module: str, name: str
):
    """The attempt is cut off with the node, which leaves the cluster at once, and one line says why."""
    async with worker(model_dir) as started, decoding(started):
        assert await started.registered()
        started.child(module).kill()
        assert await started.exit_code() == 1, started.said
        assert not await started.registered(), "its record lives on with its lease"
    assert f"{name}" in started.said and "is unavailable" in started.said
    assert "Traceback" not in started.said and "never awaited" not in started.said
