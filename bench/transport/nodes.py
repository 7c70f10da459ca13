"""Workers as far as a transfer is concerned: a real pump process and an engine process on one pool."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.transport.cpu import cpu_s
from bench.transport.engine import Engine
from prfaas.ipc import Channel
from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.pump import messages as m

NAMESPACE = "bench"
NO_PROGRESS_S, CONNECT_S = 20.0, 10.0
START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the pumps of a run are started."""

    layout: KvLayout
    pool_bytes: int
    integrity: m.Integrity = "crc32c"
    congestion: str = ""


class Node:
    """`prefix` is what runs a command where the worker shall live; `host` its address there."""

    def __init__(self, name: str, settings: Settings, *, host: str, prefix: Sequence[str] = ()) -> None:
        self.name, self.layout, self._host = name, settings.layout, host
        self.incarnation = random.getrandbits(63)
        self.load: m.Load | None = None
        self.loaded_at = 0.0
        self._pool_fd = os.memfd_create("kv-pool")
        os.ftruncate(self._pool_fd, settings.pool_bytes)
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._pool_fd)
        program = ["-m", "prfaas.transfer.pump", "--fd", str(fds[0]), "--pool-fd", str(fds[1])]
        self.pump = subprocess.Popen([*prefix, sys.executable, *program], pass_fds=fds)
        theirs.close()
        self.engine = Engine(self._pool_fd, prefix)
        self.channel: Channel[m.Event] = Channel(ours, m.Event)
        self.tell(
            m.Start(
                node=name,
                incarnation=self.incarnation,
                namespace=NAMESPACE,
                layout=settings.layout,
                pool_bytes=settings.pool_bytes,
                listen_host=host,
                listen_port=0,
                no_progress_s=NO_PROGRESS_S,
                connect_s=CONNECT_S,
                integrity=settings.integrity,
                congestion=settings.congestion,
            )
        )
        listening = self.channel.receive(START_S)
        if not listening or not isinstance(listening[0], m.Listening):
            self.close()
            raise RuntimeError(f"the pump of {name} does not start: {listening}")
        self.address = f"{host}:{listening[0].port}"

    def tell(self, command: m.Command) -> None:
        self.channel.send(command)

    @property
    def pids(self) -> tuple[int, int]:
        return self.pump.pid, self.engine.process.pid

    def cpu_s(self) -> float:
        return cpu_s(self.pids)

    def close(self) -> None:
        self.channel.close()
        self.engine.close()
        try:
            self.pump.wait(5)
        except subprocess.TimeoutExpired:
            self.pump.kill()
            self.pump.wait()
        os.close(self._pool_fd)
