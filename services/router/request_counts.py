"""Counts requests that have ended. It runs for every one of them, so its series are looked up once."""

from functools import lru_cache

from prfaas.errors import Overloaded, Stopping
from prfaas.flows.story import Migration, Moved, Story
from prfaas.observe import names
from prfaas.observe.metrics import Metrics, Total
from prfaas.observe.names import Outcome
from prfaas.request import TTFT_TERMS, Path, TtftAccount
from services.router.openai.errors import CLIENT_CLOSED_REQUEST
from services.router.openai.record import RequestLog

#: Routes that carry completions; the others are probes and look-ups.
COMPLETIONS = frozenset({"chat", "completions", "responses"})
NO_PATH = "none"
#: Errors by which requests are turned away without anything having failed.
NO_ROOM = frozenset({Overloaded.__name__, Stopping.__name__})
#: Series kept at hand of those with labels that are open; others are looked up again.
_KEPT = 512


class _OfPath:
    """What is counted of requests of one path that got so far as to have one."""

    def __init__(self, metrics: Metrics, path: str) -> None:
        self.ttft = metrics.histogram(names.TTFT, path=path)
        self.terms = {term: metrics.histogram(names.TTFT_TERM, term=term, path=path) for term in TTFT_TERMS}
        self.unaccounted = metrics.histogram(names.TTFT_UNACCOUNTED, path=path)
        self.kv_bytes = metrics.counter(names.KV_TRANSFER_BYTES, path=path)
        self.recomputed_tokens = metrics.counter(names.RECOMPUTED_TOKENS, path=path)


class RequestCounts:
    def __init__(self, metrics: Metrics) -> None:
        self._paths = {path.value: _OfPath(metrics, path.value) for path in Path}
        self._duration = metrics.histogram(names.REQUEST_DURATION)
        self._uncached = metrics.histogram(names.UNCACHED_TOKENS)
        self._prompt_tokens = metrics.counter(names.PROMPT_TOKENS)
        self._output_tokens = metrics.counter(names.OUTPUT_TOKENS)
        self._matched_kv = metrics.counter(names.CACHE_MATCHED_TOKENS, kind="kv")
        self._matched_joint = metrics.counter(names.CACHE_MATCHED_TOKENS, kind="joint")
        self._cached_tokens = metrics.counter(names.CACHED_TOKENS)
        self._pulled_bytes = metrics.counter(names.PULLED_BYTES)
        self._pulls = [metrics.counter(names.PULLS, outcome=outcome) for outcome in ("not_worth_it", "chosen")]
        self._migrations = {moved: metrics.counter(names.MIGRATIONS, outcome=moved.value) for moved in Moved}
        self._migration_gap = metrics.histogram(names.MIGRATION_GAP)
        self._replay_computed = metrics.counter(names.REPLAYED_TOKENS, kind="computed")
        self._replay_cached = metrics.counter(names.REPLAYED_TOKENS, kind="cached")
        self._promised_more = metrics.histogram(names.CACHE_ERROR, sign="over")
        self._promised_less = metrics.histogram(names.CACHE_ERROR, sign="under")

        def requests(model: str, path: str, outcome: str) -> Total:
            return metrics.counter(names.REQUESTS, model=model, path=path, outcome=outcome)

        def tenant_tokens(tenant: str, kind: str) -> Total:
            return metrics.counter(names.TENANT_TOKENS, tenant=tenant, kind=kind)

        def routes(path: str, reason: str) -> Total:
            return metrics.counter(names.ROUTES, path=path, reason=reason)

        def attempts(ending: str) -> Total:
            return metrics.counter(names.ATTEMPTS, ending=ending)

        self._requests, self._tenant_tokens = lru_cache(_KEPT)(requests), lru_cache(_KEPT)(tenant_tokens)
        self._routes, self._attempts = lru_cache(_KEPT)(routes), lru_cache(_KEPT)(attempts)

    def count(self, record: RequestLog) -> None:
        route = record.story.route if record.story is not None else None
        path = route.path.value if route is not None else NO_PATH
        self._requests(record.model or NO_PATH, path, outcome(record).value).inc()
        self._duration.observe(record.duration_s)
        self._output_tokens.inc(record.output_tokens)
        self._tenant_tokens(record.tenant, "output").inc(record.output_tokens)
        if route is None:
            return
        self._prompt_tokens.inc(record.prompt_tokens or 0)
        self._tenant_tokens(record.tenant, "prompt").inc(record.prompt_tokens or 0)
        if record.account is not None:
            self._first_token(self._paths[path], record.account)
        each = [request.prompt_tokens for request in record.requests] or [record.prompt_tokens or 0]
        for story, prompt_tokens in zip(record.stories, each, strict=True):
            if story.attempts:
                self._sequence(story, prompt_tokens)

    def _first_token(self, counts: _OfPath, account: TtftAccount) -> None:
        counts.ttft.observe(account.total_s)
        for term, seconds in account.seconds.items():
            counts.terms[term].observe(seconds)
        counts.unaccounted.observe(abs(account.unaccounted_s))

    def _sequence(self, story: Story, prompt_tokens: int) -> None:
        self._uncached.observe(story.attempts[0].route.uncached_tokens)
        for attempt in story.attempts:
            self._routes(attempt.route.path.value, attempt.route.reason.value).inc()
            self._attempts(attempt.ending.value).inc()
        for move in story.migrations:
            self._moved(move)
        if story.route is not None:
            self._paths[story.route.path.value].recomputed_tokens.inc(story.recomputed_tokens)
        if story.prefill is not None and story.route is not None:
            self._paths[story.route.path.value].kv_bytes.inc(story.prefill.kv_bytes)
        self._cache(story, prompt_tokens)

    def _moved(self, move: Migration) -> None:
        self._migrations[move.outcome].inc()
        if move.gap_s is not None:
            self._migration_gap.observe(move.gap_s)
        if move.prefill is not None and move.path is not None:
            self._paths[move.path.value].kv_bytes.inc(move.prefill.kv_bytes)
            self._replay_computed.inc(move.prefill.prefill_tokens)
            self._replay_cached.inc(move.prefill.cached_tokens)

    def _cache(self, story: Story, prompt_tokens: int) -> None:
        """What the index promised, against what prefill reported. An attempt that did without a cache tells nothing
        about the index."""
        self._matched_kv.inc(story.match.kv)
        self._matched_joint.inc(story.match.joint)
        if (pull := story.attempts[0].route.pull) is not None:
            self._pulls[pull.chosen].inc()
        if story.prefill is None:
            return
        self._cached_tokens.inc(story.prefill.cached_tokens)
        self._pulled_bytes.inc(story.prefill.pulled_bytes)
        route = story.opening.route if story.opening is not None else story.attempts[-1].route
        promised = prompt_tokens - route.prefill_tokens
        if route.use_cache and (promised or story.prefill.cached_tokens):
            error = promised - story.prefill.cached_tokens
            (self._promised_more if error >= 0 else self._promised_less).observe(abs(error))


def outcome(record: RequestLog) -> Outcome:
    if record.status == CLIENT_CLOSED_REQUEST:
        return Outcome.DISCONNECTED
    if record.error is None:
        return Outcome.OK
    if record.status in (429, 503) and record.error in NO_ROOM:
        return Outcome.OVERLOADED
    return Outcome.INVALID if 400 <= record.status < 500 else Outcome.FAILED
