"""Whole clusters for the end-to-end tests: real processes, real sockets, the embedded store or a real etcd."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.engine.tiny import build_tiny
from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.reference import Alone
from tests.etcd_process import EtcdProcess, start_etcd

#: The contract of the stores is tested by itself; what runs on top of one takes long.
STORES = (pytest.param("embedded", marks=pytest.mark.slow), "etcd")
HYBRIDS = ("kimi_linear", "qwen3_next")

StartCluster = Callable[[Plan], AbstractAsyncContextManager[LocalCluster]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model folder of a family, built once."""
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp("models") / f"tiny-{family}"
            build_tiny(built[family], family)
        return built[family]

    return build


@pytest.fixture(scope="session")
def alone(model_dir: Callable[[str], Path]) -> Callable[[str], Alone]:
    """The same engine, run by itself in this process: what every answer is compared with."""
    loaded: dict[str, Alone] = {}

    def load(family: str) -> Alone:
        if family not in loaded:
            loaded[family] = Alone(model_dir(family))
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = start_etcd(tmp_path_factory.mktemp("etcd"))
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session", params=STORES)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StartCluster:
    """Start a cluster of the plan on each kind of store in turn."""
    endpoints = () if request.param == "embedded" else (request.getfixturevalue("etcd").endpoint,)
    return _starter(endpoints, tmp_path_factory)


@pytest.fixture(scope="session")
def start_embedded(tmp_path_factory: pytest.TempPathFactory) -> StartCluster:
    """Start a cluster of the plan on the embedded store, where what is tested does not meet the store."""
    return _starter((), tmp_path_factory)


def _starter(endpoints: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> StartCluster:
    @asynccontextmanager
    async def begin(plan: Plan) -> AsyncIterator[LocalCluster]:
        logs = tmp_path_factory.mktemp("logs")
        async with local_cluster(replace(plan, etcd=endpoints, log_dir=logs, cluster=logs.name)) as cluster:
            yield cluster

    return begin


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=HYBRIDS)
async def hybrid(
    request: pytest.FixtureRequest, start: StartCluster, model_dir: Callable[[str], Path]
) -> AsyncIterator[tuple[str, LocalCluster]]:
    """A cluster of a hybrid model in which every prompt is long: family and cluster."""
    async with start(Plan(model_dir=model_dir(request.param), threshold_tokens=0, pools=1)) as cluster:
        yield request.param, cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def quick(start: StartCluster, model_dir: Callable[[str], Path]) -> AsyncIterator[LocalCluster]:
    """A cluster of the cost model, with a threshold between short and long."""
    async with start(Plan(model_dir=model_dir("cost_model"), threshold_tokens=1000)) as cluster:
        yield cluster
