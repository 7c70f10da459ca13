"""The two other processes of a worker: engine and pump, and the pool of shared memory between them. A shard of the
cache pool has the pump alone.

They are one failure unit with their node: when one ends, the node ends, and a new incarnation begins.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prfaas.config import WorkerConfig
from prfaas.engine import messages as engine_messages
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.ipc import AsyncChannel
from prfaas.process import ended
from prfaas.security import is_loopback
from prfaas.transfer.pump import messages as pump_messages

#: How long a child may take to see that its channel is closed. It may be in the middle of an operator, and has nothing
#: that is worth waiting for.
STOP_GRACE_S = 2.0
#: How often a child is looked at for being stopped, and how often in a row it must have been.
LOOK_S, LOOKS = 1.0, 3
EMBEDDED, VLLM = ("prfaas.node.engine_process",), "prfaas.engine.vllm.process"


class Child:
    """A child process and the channel to it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, channel: AsyncChannel[Any]) -> None:
        self.name, self.process, self.channel = name, process, channel

    @classmethod
    async def spawn(cls, name: str, incoming: Any, pool_fd: int, *args: str) -> "Child":
        """Run `python -m *args --fd N --pool-fd M`."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *args,
                "--fd",
                str(theirs.fileno()),
                "--pool-fd",
                str(pool_fd),
                pass_fds=(theirs.fileno(), pool_fd),
                stdin=asyncio.subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        return cls(name, process, await AsyncChannel.over(ours, incoming))

    async def watch(self) -> None:
        """Raise PeerUnavailable when the process ends, or has been stopped by a signal for some looks: of an engine it
        would take much longer to show by its silence."""
        stopped = 0
        while stopped < LOOKS:
            try:
                async with asyncio.timeout(LOOK_S):
                    code = await self.process.wait()
            except TimeoutError:
                stopped = stopped + 1 if _stopped(self.process.pid) else 0
            else:
                raise PeerUnavailable(self.name, f"its process ended with {code}")
        raise PeerUnavailable(self.name, "its process was stopped")

    async def stop(self) -> None:
        self.channel.close()
        await ended(self.process, STOP_GRACE_S)


def _stopped(pid: int) -> bool:
    """By SIGSTOP or the like. One that a debugger holds is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


@asynccontextmanager
async def children(
    model_dir: Path, pool_bytes: int, engine: Sequence[str] = EMBEDDED
) -> AsyncIterator[tuple[Child, Child]]:
    """Engine and pump, running, on a new pool; both are stopped at the end. `engine`: its module and what that wants
    to know besides the model. Raises ConfigError for a pool that this machine has no memory for."""
    async with pump_child("kv.pool_bytes", pool_bytes) as (pump, pool_fd):
        engine_child = await Child.spawn("engine", engine_messages.Event, pool_fd, *engine, "--model", str(model_dir))
        try:
            yield engine_child, pump
        finally:
            await engine_child.stop()


def engine_of(own: WorkerConfig) -> tuple[str, ...]:
    """For `children`. Raises ConfigError for settings that do not go together."""
    if own.engine == "embedded":
        return EMBEDDED
    _check_together(own)
    if own.vllm_server:
        return (VLLM, "--server", own.vllm_server, "--bridge", own.vllm_bridge, *_words("event", own.vllm_events))
    network = () if own.vllm_network == "none" else (f"--network={own.vllm_network}",)
    place = f"--network-address={own.vllm_network_address}"
    return (VLLM, "--python", own.vllm_python, *network, place, *_words("argument", own.vllm_arguments))


def _check_together(own: WorkerConfig) -> None:
    """What would be ignored is refused, and so is an address from which nobody could fetch anything."""
    if own.vllm_server and own.vllm_network != "none":
        raise ConfigError("worker.vllm_network", "goes without worker.vllm_server: the worker must start the server")
    if own.vllm_server and own.vllm_arguments:
        raise ConfigError("worker.vllm_arguments", "goes without worker.vllm_server, which others start")
    for setting in ("vllm_bridge", "vllm_events"):
        if getattr(own, setting) and not own.vllm_server:
            raise ConfigError(f"worker.{setting}", "goes with worker.vllm_server only")
    host = own.vllm_network_address.rpartition(":")[0]
    routers_come_to = own.rpc_advertise.rpartition(":")[0] or own.rpc_host
    if own.vllm_network != "none" and is_loopback(host) and not is_loopback(routers_come_to):
        raise ConfigError(
            "worker.vllm_network_address", f"{host} is this machine alone: name what other nodes of the region reach"
        )


def _words(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """One option for each, so that a word may look like an option itself."""
    return tuple(f"--{name}={word}" for word in words)


@asynccontextmanager
async def pump_child(setting: str, pool_bytes: int) -> AsyncIterator[tuple[Child, int]]:
    """A pump, running, on a new pool, and the descriptor of that pool's memory. Raises ConfigError naming the setting,
    as `children` does."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool_bytes > memory_bytes:
        raise ConfigError(setting, f"{pool_bytes} is more than this machine's memory of {memory_bytes} bytes")
    pool_fd = os.memfd_create("prfaas-pool")
    try:
        os.ftruncate(pool_fd, pool_bytes)
        pump = await Child.spawn("pump", pump_messages.Event, pool_fd, "prfaas.transfer.pump")
        try:
            yield pump, pool_fd
        finally:
            await pump.stop()
    finally:
        os.close(pool_fd)
