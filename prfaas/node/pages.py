"""A worker's `/metrics`, `/live` and `/ready`."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from prfaas.cluster import Role
from prfaas.flows.convert_role import Phase, Standing
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.node.engine_client import EngineClient
from prfaas.node.pump_client import PumpClient
from prfaas.node.worker import Worker
from prfaas.observe import names
from prfaas.observe.http import TEXT, serve_text
from prfaas.observe.metrics import CONTENT_TYPE, Metrics
from prfaas.rpc.identity import Identity
from prfaas.security import Refusal


class Refusing(Protocol):
    """A server that counts whom it turns away."""

    @property
    def refused(self) -> Mapping[Refusal, int]: ...


class WorkerPages:
    """The gauges are read off when they are asked for; the counters follow those of engine and pump. `regions` are the
    ones that KV may go to or come from, as far as that is known at the start."""

    def __init__(self, worker: Worker, engine: EngineClient, pump: PumpClient, regions: Iterable[str] = ()) -> None:
        self._worker, self.engine, self.pump = worker, engine, pump
        known = sorted(set(regions))
        self._metrics = Metrics(names.WORKER, {names.PEER_REGION.name: known})
        for region in known:
            self._metrics.set(names.KV_RTT, math.nan, peer_region=region)
            self._metrics.set(names.KV_ALLOWED, math.inf, peer_region=region)
        self.role = Role.MIXED
        self.ready = False
        self._servers: tuple[Refusing, ...] = ()
        self._identity: Identity | None = None
        self._epoch = 0
        self._phase = Phase.SERVING

    def stand(self, standing: Standing) -> None:
        self.role, self._epoch, self._phase = standing.assignment.role, standing.assignment.epoch, standing.phase
        if standing.phase is Phase.CONVERTING:
            self._metrics.add(names.ROLE_CHANGES)

    def secured(self, *servers: Refusing, identity: Identity | None) -> None:
        """Whom they turn away, and how long it will be let in itself."""
        self._servers, self._identity = servers, identity

    def refused_plan(self) -> None:
        self._metrics.add(names.REFUSED_PLANS)

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await serve_text(host, port, {"/metrics": self._scrape, "/live": _live, "/ready": self._ready})

    def _ready(self) -> tuple[int, str, bytes]:
        usable = self.ready and not self._worker.draining
        return (200, TEXT, b"ready\n") if usable else (503, TEXT, b"not ready\n")

    def _scrape(self) -> tuple[int, str, bytes]:
        metrics, engine, admission = self._metrics, self.engine.load, self._worker.admission
        metrics.follow(names.ENGINE_PREFILL_TOKENS, engine.prefill_tokens_total)
        metrics.follow(names.DECODE_FORWARDED_TOKENS, engine.decode_forwarded_tokens_total)
        metrics.set(names.ACTIVE_SEQUENCES, engine.active_sequences)
        metrics.set(names.COMMITTED_TOKENS, admission.committed_tokens)
        metrics.set(names.QUEUED_PREFILL_TOKENS, admission.prefill_tokens)
        metrics.set(names.KEPT_SEQUENCES, engine.kept_sequences)
        self._read_server()
        self._read_pump()
        self._read_cache()
        metrics.set(names.RESERVATIONS, self._worker.attempts)
        metrics.follow(names.ADMISSION_REFUSED, admission.refused)
        metrics.set(names.SESSIONS, self._worker.sessions)
        metrics.choose(names.WORKER_ROLE, self.role.value)
        metrics.choose(names.WORKER_PHASE, self._phase.value)
        metrics.set(names.PLAN_EPOCH, self._epoch)
        for refusal in Refusal:
            total = sum(server.refused.get(refusal, 0) for server in self._servers)
            metrics.follow(names.RPC_REFUSED, total, reason=refusal.value)
        metrics.set(names.CERTIFICATE_VALID, self._identity.valid_s if self._identity is not None else math.inf)
        return 200, CONTENT_TYPE, metrics.exposition()

    def _read_server(self) -> None:
        metrics, engine = self._metrics, self.engine.load
        metrics.set(names.ENGINE_OTHERS, engine.others_running + engine.others_waiting)
        metrics.set(names.ENGINE_PREFIX_TOKENS, self.engine.prefixes.units * HASH_UNIT_TOKENS)
        if engine.server is not None:
            metrics.set(names.ENGINE_KV_RATIO, engine.server.kv_usage_ratio)
            metrics.follow(names.ENGINE_QUERIED_TOKENS, engine.server.prefix_queried_tokens_total)
            metrics.follow(names.ENGINE_HIT_TOKENS, engine.server.prefix_hit_tokens_total)

    def _read_pump(self) -> None:
        metrics, load = self._metrics, self.pump.load
        metrics.set(names.KV_FREE_BYTES, load.free_bytes)
        metrics.set(names.KV_TOTAL_BYTES, load.total_bytes)
        metrics.set(names.KV_SPANS, load.spans)
        metrics.set(names.KV_CONNECTIONS, load.connections)
        metrics.follow(names.KV_RESENT_BYTES, self.pump.resent_bytes)
        for region, nbytes in self.pump.received.items():
            metrics.follow(names.KV_RECEIVED_BYTES, nbytes, peer_region=region)
        metrics.follow(names.KV_REFUSED_FRAMES, load.refused_frames_total)
        for cause, count in load.refused.items():
            metrics.follow(names.KV_REFUSED, count, cause=cause)
        for cause, count in self.pump.failed.items():
            metrics.follow(names.KV_FAILED_TRANSFERS, count, cause=cause)
        for region, allowed in self.pump.allowed.items():
            metrics.set(names.KV_ALLOWED, allowed, peer_region=region)
        for egress in load.egress:
            region = egress.region
            metrics.follow(names.KV_SENT_BYTES, egress.sent_bytes, peer_region=region)
            metrics.follow(names.KV_RETRANSMITTED_BYTES, egress.retransmitted_bytes, peer_region=region)
            metrics.set(names.KV_QUEUED_BYTES, egress.queued_bytes, peer_region=region)
            metrics.set(names.KV_UNSENT_BYTES, egress.unsent_bytes, peer_region=region)
            metrics.set(names.KV_QUEUE_AGE, egress.queue_age_s, peer_region=region)
            metrics.set(names.KV_RTT, math.nan if egress.rtt_s is None else egress.rtt_s, peer_region=region)
            metrics.set(names.KV_LANES, egress.lanes, peer_region=region)

    def _read_cache(self) -> None:
        metrics, books = self._metrics, self._worker.cache_books
        for counter, total in (
            (names.WORKER_CACHE_LOOKED_UP_TOKENS, books.looked_up_tokens),
            (names.WORKER_CACHE_SKIPPED_TOKENS, books.skipped_tokens),
            (names.WORKER_CACHE_HELD_TOKENS, books.held_tokens),
            (names.WORKER_CACHE_PUT_BYTES, books.put_bytes),
            (names.WORKER_CACHE_PULLED_BYTES, books.pulled_bytes),
        ):
            metrics.follow(counter, total)
        for counter, totals in (
            (names.WORKER_CACHE_LOOKUPS, books.lookups),
            (names.WORKER_CACHE_HIT_TOKENS, books.hit_tokens),
            (names.WORKER_CACHE_WASTED_TOKENS, books.wasted_tokens),
            (names.WORKER_CACHE_GETS, books.gets),
            (names.WORKER_CACHE_GET_BYTES, books.get_bytes),
            (names.WORKER_CACHE_PUTS, books.puts),
            (names.WORKER_CACHE_PULLS, books.pulls),
        ):
            [label] = counter.labels
            for value, total in totals.items():
                metrics.follow(counter, total, **{label.name: value})
        while books.get_s:
            metrics.observe(names.WORKER_CACHE_GET_SECONDS, books.get_s.popleft())


def _live() -> tuple[int, str, bytes]:
    return 200, TEXT, b"live\n"
