"""What a cluster holds when nobody asks it anything: all that requests took is back, and what processes have does not
grow with what has happened to them."""

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import psutil

from services.local_cluster import LocalCluster
from tests.e2e.client import metrics, total
from tests.etcd_process import EtcdProcess

HELD = (
    "prfaas_worker_reservations",
    "prfaas_worker_kv_spans",
    "prfaas_worker_engine_active_sequences",
    "prfaas_worker_kept_sequences",
    "prfaas_router_in_flight_requests",
    "prfaas_router_admission_queued_requests",
    "prfaas_router_admission_running_tokens",
    "prfaas_pool_leases",
)
#: By how much a process that has suffered may have more than before: links are opened as there is work.
MORE_FDS, MORE_CONNECTIONS = 16, 12
#: Between two looks at a condition. It costs all processes some work.
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process and its children."""

    fds: int
    connections: int
    rss_bytes: int


async def come_true(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait until it holds; fail with its docstring when it does not within `seconds`."""
    until = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < until, f"not within {seconds:g} s: {condition.__doc__}"
        await asyncio.sleep(LOOK_S)


async def all_given_back(cluster: LocalCluster) -> bool:
    """every counter of what is held is back to base line, on all routers, workers and pools"""
    return not await held(cluster)


async def held(cluster: LocalCluster) -> list[str]:
    found = []
    for process in cluster.metrics:
        try:
            samples = await metrics(cluster, process)
        except OSError:
            found.append(f"{process} does not answer")
            continue
        found += [f"{process}: {name} {value:g}" for name in HELD if (value := total(samples, name))]
    return found


def usage(cluster: LocalCluster) -> dict[str, Usage]:
    return {name: _usage(process.pid) for name, process in cluster.processes.items()}


def grown(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> list[str]:
    """What is more than what was and what may come on top."""
    found = []
    for name, now in after.items():
        was = before[name]
        if now.fds > was.fds + MORE_FDS or now.connections > was.connections + MORE_CONNECTIONS:
            found.append(f"{name}: {was} became {now}")
    return found


def leases(etcd: EtcdProcess) -> int:
    """That the store knows, of whoever is or was there."""
    request = urllib.request.Request(f"http://{etcd.endpoint}/v3/lease/leases", b"{}", method="POST")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return len(json.loads(answer.read()).get("leases", ()))


def _usage(pid: int) -> Usage:
    processes = [own := psutil.Process(pid), *own.children(recursive=True)]
    return Usage(
        fds=sum(each.num_fds() for each in processes),
        connections=sum(len(each.net_connections("tcp")) for each in processes),
        rss_bytes=sum(each.memory_info().rss for each in processes),
    )
