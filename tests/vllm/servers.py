"""The vLLM servers below a cluster's workers: their processes and what their own counters say."""

from pathlib import Path

import psutil

from prfaas.engine.vllm.completions import get
from services.local_cluster import LocalCluster
from tests.e2e.client import LIVENESS_S, eventually, metrics, total


def server_of(cluster: LocalCluster, worker: str) -> psutil.Process:
    """The server's first process."""
    below = psutil.Process(cluster.processes[worker].pid).children(recursive=True)
    [server] = [each for each in below if "--uds" in each.cmdline()]
    return server


async def counted(cluster: LocalCluster, worker: str, name: str, **labels: str) -> float:
    """Sum over the samples of one of vLLM's own metrics that carry these labels."""
    words = server_of(cluster, worker).cmdline()
    page = (await get(Path(words[words.index("--uds") + 1]), "/metrics")).decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(pair in line for pair in wanted)
    )


async def until_ours_say(cluster: LocalCluster, process: str, name: str, wanted: float) -> None:
    """One of our own counters, which are reported now and then."""

    async def so() -> bool:
        """our own counter says it"""
        return total(await metrics(cluster, process), name) == wanted

    await eventually(so, LIVENESS_S)
