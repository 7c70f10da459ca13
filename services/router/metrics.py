"""What the router counts, and the log line of each request."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from prfaas.cluster import ClusterView, LinkState, RegionId
from prfaas.flows.story import Story
from prfaas.kvcache.feed import Copy
from prfaas.live.link_stream import LinkCounters
from prfaas.live.pools import CachePools
from prfaas.live.steering import Steering
from prfaas.observe import names
from prfaas.observe.logs import request_context
from prfaas.observe.metrics import Metrics
from prfaas.observe.names import Outcome
from services.router.openai.errors import CLIENT_CLOSED_REQUEST
from services.router.openai.record import RequestLog

log = structlog.get_logger()

#: Routes that carry completions; the others are probes and look-ups.
COMPLETIONS = frozenset({"chat", "completions"})
NO_PATH = "none"


class RouterMetrics:
    """`view_age_s` says how long ago the store last confirmed the view."""

    def __init__(
        self,
        models: Sequence[str],
        view_age_s: Callable[[], float],
        leads: Callable[[], bool],
        links: LinkCounters,
        caches: CachePools | None = None,
    ) -> None:
        self._caches, self._regions = caches, set[str]()
        self._metrics = Metrics(names.ROUTER, {"model": models})
        self._view_age_s, self._leads, self._links = view_age_s, leads, links

    def gap(self, seconds: float) -> None:
        """Time between two batches of tokens of one stream."""
        self._metrics.observe(names.ITL, seconds)

    def request_ended(self, record: RequestLog) -> None:
        """Count and log one HTTP request."""
        if record.route in COMPLETIONS:
            self._count(record)
        with request_context(record.request_id, record.traceparent[3:35] if record.traceparent else None):
            level = log.debug if record.route not in COMPLETIONS else log.info
            level("request", **_line(record))

    def exposition(self, view: ClusterView, in_flight: int, steering: Steering) -> bytes:
        kinds = Counter(node.kind.value for node in view.nodes.values())
        for kind in names.KIND.values:
            self._metrics.set(names.LIVE_NODES, kinds[kind], kind=kind)
        self._metrics.set(names.IN_FLIGHT, in_flight)
        self._metrics.set(names.VIEW_AGE, self._view_age_s())
        self._metrics.set(names.THRESHOLD, steering.routing.threshold_tokens)
        self._metrics.choose(names.MODE_NOW, steering.routing.mode.value)
        self._metrics.set(names.LEADS, self._leads())
        self._metrics.set(names.ROUTER_PLAN_EPOCH, view.plan.epoch if view.plan else 0)
        self._count_messages()
        for link in steering.situation.links.values():
            self._show(link)
        if self._caches is not None:
            self._show_caches(self._caches)
        return self._metrics.exposition()

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

    def _count_cache(self, record: RequestLog, story: Story) -> None:
        """What the index promised, against what prefill reported. An attempt that did without a cache tells nothing
        about the index."""
        metrics, first = self._metrics, story.attempts[0].route
        metrics.add(names.CACHE_MATCHED_TOKENS, story.match.kv, kind="kv")
        metrics.add(names.CACHE_MATCHED_TOKENS, story.match.joint, kind="joint")
        if first.pull is not None:
            metrics.add(names.PULLS, outcome="chosen" if first.pull.chosen else "not_worth_it")
        if story.prefill is None:
            return
        metrics.add(names.CACHED_TOKENS, story.prefill.cached_tokens)
        metrics.add(names.PULLED_BYTES, story.prefill.pulled_bytes)
        route = story.attempts[-1].route
        promised = (record.prompt_tokens or 0) - route.prefill_tokens
        if route.use_cache and (promised or story.prefill.cached_tokens):
            error = promised - story.prefill.cached_tokens
            metrics.observe(names.CACHE_ERROR, abs(error), sign="over" if error >= 0 else "under")

    def _count(self, record: RequestLog) -> None:
        metrics, story = self._metrics, record.story
        route = story.route if story else None
        path = route.path.value if route else NO_PATH
        metrics.add(names.REQUESTS, model=record.model or NO_PATH, path=path, outcome=_outcome(record).value)
        metrics.observe(names.REQUEST_DURATION, record.duration_s)
        metrics.add(names.OUTPUT_TOKENS, record.output_tokens)
        if record.ttft_s is not None:
            metrics.observe(names.TTFT, record.ttft_s, path=path)
        if story is None or route is None:
            return
        metrics.add(names.PROMPT_TOKENS, record.prompt_tokens or 0)
        metrics.observe(names.UNCACHED_TOKENS, story.attempts[0].route.uncached_tokens)
        metrics.add(names.RECOMPUTED_TOKENS, story.recomputed_tokens)
        self._count_cache(record, story)
        if story.prefill:
            metrics.add(names.KV_TRANSFER_BYTES, story.prefill.kv_bytes, path=path)
        for attempt in story.attempts:
            metrics.add(names.ROUTES, path=attempt.route.path.value, reason=attempt.route.reason.value)
            metrics.add(names.ATTEMPTS, ending=attempt.ending.value)


def _outcome(record: RequestLog) -> Outcome:
    if record.status == CLIENT_CLOSED_REQUEST:
        return Outcome.DISCONNECTED
    if record.error is None:
        return Outcome.OK
    if record.status in (429, 503):
        return Outcome.OVERLOADED
    return Outcome.INVALID if 400 <= record.status < 500 else Outcome.FAILED


def _line(record: RequestLog) -> dict[str, object]:
    story = record.story
    route = story.route if story else None
    return {
        "route": record.route,
        "model": record.model,
        "status": record.status,
        "error": record.error,
        "path": route.path.value if route else None,
        "reason": route.reason.value if route else None,
        "prefill": route.prefill if route else None,
        "decode": route.decode if route else None,
        "attempts": len(story.attempts) if story else 0,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": story.prefill.cached_tokens if story and story.prefill else None,
        "output_tokens": record.output_tokens,
        "finish": record.finish.value if record.finish else None,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
    }
