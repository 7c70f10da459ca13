"""What the caches of a cluster's regions hold, and what of it an answer has had."""

from services.local_cluster import LocalCluster
from tests.e2e.client import Completed, metrics, total

UNIT = 64


def units(tokens: int) -> int:
    return tokens // UNIT * UNIT


def cached(done: Completed) -> int:
    return int(done.receipt["cache"]["reported_tokens"])


async def objects(cluster: LocalCluster, region: str, kind: str = "kv") -> float:
    """What the region's cache keeps."""
    shards = [name for name in cluster.processes if name.startswith(f"pool-{region}-")]
    return sum([total(await metrics(cluster, name), "prfaas_pool_resident_objects", kind=kind) for name in shards])


async def grown(cluster: LocalCluster, region: str, kv: float, states: float) -> bool:
    """what was computed is in the region's cache"""
    return await objects(cluster, region) >= kv and await objects(cluster, region, "state") >= states
