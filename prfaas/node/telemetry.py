"""What a worker measures about itself: its load, and rates since its last report out of the counters of engine and
pump."""

import math
from collections.abc import Callable
from dataclasses import replace

from prfaas.cluster import Egress, NodeLoad, RegionId
from prfaas.membership.records import Measured
from prfaas.node.engine_client import EngineClient
from prfaas.node.engine_share import LEAST_SHARE
from prfaas.node.pump_client import PumpClient
from prfaas.node.worker import Worker
from prfaas.transfer.pump.messages import Egress as Counters

#: A backlog shorter than this, within one report, says nothing about the line.
LEAST_BACKLOG_S = 0.05

#: Under an allowance the line is what holds back only who gets less of it than this while his bytes wait for so long:
#: lanes that take turns do not use up all of theirs. Who gets as little as the other share, for as long, has no need of
#: more bytes that wait to be sure.
ALLOWANCE_USED, ALLOWANCE_MISSED = 0.8, 0.25
LASTING_S = 0.5

_NOTHING = Counters(region="", queued_bytes=0, sent_bytes=0, backlogged_bytes=0, backlogged_s=0.0)


class Telemetry:
    """Asked by the registration alone, once per report: each answer covers the time since the one before."""

    def __init__(self, worker: Worker, engine: EngineClient, pump: PumpClient, now: Callable[[], float]) -> None:
        self._worker, self._engine, self._pump, self._now = worker, engine, pump, now
        self._at = now()
        self._egress = EgressRates(pump)
        self._prefill_busy_s = 0.0

    def measure(self) -> Measured:
        now = self._now()
        elapsed_s, self._at = now - self._at, now
        load = self._worker.load()
        return Measured(
            replace(
                load,
                egress=self._egress.measure(elapsed_s),
                prefill_busy_ratio=self._prefill_busy(elapsed_s),
                decode_busy_ratio=decode_busy(load),
            ),
            self._counters(),
        )

    def _counters(self) -> dict[str, int]:
        """Since the start; what was refused or failed also by cause."""
        engine, pump = self._engine.load, self._pump.load
        totals = {
            "prefill_tokens": engine.prefill_tokens_total,
            "decode_forwarded_tokens": engine.decode_forwarded_tokens_total,
            "decode_steps": engine.decode_steps_total,
            "decode_step_sequences": engine.decode_step_sequences_total,
            "decode_step_microseconds": round(1e6 * engine.decode_step_s_total),
            "kv_sent_bytes": pump.sent_bytes_total,
            "kv_resent_bytes": self._pump.resent_bytes,
            "kv_retransmitted_bytes": sum(each.retransmitted_bytes for each in pump.egress),
            "kv_received_bytes": pump.received_bytes_total,
            "kv_refused_frames": pump.refused_frames_total,
            "kv_failed_transfers": pump.failed_transfers_total,
        }
        refused = {f"kv_refused_frames_{cause}": count for cause, count in pump.refused.items()}
        if (server := engine.server) is not None:
            totals |= {
                "engine_prompt_tokens": server.prompt_tokens_total,
                "engine_generated_tokens": server.generated_tokens_total,
                "engine_prefix_queried_tokens": server.prefix_queried_tokens_total,
                "engine_prefix_hit_tokens": server.prefix_hit_tokens_total,
            }
        failed = {f"kv_failed_transfers_{cause}": count for cause, count in self._pump.failed.items()}
        return totals | refused | failed

    def _prefill_busy(self, elapsed_s: float) -> float | None:
        """Of the node's share of time for prefill. What decode leaves to prefill beyond that does not count."""
        busy_s = self._engine.load.prefill_busy_s_total
        worked_s, self._prefill_busy_s = busy_s - self._prefill_busy_s, busy_s
        own_s = elapsed_s * max(LEAST_SHARE, self._engine.prefill_share)
        return min(1.0, max(0.0, worked_s) / own_s) if own_s > 0 else None


def decode_busy(load: NodeLoad) -> float | None:
    """Of its batch slots, or of the engine's memory for sequences where that runs short first."""
    if not load.max_batch:
        return None
    memory = (load.engine_kv_ratio or 0.0) if load.decoding else 0.0
    return min(1.0, max(load.decoding / load.max_batch, memory))


class EgressRates:
    """What a pump sends, between one time and the next that it is asked."""

    def __init__(self, pump: PumpClient) -> None:
        self._pump = pump
        self._sent: dict[str, Counters] = {}
        self._allowed: dict[str, float] = {}

    def measure(self, elapsed_s: float) -> tuple[Egress, ...]:
        before, self._sent = self._sent, {each.region: each for each in self._pump.load.egress}
        allowed, self._allowed = self._allowed, dict(self._pump.allowed)
        return tuple(
            rates(
                before.get(region, _NOTHING),
                after,
                elapsed_s,
                min(allowed.get(region, math.inf), self._allowed.get(region, math.inf)),
            )
            for region, after in self._sent.items()
        )


class PoolTelemetry:
    """The same of a shard of the cache, which has a pump alone."""

    def __init__(self, pump: PumpClient, now: Callable[[], float]) -> None:
        self._pump, self._now, self._egress = pump, now, EgressRates(pump)
        self._at = now()

    def measure(self) -> Measured:
        now = self._now()
        elapsed_s, self._at = now - self._at, now
        counters = {
            "kv_sent_bytes": self._pump.load.sent_bytes_total,
            "kv_received_bytes": self._pump.load.received_bytes_total,
            "kv_failed_transfers": self._pump.load.failed_transfers_total,
        }
        return Measured(NodeLoad(egress=self._egress.measure(elapsed_s)), counters)


def rates(before: Counters, after: Counters, elapsed_s: float, allowed: float = math.inf) -> Egress:
    """What was sent to one region between two readings, when no more than `allowed` bytes per second might be. A
    backlog that waited for its allowance says nothing about the line."""
    free = math.isinf(allowed)
    backlogged_s = after.backlogged_s - before.backlogged_s
    backlogged_bytes = after.backlogged_bytes - before.backlogged_bytes
    goodput = backlogged_bytes / backlogged_s if backlogged_s >= LEAST_BACKLOG_S else None
    waits = after.queue_age_s >= LASTING_S and goodput is not None and goodput < ALLOWANCE_USED * allowed
    misses = backlogged_s >= LASTING_S and goodput is not None and goodput < ALLOWANCE_MISSED * allowed
    return Egress(
        region=RegionId(after.region),
        queued_bytes=after.queued_bytes,
        sent_bytes_per_s=(after.sent_bytes - before.sent_bytes) / elapsed_s if elapsed_s > 0 else 0.0,
        backlogged_bytes_per_s=goodput if free or waits or misses else None,
        rtt_s=after.rtt_s,
        retransmitted_bytes_per_s=(after.retransmitted_bytes - before.retransmitted_bytes) / elapsed_s
        if elapsed_s > 0
        else None,
        queue_age_s=after.queue_age_s,
        unsent_bytes=after.unsent_bytes,
        lanes=after.lanes,
        congestion=after.congestion,
        stalled_s=after.stalled_s,
    )
