"""What the router counts, and the log line of each request."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from prfaas.cluster import ClusterView, LinkState, RegionId
from prfaas.kvcache.feed import Copy
from prfaas.live.link import LinkPool
from prfaas.live.link_stream import LinkCounters
from prfaas.live.pools import CachePools
from prfaas.live.steering import Steering
from prfaas.live.watchdog import Watchdog
from prfaas.observe import names
from prfaas.observe.metrics import Metrics
from prfaas.observe.tracing import trace_id_of
from prfaas.scheduling.admission import Admission
from services.router.admission_keys import LiveKeys
from services.router.breaker_metrics import show_breakers
from services.router.canary import Canaries
from services.router.listening import Listening
from services.router.openai.record import RequestLog
from services.router.request_counts import COMPLETIONS, RequestCounts
from services.router.request_log import RequestLogFile

log = structlog.get_logger()


class RouterMetrics:
    """`view_age_s` says how long ago the store last confirmed the view."""

    def __init__(
        self,
        models: Sequence[str],
        view_age_s: Callable[[], float],
        leads: Callable[[], bool],
        links: LinkCounters,
        admission: Admission,
        caches: CachePools | None = None,
        keys: LiveKeys | None = None,
    ) -> None:
        #: Once it is known.
        self.listening: Listening | None = None
        self.request_log: RequestLogFile | None = None
        self.watchdog: Watchdog | None = None
        self.canaries: Canaries | None = None
        self.links: LinkPool | None = None
        self._caches, self._regions = caches, set[str]()
        self._admission, self._keys = admission, keys
        self._metrics = Metrics(names.ROUTER, {"model": models, "tenant": [""]})
        self._counts = RequestCounts(self._metrics)
        #: Of the time between two batches of tokens of one stream.
        self.gap = self._metrics.histogram(names.ITL).observe
        self._waits = self._metrics.histogram(names.ADMISSION_WAIT)
        self._view_age_s, self._leads, self._links = view_age_s, leads, links

    def admitted(self, tenant: str, waited_s: float) -> None:
        self._metrics.add(names.ADMISSION_ADMITTED, tenant=tenant)
        self._waits.observe(waited_s)

    def refused(self, tenant: str, reason: str) -> None:
        self._metrics.add(names.REFUSED_REQUESTS, tenant=tenant, reason=reason)

    def request_ended(self, record: RequestLog) -> None:
        """Count and log one HTTP request."""
        if record.route in COMPLETIONS:
            self._counts.count(record)
        level = logging.INFO if record.route in COMPLETIONS else logging.DEBUG
        if log.is_enabled_for(level):
            log.log(level, "request", **_line(record))

    def exposition(self, view: ClusterView, in_flight: int, steering: Steering, *, ready: bool) -> bytes:
        kinds = Counter(node.kind.value for node in view.nodes.values())
        for kind in names.KIND.values:
            self._metrics.set(names.LIVE_NODES, kinds[kind], kind=kind)
        self._metrics.set(names.IN_FLIGHT, in_flight)
        self._metrics.set(names.READY, ready)
        self._metrics.set(names.VIEW_AGE, self._view_age_s())
        self._metrics.set(names.THRESHOLD, steering.routing.threshold_tokens)
        self._metrics.choose(names.MODE_NOW, steering.routing.mode.value)
        self._metrics.set(names.LEADS, self._leads())
        self._metrics.set(names.ROUTER_PLAN_EPOCH, view.plan.epoch if view.plan else 0)
        self._count_messages()
        self._show_admission()
        show_breakers(self._metrics, steering)
        if self.listening is not None:
            self._show_front(self.listening)
        if self.request_log is not None:
            self._show_request_log(self.request_log)
        self._show_health(view)
        for link in steering.situation.links.values():
            self._show(link)
        if self._caches is not None:
            self._show_caches(self._caches)
        return self._metrics.exposition()

    def _show_health(self, view: ClusterView) -> None:
        """What is not well, and whom requests are kept from for it."""
        metrics = self._metrics
        if self.watchdog is not None:
            metrics.set(names.OLDEST_PROGRESS, self.watchdog.oldest_s())
            for stage, total in self.watchdog.stalled.items():
                metrics.follow(names.STALLED, total, stage=stage.value)
        if self.links is not None:
            metrics.set(names.SHUNNED, len(self.links.broken() & view.nodes.keys()), why="unreachable")
        if self.canaries is not None:
            metrics.set(names.SHUNNED, len(self.canaries.canary.distrusted & view.nodes.keys()), why="distrusted")
            for verdict, total in self.canaries.ports.verdicts.items():
                metrics.follow(names.CANARIES, total, verdict=verdict.value)

    def _show_admission(self) -> None:
        metrics, admission, keys = self._metrics, self._admission, self._keys
        metrics.set(names.ADMISSION_QUEUED, len(admission.turns))
        metrics.set(names.ADMISSION_QUEUED_TOKENS, admission.turns.tokens)
        metrics.set(names.ADMISSION_RUNNING_TOKENS, admission.running_tokens)
        if keys is not None:
            metrics.set(names.KEYS, len(keys.current))
            metrics.follow(names.KEYS_LOADED, keys.loaded, outcome="ok")
            metrics.follow(names.KEYS_LOADED, keys.failed, outcome="failed")

    def _show_request_log(self, file: RequestLogFile) -> None:
        for outcome, total in (("written", file.written), ("dropped", file.dropped), ("failed", file.failed)):
            self._metrics.follow(names.REQUEST_LOG_LINES, total, outcome=outcome)

    def _show_front(self, listening: Listening) -> None:
        metrics, counters, tls = self._metrics, listening.counters, listening.tls
        metrics.set(names.HTTP_CONNECTIONS, counters.open_connections)
        metrics.follow(names.HTTP_ACCEPTED, counters.accepted)
        for status, total in counters.refused.items():
            metrics.follow(names.HTTP_REFUSED, total, status=str(status))
        metrics.set(names.HTTP_BODIES, counters.body_bytes)
        metrics.set(names.TLS_CERTIFICATE_VALID, tls.valid_s if tls is not None else math.inf)
        if tls is not None:
            metrics.follow(names.TLS_CERTIFICATES, tls.loaded, outcome="ok")
            metrics.follow(names.TLS_CERTIFICATES, tls.failed, outcome="failed")

    def _count_messages(self) -> None:
        metrics, links = self._metrics, self._links
        metrics.follow(names.LINK_CONNECTIONS, links.connections)
        metrics.follow(names.LINK_FAILURES, links.failed_connections)
        metrics.follow(names.LINK_COMMANDS, links.commands)
        metrics.follow(names.LINK_COMMAND_MESSAGES, links.messages_sent)
        metrics.follow(names.LINK_EVENTS, links.events)
        metrics.follow(names.LINK_EVENT_MESSAGES, links.messages_received)
        metrics.follow(names.LINK_LATE_EVENTS, links.late_events)

    def _show(self, link: LinkState) -> None:
        measured = {
            names.LINK_CAPACITY: link.capacity_bytes_per_s,
            names.LINK_GOODPUT: link.goodput_bytes_per_s or 0.0,
            names.LINK_UTILIZATION: link.utilization,
            names.LINK_QUEUE: link.queued_bytes,
            names.LINK_QUEUE_AGE: link.queue_age_s,
            names.LINK_RTT: link.rtt_s,
            names.LINK_RETRANSMITTED: link.retransmitted_ratio,
        }
        for gauge, value in measured.items():
            shown = math.nan if value is None else value
            self._metrics.set(gauge, shown, region=link.target, peer_region=link.source)

    def _show_caches(self, caches: CachePools) -> None:
        metrics, followed = self._metrics, caches.followed()
        states = Counter((each.pool.region, caches.state(each).value) for each in followed)
        oldest: dict[str, float] = {}
        for each in followed:
            oldest[each.pool.region] = max(caches.age_s(each), oldest.get(each.pool.region, 0.0))
        self._regions |= oldest.keys()
        for region in sorted(self._regions):
            for state in Copy:
                metrics.set(names.POOL_SHARDS, states[RegionId(region), state.value], region=region, state=state.value)
            metrics.set(names.POOL_INDEX_AGE, oldest.get(region, math.nan), region=region)
        metrics.set(names.POOL_INDEX_BYTES, caches.index.nbytes)
        metrics.follow(names.POOL_INDEX_FORGOTTEN, caches.index.forgotten_units)
        for region, total in caches.updates.items():
            metrics.follow(names.POOL_UPDATES, total, region=region)
            metrics.follow(names.POOL_UPDATE_BYTES, caches.update_bytes[region], region=region)
        for reason, total in caches.stale.items():
            metrics.follow(names.POOL_STALE, total, reason=reason)


def _line(record: RequestLog) -> dict[str, object]:
    story = record.story
    route = story.route if story else None
    trace = {"trace_id": trace_id_of(record.traceparent)} if record.traceparent else {}
    return {
        "request_id": record.request_id,
        **trace,
        "route": record.route,
        "tenant": record.tenant,
        "model": record.model,
        "status": record.status,
        "error": record.error,
        "path": route.path.value if route else None,
        "reason": route.reason.value if route else None,
        "prefill": route.prefill if route else None,
        "decode": route.decode if route else None,
        "attempts": len(story.attempts) if story else 0,
        "migrations": story.moves if story else 0,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": story.prefill.cached_tokens if story and story.prefill else None,
        "output_tokens": record.output_tokens,
        "finish": record.finish.value if record.finish else None,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
    }
