"""What a worker measures about itself: its load, and rates since its last report out of the counters of engine and
pump."""

from collections.abc import Callable
from dataclasses import replace

from prfaas.cluster import Egress, RegionId
from prfaas.membership.records import Measured
from prfaas.node.engine_client import EngineClient
from prfaas.node.engine_share import LEAST_SHARE
from prfaas.node.pump_client import PumpClient
from prfaas.node.worker import Worker
from prfaas.transfer.pump.messages import Egress as Counters

#: A backlog shorter than this, within one report, says nothing about the line.
LEAST_BACKLOG_S = 0.05

_NOTHING = Counters(region="", queued_bytes=0, sent_bytes=0, backlogged_bytes=0, backlogged_s=0.0)


class Telemetry:
    """Asked by the registration alone, once per report: each answer covers the time since the one before."""

    def __init__(self, worker: Worker, engine: EngineClient, pump: PumpClient, now: Callable[[], float]) -> None:
        self._worker, self._engine, self._pump, self._now = worker, engine, pump, now
        self._at = now()
        self._sent: dict[str, Counters] = {}
        self._prefill_busy_s = 0.0

    def measure(self) -> Measured:
        now = self._now()
        elapsed_s, self._at = now - self._at, now
        load = self._worker.load()
        return Measured(
            replace(
                load,
                egress=self._egress(elapsed_s),
                prefill_busy_ratio=self._prefill_busy(elapsed_s),
                decode_busy_ratio=min(1.0, load.decoding / load.max_batch) if load.max_batch else None,
            )
        )

    def _egress(self, elapsed_s: float) -> tuple[Egress, ...]:
        before, self._sent = self._sent, {each.region: each for each in self._pump.load.egress}
        return tuple(rates(before.get(region, _NOTHING), after, elapsed_s) for region, after in self._sent.items())

    def _prefill_busy(self, elapsed_s: float) -> float | None:
        """Of the node's share of time for prefill. What decode leaves to prefill beyond that does not count."""
        busy_s = self._engine.load.prefill_busy_s_total
        worked_s, self._prefill_busy_s = busy_s - self._prefill_busy_s, busy_s
        own_s = elapsed_s * max(LEAST_SHARE, self._engine.prefill_share)
        return min(1.0, max(0.0, worked_s) / own_s) if own_s > 0 else None


def rates(before: Counters, after: Counters, elapsed_s: float) -> Egress:
    """What was sent to one region between two readings."""
    backlogged_s = after.backlogged_s - before.backlogged_s
    backlogged_bytes = after.backlogged_bytes - before.backlogged_bytes
    return Egress(
        region=RegionId(after.region),
        queued_bytes=after.queued_bytes,
        sent_bytes_per_s=(after.sent_bytes - before.sent_bytes) / elapsed_s if elapsed_s > 0 else 0.0,
        backlogged_bytes_per_s=backlogged_bytes / backlogged_s if backlogged_s >= LEAST_BACKLOG_S else None,
    )
