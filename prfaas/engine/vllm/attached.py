"""An engine process on a vLLM server that somebody else starts and stops, on the same machine.

The server was started with our connector, which looks for a worker at a socket that both were told of, and takes one
after another. What does not fit together is found before the node hears of an engine: a server that does not answer,
one without the connector or whose connector serves another worker, and one with another model than the worker's.
"""

import asyncio
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from prfaas.engine.messages import Command, Ready
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.completions import Address, ServerError, address_of, get
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.engine_info import ServedModel, engine_info, served_model
from prfaas.engine.vllm.kv_events import Endpoints
from prfaas.engine.vllm.prefix_book import PrefixBook
from prfaas.engine.vllm.prefix_watch import can_watch, capabilities, watch_prefixes
from prfaas.engine.vllm.reports import count, report
from prfaas.errors import ConfigError
from prfaas.ipc import AsyncChannel

SERVER, BRIDGE, EVENTS = "worker.vllm_server", "worker.vllm_bridge", "worker.vllm_events"
#: How long a server may take to answer, and then its connector to come, which looks for us twice a second. Together
#: less than an engine may be silent.
ANSWER_S, CONNECTOR_S = 25.0, 20.0
PAUSE_S = 0.5

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Attached:
    """The settings `worker.vllm_server`, `worker.vllm_bridge` and `worker.vllm_events`."""

    server: str
    bridge: str
    events: tuple[str, ...] = ()

    @property
    def api(self) -> Address:
        try:
            return address_of(self.server)
        except ValueError as error:
            raise ConfigError(SERVER, str(error)) from error

    @property
    def endpoints(self) -> Endpoints | None:
        if len(self.events) > 2:
            raise ConfigError(EVENTS, "names two places at most")
        for each in self.events:
            if not re.fullmatch(r"tcp://.+:\d+|ipc://.+", each):
                raise ConfigError(EVENTS, f"{each!r} is neither tcp://host:port nor ipc:///path")
        if self.events and not can_watch():
            raise ConfigError(EVENTS, "needs pyzmq: pip install 'prfaas[vllm]'")
        return Endpoints(*self.events) if self.events else None


async def attach(to: Attached, model_dir: Path, pool_fd: int, node: AsyncChannel[Command]) -> None:
    """Until the node is gone. Raises PeerUnavailable when the server is, ConfigError when it cannot be used."""
    api, endpoints, pool_bytes = to.api, to.endpoints, os.fstat(pool_fd).st_size
    served = await _served(api, to.server)
    shelf_fd = os.memfd_create("prfaas-shelf")
    os.ftruncate(shelf_fd, pool_bytes)
    adapter = Adapter(api, pool_bytes, node.send, served.id)
    with _listener(to.bridge) as listener:
        bridge = await _connector(to, listener, (pool_fd, shelf_fd), adapter)
    _check_model(model_dir, bridge.hello.model)
    adapter.connect(bridge)
    async with asyncio.TaskGroup() as group:
        crew = [
            group.create_task(report(adapter, node), name="load"),
            group.create_task(bridge.run(), name="bridge"),
            group.create_task(count(adapter, api), name="server counters"),
        ]
        info = await engine_info(model_dir, bridge.hello.geometry, served)
        if endpoints is not None:
            book = PrefixBook(info.namespace, bridge.hello.geometry)
            info = msgspec.structs.replace(info, capabilities=(*info.capabilities, *capabilities(book)))
            crew.append(group.create_task(watch_prefixes(endpoints, book, node.send), name="server prefixes"))
        log.info("attached to a vLLM server", vllm=bridge.hello.vllm, namespace=info.namespace)
        node.send(Ready(info))
        while (order := await node.receive()) is not None:
            adapter.handle(order)
        for task in crew:
            task.cancel()


async def _served(api: Address, name: str) -> ServedModel:
    try:
        async with asyncio.timeout(ANSWER_S):
            while not await _answers(api):  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
            return await served_model(api)
    except TimeoutError:
        raise ConfigError(SERVER, f"nothing at {name} has answered for {ANSWER_S:.0f} s") from None
    except (ServerError, OSError, msgspec.MsgspecError) as error:
        raise ConfigError(SERVER, f"{name} is no vLLM server: {error}") from error


async def _answers(api: Address) -> bool:
    try:
        await get(api, "/health")
    except (OSError, ServerError):
        return False
    return True


async def _connector(to: Attached, listener: socket.socket, memory: tuple[int, int], adapter: Adapter) -> Bridge:
    try:
        async with asyncio.timeout(CONNECTOR_S):
            return await Bridge.accept(listener, memory, adapter.heard)
    except TimeoutError:
        raise ConfigError(
            BRIDGE,
            f"the server at {to.server} answers, but no connector of ours has come to {to.bridge} within"
            f" {CONNECTOR_S:.0f} s. The server must have been started with it in --kv-transfer-config, this path as"
            ' "bridge" and "stays": true in kv_connector_extra_config, and may have no other worker',
        ) from None


def _check_model(model_dir: Path, model: str) -> None:
    if Path(model).resolve() != model_dir:
        raise ConfigError("worker.model_dir", f"is {model_dir}, and the server has {model}: they must be one folder")


@contextmanager
def _listener(path: str) -> Iterator[socket.socket]:
    """At a path that outlives us. Who is there has its lock; what lies there without is left over."""
    if not path:
        raise ConfigError(BRIDGE, "is required with worker.vllm_server")
    lock = _locked(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            Path(path).unlink(missing_ok=True)
            listener.bind(path)
        except OSError as error:
            raise ConfigError(BRIDGE, f"{path}: {error.strerror or error}") from error
        listener.listen(1)
        listener.setblocking(False)
        yield listener
    finally:
        listener.close()
        Path(path).unlink(missing_ok=True)
        os.close(lock)


def _locked(path: str) -> int:
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(BRIDGE, f"{path} is where another worker waits for its server") from error
    except OSError as error:
        raise ConfigError(BRIDGE, f"{path}: {error.strerror}") from error
    return lock
