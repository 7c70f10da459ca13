"""`prfaas up`: a two-region cluster on this machine, until Ctrl-C."""

import asyncio
import json
from typing import Any

import click

from prfaas.errors import PeerUnavailable
from prfaas.process import StopSignals
from services.local_cluster import LocalCluster, Plan, local_cluster


async def run(plan: Plan, as_json: bool) -> None:
    """Start, say where, and wait. Raises PeerUnavailable when a process ends by itself."""
    stop = StopSignals()
    try:
        async with local_cluster(plan) as cluster:
            stop.ready()
            click.echo(json.dumps(described(cluster)) if as_json else ready_line(cluster))
            died = asyncio.ensure_future(cluster.died())
            asked = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait({died, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
                died.cancel()
            if not asked.done():
                raise PeerUnavailable(died.result(), "its process ended")
            click.echo("stopping", err=True)
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


def described(cluster: LocalCluster) -> dict[str, Any]:
    """What a program needs to talk to the cluster."""
    return {
        "endpoint": f"{cluster.endpoint}/v1",
        "model": cluster.plan.model_dir.name,
        "store": list(cluster.store_endpoints),
        "processes": {name: process.pid for name, process in cluster.processes.items()},
        "metrics": cluster.metrics,
    }


def ready_line(cluster: LocalCluster) -> str:
    plan = cluster.plan
    line = f", line of {plan.wan.mbit:g} Mbit/s and {plan.wan.rtt_ms:g} ms between them" if plan.wan else ""
    return (
        f"ready: {cluster.endpoint}/v1 serves {plan.model_dir.name} "
        f"({plan.prefill_workers} prefill workers in region a, {len(plan.pd_roles)} PD nodes in region b{line})"
    )
