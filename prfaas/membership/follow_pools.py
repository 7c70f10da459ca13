"""What a worker follows of the cache pool: the shards there are, and nothing else of the cluster.

While the store is lost the last ones stand. A shard that is gone costs those who still ask it one failed call.
"""

from collections.abc import Mapping
from contextlib import aclosing

import structlog

from prfaas.cluster import Namespace, NodeId, Pool, RegionId
from prfaas.membership.records import Kind, key_of, read_pool
from prfaas.membership.store import Deleted, Entry, Put, Resync, Store

log = structlog.get_logger(__name__)


class PoolsFollower:
    """`run` in a task of its own."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store, self._prefix = store, key_of(cluster, Kind.POOL, "")
        self._pools: dict[NodeId, Pool] = {}

    async def run(self) -> None:
        async with aclosing(self._store.watch(self._prefix)) as batches:
            async for batch in batches:
                for event in batch:
                    match event:
                        case Put(entry):
                            self._read(entry)
                        case Deleted(key):
                            self._pools.pop(NodeId(key.removeprefix(self._prefix)), None)
                        case Resync(snapshot):
                            self._pools.clear()
                            for entry in snapshot.entries:
                                self._read(entry)

    def shards(self, region: RegionId, namespace: Namespace) -> Mapping[NodeId, Pool]:
        """Of a region, those that keep KV of this namespace, in the order of their ids."""
        return {
            shard: pool
            for shard, pool in sorted(self._pools.items())
            if pool.region == region and pool.namespace == namespace
        }

    def _read(self, entry: Entry) -> None:
        shard = NodeId(entry.key.removeprefix(self._prefix))
        record = read_pool(shard, entry.value)
        if record is None:
            log.warning("unreadable_pool", key=entry.key)
        else:
            self._pools[shard] = record.to_pool()
