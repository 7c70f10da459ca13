"""A worker's `/metrics`, `/live` and `/ready`."""

import asyncio

from prfaas.cluster import Role
from prfaas.flows.convert_role import Phase, Standing
from prfaas.node.engine_client import EngineClient
from prfaas.node.pump_client import PumpClient
from prfaas.node.worker import Worker
from prfaas.observe import names
from prfaas.observe.http import TEXT, serve_text
from prfaas.observe.metrics import CONTENT_TYPE, Metrics


class WorkerPages:
    """The gauges are read off when they are asked for; the counters follow those of engine and pump."""

    def __init__(self, worker: Worker, engine: EngineClient, pump: PumpClient) -> None:
        self._worker, self.engine, self.pump = worker, engine, pump
        self._metrics = Metrics(names.WORKER)
        self.role = Role.MIXED
        self.ready = False
        self._epoch = 0
        self._phase = Phase.SERVING

    def stand(self, standing: Standing) -> None:
        self.role, self._epoch, self._phase = standing.assignment.role, standing.assignment.epoch, standing.phase
        if standing.phase is Phase.CONVERTING:
            self._metrics.add(names.ROLE_CHANGES)

    def refused_plan(self) -> None:
        self._metrics.add(names.REFUSED_PLANS)

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await serve_text(host, port, {"/metrics": self._scrape, "/live": _live, "/ready": self._ready})

    def _ready(self) -> tuple[int, str, bytes]:
        usable = self.ready and not self._worker.draining
        return (200, TEXT, b"ready\n") if usable else (503, TEXT, b"not ready\n")

    def _scrape(self) -> tuple[int, str, bytes]:
        metrics, engine, pump, admission = self._metrics, self.engine.load, self.pump.load, self._worker.admission
        metrics.follow(names.ENGINE_PREFILL_TOKENS, engine.prefill_tokens_total)
        metrics.follow(names.DECODE_FORWARDED_TOKENS, engine.decode_forwarded_tokens_total)
        metrics.set(names.ACTIVE_SEQUENCES, engine.active_sequences)
        metrics.set(names.QUEUED_PREFILL_TOKENS, admission.prefill_tokens)
        metrics.set(names.KEPT_SEQUENCES, engine.kept_sequences)
        metrics.set(names.KV_FREE_BYTES, pump.free_bytes)
        metrics.set(names.KV_SPANS, pump.spans)
        metrics.follow(names.KV_SENT_BYTES, pump.sent_bytes_total)
        metrics.follow(names.KV_RECEIVED_BYTES, pump.received_bytes_total)
        metrics.follow(names.KV_REFUSED_FRAMES, pump.refused_frames_total)
        metrics.follow(names.KV_FAILED_TRANSFERS, pump.failed_transfers_total)
        metrics.set(names.RESERVATIONS, self._worker.attempts)
        metrics.follow(names.ADMISSION_REFUSED, admission.refused)
        metrics.set(names.SESSIONS, self._worker.sessions)
        metrics.choose(names.WORKER_ROLE, self.role.value)
        metrics.choose(names.WORKER_PHASE, self._phase.value)
        metrics.set(names.PLAN_EPOCH, self._epoch)
        return 200, CONTENT_TYPE, metrics.exposition()


def _live() -> tuple[int, str, bytes]:
    return 200, TEXT, b"live\n"
