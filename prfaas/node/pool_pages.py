"""A cache-pool shard's `/metrics`, `/live` and `/ready`."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable

from prfaas.kvcache.blocks import BlockClass, BlockState
from prfaas.kvcache.objects import Kind
from prfaas.kvcache.shard import Shard
from prfaas.kvcache.stock import Stock
from prfaas.node.pool_shard import PoolShard
from prfaas.node.pump_client import PumpClient
from prfaas.node.rpc_server import RpcServer
from prfaas.observe import names
from prfaas.observe.http import TEXT, serve_text
from prfaas.observe.metrics import CONTENT_TYPE, Metrics
from prfaas.rpc.identity import Identity


class PoolPages:
    """The gauges are read off when they are asked for; the counters follow those of the shard. `regions` are the ones
    that KV may go to, as far as that is known at the start."""

    def __init__(self, pump: PumpClient, regions: Iterable[str] = ()) -> None:
        self._pump = pump
        self._metrics = Metrics(names.POOL, {names.PEER_REGION.name: sorted(set(regions))})
        self.shard: PoolShard | None = None
        self.ready = False
        self._server: RpcServer | None = None
        self._identity: Identity | None = None

    def got(self, seconds: float) -> None:
        self._metrics.observe(names.POOL_GET_SECONDS, seconds)

    def read(self, seconds: float) -> None:
        self._metrics.observe(names.POOL_STORE_READ_SECONDS, seconds)

    def secured(self, server: RpcServer, identity: Identity | None) -> None:
        """Whom it turns away, and how long it will be let in itself."""
        self._server, self._identity = server, identity

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await serve_text(host, port, {"/metrics": self._scrape, "/live": _live, "/ready": self._ready})

    def _ready(self) -> tuple[int, str, bytes]:
        usable = self.ready and self.shard is not None and not self.shard.draining
        return (200, TEXT, b"ready\n") if usable else (503, TEXT, b"not ready\n")

    def _scrape(self) -> tuple[int, str, bytes]:
        metrics = self._metrics
        if self.shard is not None:
            self._read_counts(self.shard)
            self._read_machine(self.shard.shard)
            conflicts = self.shard.tier.conflicts if self.shard.tier is not None else 0
            metrics.follow(names.POOL_ALARMS, self.shard.shard.counts.alarms + conflicts)
            self._read_feed(self.shard)
            self._read_tier(self.shard)
        for egress in self._pump.load.egress:
            metrics.follow(names.POOL_SENT_BYTES, egress.sent_bytes, peer_region=egress.region)
        for cause, count in self._pump.failed.items():
            metrics.follow(names.POOL_FAILED_TRANSFERS, count, cause=cause)
        for refusal, count in (self._server.refused if self._server is not None else {}).items():
            metrics.follow(names.POOL_RPC_REFUSED, count, reason=refusal.value)
        valid_s = self._identity.valid_s if self._identity is not None else math.inf
        metrics.set(names.POOL_CERTIFICATE_VALID, valid_s)
        return 200, CONTENT_TYPE, metrics.exposition()

    def _read_counts(self, shard: PoolShard) -> None:
        metrics, counts = self._metrics, shard.counts
        for outcome, count in counts.lookups.items():
            metrics.follow(names.POOL_LOOKUPS, count, outcome=outcome)
        for outcome, count in counts.gets.items():
            metrics.follow(names.POOL_GETS, count, outcome=outcome)
        for outcome, count in counts.puts.items():
            metrics.follow(names.POOL_PUTS, count, outcome=outcome)
        metrics.follow(names.POOL_LEASES_ENDED, counts.released, how="released")
        metrics.follow(names.POOL_RECEIVED_BYTES, counts.received_bytes)

    def _read_machine(self, shard: Shard) -> None:
        metrics, counts = self._metrics, shard.counts
        metrics.set(names.POOL_LEASES, shard.leases)
        metrics.follow(names.POOL_LEASES_ENDED, counts.expired_leases, how="expired")
        metrics.follow(names.POOL_LOOKED_UP_TOKENS, counts.looked_up_tokens)
        metrics.follow(names.POOL_HIT_TOKENS, counts.kv_hit_tokens, kind="kv")
        metrics.follow(names.POOL_HIT_TOKENS, counts.joint_hit_tokens, kind="joint")
        metrics.follow(names.POOL_WASTED_TOKENS, counts.unaligned_tokens, cause="alignment")
        metrics.follow(names.POOL_WASTED_TOKENS, counts.stateless_tokens, cause="missing_state")
        self._read_memory(shard.stock)

    def _read_memory(self, stock: Stock) -> None:
        metrics, pool = self._metrics, stock.memory.pool
        metrics.set(names.POOL_TOTAL_BYTES, pool.total_bytes)
        metrics.set(names.POOL_FREE_BYTES, pool.free_bytes)
        for kind in BlockClass:
            for state in BlockState:
                if state is not BlockState.FREE:
                    nbytes = pool.used_bytes(kind, state)
                    metrics.set(names.POOL_BYTES, nbytes, **{"class": kind.value, "state": state.value})
        quarantined = sum(pool.used_bytes(kind, BlockState.QUARANTINE) for kind in BlockClass)
        metrics.set(names.POOL_QUARANTINE_BYTES, quarantined)
        memory = stock.memory
        resident = Counter(key.kind for key in memory.published)
        for each, label, nbytes in ((Kind.KV, "kv", memory.unit_bytes), (Kind.STATE, "state", memory.state_bytes)):
            metrics.set(names.POOL_RESIDENT_OBJECTS, resident[each], kind=label)
            padding_bytes = pool.whole_bytes(nbytes) - nbytes
            metrics.set(names.POOL_PADDING_BYTES, resident[each] * padding_bytes, kind=label)
        size = stock.cache.index.size
        metrics.set(names.POOL_OBJECTS, size.units, kind="kv")
        metrics.set(names.POOL_OBJECTS, size.states, kind="state")
        for why, count in stock.evictions.items():
            if why == "cold":
                metrics.follow(names.POOL_COOLED, count)
            else:
                metrics.follow(names.POOL_EVICTED, count, why=why)

    def _read_feed(self, shard: PoolShard) -> None:
        metrics, feed = self._metrics, shard.feed
        metrics.set(names.POOL_WATCHERS, feed.watchers)
        metrics.follow(names.POOL_WATCHERS_DROPPED, feed.cut_off)
        metrics.follow(names.POOL_SNAPSHOTS, feed.snapshots)
        metrics.set(names.POOL_SEQ, feed.seq)

    def _read_tier(self, shard: PoolShard) -> None:
        tier, metrics = shard.tier, self._metrics
        if tier is None:
            return
        metrics.set(names.POOL_STORE_BYTES, tier.used_bytes)
        metrics.set(names.POOL_STORE_QUEUE, tier.waiting)
        metrics.follow(names.POOL_STORE_DAMAGED, tier.damaged)
        for outcome, count in tier.reads.items():
            metrics.follow(names.POOL_STORE_READS, count, outcome=outcome)
        for outcome, count in tier.writes.items():
            metrics.follow(names.POOL_STORE_WRITES, count, outcome=outcome)


def _live() -> tuple[int, str, bytes]:
    return 200, TEXT, b"live\n"
