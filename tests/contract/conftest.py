"""The stores under contract: the one in memory, and the etcd client before the embedded server and a real etcd."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from prfaas.membership.etcd import EtcdStore
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.membership.store import Store
from tests.etcd_process import ETCD, EtcdProcess, start_etcd


class Backend(Protocol):
    """What a test may do to the store behind its clients."""

    store: Store

    async def stop(self) -> None: ...

    async def start(self) -> None:
        """Again, on the same address and with the same data."""
        ...

    async def lose_data(self) -> None:
        """While it is stopped."""
        ...

    async def compact(self, revision: int) -> None: ...

    async def close(self) -> None: ...


class InProcess:
    """No server to stop: outages do not exist for it."""

    def __init__(self) -> None:
        self.store = self.memory = MemoryStore()

    async def stop(self) -> None: ...

    async def start(self) -> None: ...

    async def lose_data(self) -> None:
        pytest.skip("data in this process is lost only with the process")

    async def compact(self, revision: int) -> None:
        with self.memory.open() as data:
            data.compact(revision)

    async def close(self) -> None:
        with self.memory.open() as data:
            data.check()


class Embedded:
    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", 0)

    async def start(self) -> None:
        await self.server.start()
        self.store = EtcdStore([self.server.endpoint]) if not hasattr(self, "store") else self.store

    async def stop(self) -> None:
        await self.server.stop()

    async def lose_data(self) -> None:
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", self.server.port)

    async def compact(self, revision: int) -> None:
        with self.memory.open() as data:
            data.compact(revision)

    async def close(self) -> None:
        await self.store.close()
        await self.server.stop()
        with self.memory.open() as data:
            data.check()


class RealEtcd:
    def __init__(self, etcd: EtcdProcess) -> None:
        self.etcd = etcd
        self.store = EtcdStore([etcd.endpoint])

    async def start(self) -> None:
        self.etcd.start_again()

    async def stop(self) -> None:
        self.etcd.kill()

    async def lose_data(self) -> None:
        self.etcd.lose_data()

    async def compact(self, revision: int) -> None:
        self.etcd.ctl("compact", str(revision))

    async def close(self) -> None:
        await self.store.close()
        self.etcd.stop()


@pytest.fixture(params=["memory", "embedded", "etcd"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    opened: Backend
    match request.param:
        case "memory":
            opened = InProcess()
        case "embedded":
            opened = Embedded()
            await opened.start()
        case _:
            if ETCD is None:
                pytest.skip("no etcd on this machine: install etcd-server to run the contract against the real one")
            opened = RealEtcd(start_etcd(tmp_path / "etcd"))
    yield opened
    await opened.close()


@pytest.fixture
def store(backend: Backend) -> Store:
    return backend.store
