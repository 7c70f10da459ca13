"""A real Mooncake Store for tests: a master and a client that holds the memory, on free loopback ports."""

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.free_ports import free_ports

START_S = 20.0
#: The memory of a client that tests use beside the store: no more than it takes.
_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MooncakeCluster:
    master: str
    admin: str
    master_process: subprocess.Popen[bytes]
    #: The process that holds what is stored.
    holder: subprocess.Popen[bytes]
    #: A client of the library itself, without ours in between.
    client: Any


def missing() -> str:
    """Why it cannot run here; empty when it can."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    if importlib.util.find_spec("mooncake") is None:
        return "no package `mooncake` (the extra `mooncake`)"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return str(error)
    return ""


@contextmanager
def start_mooncake(directory: Path, memory_bytes: int) -> Iterator[MooncakeCluster]:
    rpc_port, admin_port, holder_port = free_ports(3)
    master, admin = f"127.0.0.1:{rpc_port}", f"127.0.0.1:{admin_port}"
    started = [
        _spawn(
            directory / "master.log",
            "mooncake.cli",
            rpc_address="127.0.0.1",
            rpc_port=rpc_port,
            metrics_port=admin_port,
        )
    ]
    try:
        _wait_until(lambda: _answers(rpc_port), started[0], directory / "master.log")
        started.append(
            _spawn(
                directory / "holder.log",
                "mooncake.cli_client",
                host="127.0.0.1",
                port=holder_port,
                global_segment_size=memory_bytes,
                metadata_server="P2PHANDSHAKE",
                master_server_address=master,
            )
        )
        client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", master) == 0
        _wait_until(lambda: client.put("started", b"1") == 0, started[1], directory / "holder.log")
        yield MooncakeCluster(master, admin, started[0], started[1], client)
    finally:
        # The client goes with this process: closing it would wait for a master that a test has killed.
        for process in reversed(started):
            process.kill()
            process.wait(10)


def _spawn(log: Path, module: str, **flags: str | int) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )


def _wait_until(ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        if ready():
            return
        time.sleep(0.05)
    raise AssertionError(f"Mooncake did not start: {log.read_text()}")


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
