"""One breaker: whether something that fails too often may be tried, after what has come of it lately.

CLOSED lets everything through and looks at the share of failures within a window, and at the latest few. OPEN lets
nothing through for a rest. After that it is HALF_OPEN: one attempt may try, and what comes of it closes the breaker or
opens it again for twice as long, up to a bound. What must hold: fewer than `min_outcomes` never open it, and one rest
is followed by one probe.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple

from prfaas.cluster import NodeId
from prfaas.request import AttemptId


class Circuit(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Cause(Enum):
    """Why it opened. SLOW: attempts took much longer than was predicted, or did not end in their time. STALLED: nothing
    passes, as is known without them."""

    FAILED = "failed"
    SLOW = "slow"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerParams:
    """`slow_factor` times what was predicted and `slow_slack_s` on top are slow. `in_flight` is how many attempts one
    source may have under way as long as it keeps up, `least_in_flight` how few that becomes when it does not. A link
    opens when its senders wait for answers and for `stalled_s` none has come."""

    window_s: float = 120.0
    min_outcomes: int = 4
    failure_share: float = 0.5
    rest_s: float = 1.0
    max_rest_s: float = 60.0
    slow_factor: float = 3.0
    slow_slack_s: float = 1.0
    in_flight: int = 256
    least_in_flight: int = 2
    stalled_s: float = 0.5

    def due_s(self, predicted_s: float) -> float:
        return self.slow_slack_s + self.slow_factor * predicted_s


#: Outcomes that one breaker keeps: what has worked for a long time must not hide for as long that it does no more.
MOST_OUTCOMES = 16


class Outcome(NamedTuple):
    """Of one attempt from `source` to `decode`. `certain`: there is no doubt about whose failure it was."""

    at: float
    failed: bool
    source: NodeId
    decode: NodeId
    certain: bool = False


class Breaker:
    """`witnesses`: from how many sources, and to how many decode nodes, attempts must have failed before it opens: one
    that fails with everybody is to blame itself. Of decode nodes no more are asked for than there were."""

    __slots__ = ("_outcomes", "_params", "_probe", "_rest_s", "_witnesses", "circuit", "half_opens_at")

    def __init__(self, params: BreakerParams, witnesses: tuple[int, int] = (1, 1)) -> None:
        self._params, self._witnesses = params, witnesses
        self._outcomes: deque[Outcome] = deque(maxlen=max(MOST_OUTCOMES, params.min_outcomes))
        self._rest_s = params.rest_s
        self._probe: AttemptId | None = None
        self.circuit = Circuit.CLOSED
        self.half_opens_at = -math.inf

    def lets_through(self, now: float) -> bool:
        self._rested(now)
        return self.circuit is Circuit.CLOSED or (self.circuit is Circuit.HALF_OPEN and self._probe is None)

    def begin(self, attempt: AttemptId, now: float) -> bool:
        """An attempt is made, allowed or not. Whether it is the probe."""
        self._rested(now)
        if self.circuit is not Circuit.HALF_OPEN or self._probe is not None:
            return False
        self._probe = attempt
        return True

    def ended(self, attempt: AttemptId, outcome: Outcome) -> bool:
        """Whether this has opened it. While it is not closed only what comes of the probe counts."""
        if self.circuit is Circuit.CLOSED:
            self._outcomes.append(outcome)
            return outcome.failed and self._is_bad(outcome.at) and self._open(outcome.at)
        if self._probe != attempt:
            return False
        if outcome.failed:
            self._rest_s = min(2 * self._rest_s, self._params.max_rest_s)
            return self._open(outcome.at)
        self.circuit, self._probe, self._rest_s = Circuit.CLOSED, None, self._params.rest_s
        self._outcomes.clear()
        return False

    def unknown(self, attempt: AttemptId, now: float) -> bool:
        """Nothing can be said of what came of an attempt. If it was the probe, another may try after another rest."""
        return self._probe == attempt and self._open(now)

    def stalled(self, now: float) -> bool:
        """Nothing passes now: it opens, or rests as long once more. A probe under way is left to find out. Whether this
        has opened it."""
        self._rested(now)
        return self.circuit is not Circuit.OPEN and self._probe is None and self._open(now)

    def is_idle(self, now: float) -> bool:
        """Closed, and nothing is remembered: as good as new."""
        return self.circuit is Circuit.CLOSED and (
            not self._outcomes or self._outcomes[-1].at <= now - self._params.window_s
        )

    def check(self) -> None:
        assert self._params.rest_s <= self._rest_s <= self._params.max_rest_s
        assert self._probe is None or self.circuit is Circuit.HALF_OPEN, "a probe of one that is not half open"
        assert self.circuit is Circuit.CLOSED or not self._outcomes

    def _rested(self, now: float) -> None:
        if self.circuit is Circuit.OPEN and now >= self.half_opens_at:
            self.circuit = Circuit.HALF_OPEN

    def _open(self, now: float) -> bool:
        self.circuit, self._probe = Circuit.OPEN, None
        self.half_opens_at = now + self._rest_s
        self._outcomes.clear()
        return True

    def _is_bad(self, now: float) -> bool:
        outcomes, params = self._outcomes, self._params
        while outcomes and outcomes[0].at <= now - params.window_s:
            outcomes.popleft()
        if len(outcomes) < params.min_outcomes:
            return False
        latest = islice(reversed(outcomes), params.min_outcomes)
        failed = [outcome for outcome in outcomes if outcome.failed]
        if len(failed) < params.failure_share * len(outcomes) and not all(outcome.failed for outcome in latest):
            return False
        if all(outcome.certain for outcome in failed):
            return True
        sources, decodes = self._witnesses
        heard = len({outcome.decode for outcome in outcomes})
        return len({each.source for each in failed}) >= sources and len({each.decode for each in failed}) >= min(
            decodes, heard
        )
