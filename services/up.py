"""`prfaas up`: a two-region cluster on this machine, until Ctrl-C."""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from prfaas.errors import PeerUnavailable
from prfaas.process import StopSignals
from services.drill import cluster_file
from services.drill.cluster_file import ClusterFile
from services.drill.processes import identify
from services.local_cluster import LocalCluster, Plan, local_cluster, pool_regions
from services.restarts import Restarts
from services.store_switch import store_switch


async def run(plan: Plan, as_json: bool) -> None:
    """Start, say where, and keep it running until a signal. Raises PeerUnavailable when it cannot be kept running."""
    stop = StopSignals()
    try:
        async with local_cluster(plan) as cluster, drillable(cluster) as write_down:
            stop.ready()
            click.echo(json.dumps(described(cluster)) if as_json else ready_line(cluster))
            keeping = asyncio.create_task(_keep(cluster, write_down), name="keep running")
            asked = asyncio.create_task(stop.wait(), name="stop signal")
            try:
                await asyncio.wait({keeping, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
                keeping.cancel()
            if not asked.done():
                keeping.result()
            click.echo("stopping", err=True)
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


@asynccontextmanager
async def drillable(cluster: LocalCluster) -> AsyncIterator[Callable[[], Path]]:
    """As long as the cluster runs, a file says so to `prfaas drill`. Yields what writes it again."""
    token, launcher = secrets.token_hex(16), identify(os.getpid())
    assert launcher is not None
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(store_switch(cluster.store, token)) if cluster.store else ""

        def write_down() -> Path:
            found = {name: identify(process.pid) for name, process in cluster.processes.items()}
            return cluster_file.write(
                ClusterFile(
                    cluster=cluster.plan.cluster,
                    launcher=launcher,
                    endpoint=cluster.endpoint,
                    model=cluster.plan.model_dir.name,
                    processes={name: process for name, process in found.items() if process is not None},
                    metrics=cluster.metrics,
                    control=control,
                    token=token,
                    relay=cluster.metrics.get("wan-relay", "").removesuffix("/metrics"),
                )
            )

        path = write_down()
        try:
            yield write_down
        finally:
            path.unlink(missing_ok=True)


async def _keep(cluster: LocalCluster, write_down: Callable[[], Path]) -> NoReturn:
    """Start again whatever ends, as a supervisor would in a deployment: the loss of one process is not that of all."""
    now = asyncio.get_running_loop().time
    restarts = Restarts(cluster.processes, now())
    while True:
        name = await cluster.died()
        if not restarts.worth_another(name, now()):
            raise PeerUnavailable(name, "its process ends as soon as it is started")
        click.echo(f"{name} ended, starting it again", err=True)
        restarts.started(name, now())
        await cluster.start_again(name)
        write_down()


def described(cluster: LocalCluster) -> dict[str, Any]:
    """What a program needs to talk to the cluster."""
    return {
        "endpoint": f"{cluster.endpoint}/v1",
        "model": cluster.plan.model_dir.name,
        "store": list(cluster.store_endpoints),
        "processes": {name: process.pid for name, process in cluster.processes.items()},
        "metrics": cluster.metrics,
        "admin": cluster.admin,
        "certificates": str(cluster.certificates) if cluster.certificates else None,
    }


def ready_line(cluster: LocalCluster) -> str:
    plan = cluster.plan
    line = f", line of {plan.wan.mbit:g} Mbit/s and {plan.wan.rtt_ms:g} ms between them" if plan.wan else ""
    shards = plan.pools * len(pool_regions(plan))
    cache = f", {shards} shards of the prefix cache" if shards else ""
    more = [endpoint for endpoint in cluster.endpoints.values() if endpoint != cluster.endpoint]
    routers = f"; more routers at {', '.join(more)}" if more else ""
    admin = f"; admin API at {', '.join(cluster.admin.values())}" if cluster.admin else ""
    keys = f"; asks for an API key of {plan.keys_file}" if plan.keys_file else ""
    workers = f"{_count(plan.prefill_workers, 'prefill worker')} in region a, {_count(len(plan.pd_roles), 'PD node')}"
    serves = f"{cluster.endpoint}/v1 serves {plan.model_dir.name}"
    return f"ready: {serves} ({workers} in region b{line}{cache}){routers}{keys}{admin}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
