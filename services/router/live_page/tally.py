"""What has come of this router's requests since it started. Totals: whoever reads them twice knows the rates."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.router.openai.record import Observe, RequestLog
from services.router.request_counts import COMPLETIONS

#: Times to the first token that count: so many of the latest, of the last minute.
MAX_TIMES, TIMES_S = 1024, 60.0


@dataclass(slots=True)
class _Failures:
    count: int = 0
    latest: float = 0.0


@dataclass(slots=True)
class Tally:
    now: Callable[[], float]
    requests: Counter[str] = field(default_factory=Counter)
    #: What was refused or failed, by status and class of the error, of which there are few.
    failures: dict[tuple[int, str], _Failures] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    retried: int = 0
    _times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))

    def besides(self, observe: Observe) -> Observe:
        """Count what `observe` is told as well."""

        def ended(record: RequestLog) -> None:
            if record.route in COMPLETIONS:
                self._count(record)
            observe(record)

        return ended

    def _count(self, record: RequestLog) -> None:
        story = record.story
        route = story.route if story is not None else None
        self.requests[route.path.value if route is not None else "none"] += 1
        self.output_tokens += record.output_tokens
        if record.error is not None:
            failures = self.failures.setdefault((record.status, record.error), _Failures())
            failures.count, failures.latest = failures.count + 1, self.now()
        if record.ttft_s is not None:
            self._times.append((self.now(), record.ttft_s))
        if story is not None and route is not None:
            self.retried += len(story.attempts) > 1
            self.prompt_tokens += record.prompt_tokens or 0
            self.cached_tokens += story.prefill.cached_tokens if story.prefill is not None else 0

    def described(self) -> dict[str, Any]:
        now = self.now()
        times = sorted(seconds for at, seconds in self._times if now - at < TIMES_S)
        return {
            "total": self.requests.total(),
            "by_path": dict(self.requests),
            "retried": self.retried,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "failed": sum(each.count for each in self.failures.values()),
            "ttft": {
                "count": len(times),
                "window_seconds": TIMES_S,
                "p50_seconds": times[len(times) // 2] if times else None,
                "p90_seconds": times[len(times) * 9 // 10] if times else None,
            },
            "failures": [
                {"status": status, "error": error, "count": each.count, "latest_seconds": now - each.latest}
                for (status, error), each in sorted(self.failures.items())
            ],
        }
