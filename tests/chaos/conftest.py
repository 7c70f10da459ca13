"""Clusters for sequences of faults, one for all sequences of a model, and the figures of a run as JSON."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prfaas.engine.cost_model import write_config
from prfaas.engine.tiny import build_tiny
from services.local_cluster import Plan, Wan, local_cluster
from tests.chaos.asked import THRESHOLD_TOKENS, all_asked
from tests.chaos.guard import Guard
from tests.chaos.rest import all_given_back, come_true, leases, usage
from tests.chaos.sequence import World
from tests.e2e.client import LIVENESS_S, complete
from tests.etcd_process import ETCD, start_etcd

#: A file for the figures.
FIGURES = os.environ.get("CHAOS_JSON", "")
KEY = "sesame"
#: A cluster is there after this, on a machine that has much else to do.
READY_S = 150.0
WAN = Wan(mbit=200, rtt_ms=10)
#: Short, so that what died is gone before the sequence is over.
LEASE_S = ("--store-lease-ttl-s", "5")
#: A stream looks for another worker for as long as one takes to come back.
PATIENCE = ("--migration-timeout-s", "15")
#: More options of routers: to see the checks fail when something is taken away.
ROUTER = tuple(os.environ.get("CHAOS_ROUTER", "").split())
#: Connections that nobody uses are closed before the sequence is over.
IDLE = ("--kv-lane-idle-s", "3")
EXTRA = {
    "router": LEASE_S + PATIENCE + ROUTER,
    "prefill-worker": LEASE_S + IDLE,
    "decode-worker": LEASE_S + IDLE,
    "cache-pool": LEASE_S,
}
#: Requests a second. The cost model's take seconds by waiting, the real engine's by computing.
PER_S = {"kimi_linear": 1.0, "cost_model": 4.0}
#: Of the cost model, with its scale of a tenth: 30 ms for a token.
DECODE_BASE_S = 0.3

Note = Callable[[dict[str, Any]], None]
_noted: dict[str, list[dict[str, Any]]] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two prefill workers far away, two PD nodes, two routers, a shard of the cache in each region that holds a small
    part of what is asked, a line between the regions, and a real etcd where there is one."""
    family = request.module.FAMILY
    folder, etcd = tmp_path_factory.mktemp("models"), None
    model = folder / f"tiny-{family}"
    build_tiny(model, family)
    alone = model
    if family == "cost_model":  # the reference need not take its time
        alone = folder / "alone" / model.name
        write_config(model, decode_base_s=DECODE_BASE_S)
        write_config(alone, time_scale=0)
    asked = await asyncio.to_thread(all_asked, alone)
    guard = Guard(signal.SIGKILL)
    if ETCD is not None:
        etcd = start_etcd(tmp_path_factory.mktemp("etcd"))
        guard.watch(etcd.pid)
    plan = Plan(
        model_dir=model,
        threshold_tokens=THRESHOLD_TOKENS,
        rebalance=False,
        routers=2,
        admin_key=KEY,
        prefill_workers=2,
        etcd=() if etcd is None else (etcd.endpoint,),
        wan=WAN,
        pools=1,
        pool_bytes=_pool_bytes(alone),
        ready_timeout_s=READY_S,
        log_dir=tmp_path_factory.mktemp("logs"),
        extra=EXTRA,
    )
    try:
        async with local_cluster(plan) as cluster:
            for _ in range(4):
                await asyncio.gather(*(complete(cluster, list(each.prompt), 4) for each in asked[:6]))
            await come_true(lambda: all_given_back(cluster), LIVENESS_S)
            known = leases(etcd) if etcd is not None else 0
            yield World(cluster, asked, etcd, guard, KEY, PER_S[family], usage(cluster), known)
    finally:
        if etcd is not None:
            etcd.stop()
        guard.act()


def _pool_bytes(model: Path) -> int:
    from prfaas.engine.loading import load_engine

    layout = load_engine(model).info.layout
    return 8 * (layout.size_bytes(1000) + 4 * layout.state_bytes)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Call it with the figures of one sequence."""
    return lambda figures: request.node.user_properties.append((request.node.nodeid, figures))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Where tests run beside each other, this is called for all of them in the process that started them."""
    if report.when == "call":
        for name, figures in report.user_properties:
            _noted.setdefault(name, []).append(figures)


def pytest_sessionfinish() -> None:
    if FIGURES and _noted and "PYTEST_XDIST_WORKER" not in os.environ:
        Path(FIGURES).write_text(json.dumps(_noted, indent=2) + "\n")
