"""What the end-to-end tests ask of a cluster, through the official client and plain HTTP."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from services.http_client import fetch
from services.local_cluster import LocalCluster

#: How long a condition on a live cluster may take to come true before the test gives up.
LIVENESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Completed:
    token_ids: list[int]
    receipt: dict[str, Any]


def openai_client(cluster: LocalCluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=120)


async def complete(cluster: LocalCluster, ids: list[int], max_tokens: int) -> Completed:
    """Greedy completion of a token-list prompt, with its receipt."""
    async with openai_client(cluster) as client:
        answer = await client.completions.create(
            model=cluster.plan.model_dir.name,
            prompt=ids,
            max_tokens=max_tokens,
            temperature=0,
            extra_headers={"x-prfaas-receipt": "1"},
            extra_body={"return_token_ids": True},
        )
    assert answer.model_extra is not None and answer.choices[0].model_extra is not None
    return Completed(answer.choices[0].model_extra["token_ids"], answer.model_extra["prfaas_receipt"])


async def metrics(cluster: LocalCluster, process: str) -> dict[str, float]:
    """The samples of a process's /metrics by name and labels."""
    _, body = await asyncio.to_thread(fetch, cluster.metrics[process])
    lines = (line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series, value in samples.items()
        if series.partition("{")[0] == name and all(pair in series for pair in wanted)
    )


async def over_pd_nodes(cluster: LocalCluster, name: str) -> float:
    nodes = [process for process in cluster.processes if process.startswith("decode-")]
    return sum([total(await metrics(cluster, node), name) for node in nodes])


async def eventually(condition: Callable[[], Any], seconds: float = LIVENESS_S) -> None:
    """Wait until the (async) condition holds; fail with its name when it does not within `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {condition.__doc__ or condition}"
        await asyncio.sleep(0.02)


async def at_rest(cluster: LocalCluster) -> bool:
    """every counter of what is held is back to base line"""
    held = ("prfaas_worker_reservations", "prfaas_worker_kv_spans", "prfaas_worker_engine_active_sequences")
    for process in cluster.metrics:
        samples = await metrics(cluster, process)
        if process == "router" and total(samples, "prfaas_router_in_flight_requests"):
            return False
        if any(total(samples, name) for name in (*held, "prfaas_worker_kept_sequences")):
            return False
    return True
