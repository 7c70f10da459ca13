"""What an operator tells the cluster of a test, by its admin API."""

import asyncio
import json
from typing import Any

from prfaas.request import Mode
from services.http_client import ask
from services.local_cluster import LocalCluster
from tests.e2e.client import eventually

KEY = "sesame"


async def told(cluster: LocalCluster, method: str, path: str, body: object = None) -> Any:
    url = f"{cluster.admin['router']}/admin/v1/{path}"
    status, answer = await asyncio.to_thread(ask, method, url, key=KEY, body=body)
    assert status == 200, answer
    return json.loads(answer)


async def pin_mode(cluster: LocalCluster, mode: Mode) -> None:
    """Whatever the loops find, all prompts are prefilled in the other region from now on, or none."""
    await told(cluster, "PUT", "threshold", {"mode": mode.value})

    async def followed() -> bool:
        """the router has the mode"""
        return bool((await told(cluster, "GET", "threshold"))["mode"] == mode.value)

    await eventually(followed)


async def flip(cluster: LocalCluster, node: str, role: str) -> int:
    """The epoch of the plan that gives the node this role."""
    return int((await told(cluster, "POST", f"workers/{node}/flip", {"role": role}))["epoch"])


async def set_line(cluster: LocalCluster, mbit: float) -> None:
    """What the line between the regions carries."""
    url = cluster.metrics["wan-relay"].replace("/metrics", f"/rate?mbit={mbit}")
    status, answer = await asyncio.to_thread(ask, "POST", url)
    assert status == 200, answer
