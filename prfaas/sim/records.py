"""What a simulation measures: one row per request, and the state of the cluster every few seconds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prfaas.errors import PrfaasError
from prfaas.flows.story import Story
from prfaas.request import Path, Reason
from prfaas.sim.workload import Arrival

REASONS = tuple(Reason)
#: One request. Times are seconds, NaN where it did not get so far; `failed` names the error in `Records.errors`.
ROW = np.dtype(
    [
        ("arrived_s", "f8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("remote", "?"),
        ("reason", "i1"),
        ("attempts", "i2"),
        ("uncached_tokens", "i4"),
        ("ttft_s", "f8"),
        ("queue_s", "f8"),
        ("network_s", "f8"),
        ("prefill_queue_s", "f8"),
        ("prefill_s", "f8"),
        ("exposed_s", "f8"),
        ("decode_queue_s", "f8"),
        ("first_step_s", "f8"),
        ("predicted_s", "f8"),
        ("finished_s", "f8"),
        ("kv_bytes", "f8"),
        ("failed", "i2"),
    ]
)
TERMS = ("queue", "network", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "first_decode_step")

Rows = npt.NDArray[np.void]


@dataclass(slots=True)
class Observed:
    """What one client saw."""

    arrival: Arrival
    story: Story
    first_s: float = math.nan
    finished_s: float = math.nan
    error: PrfaasError | None = None


@dataclass(slots=True)
class Records:
    """Requests in order of arrival, also those that have not finished."""

    requests: list[Observed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _codes: dict[str, int] = field(default_factory=dict)

    def rows(self) -> Rows:
        return np.array(list(self._rows()), dtype=ROW)

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for seen in self.requests:
            story, route = seen.story, seen.story.route
            terms = [story.terms.get(term, math.nan) for term in TERMS]
            predicted_s = route.predicted_ttft_s if route is not None else None
            yield (
                seen.arrival.at_s,
                seen.arrival.prompt_tokens,
                story.output_tokens,
                route is not None and route.path is Path.REMOTE,
                REASONS.index(route.reason) if route is not None else -1,
                len(story.attempts),
                route.uncached_tokens if route is not None else 0,
                seen.first_s - seen.arrival.at_s,
                *terms,
                math.nan if predicted_s is None else predicted_s,
                seen.finished_s,
                story.prefill.kv_bytes if story.prefill is not None else 0,
                self._code(seen.error),
            )

    def _code(self, error: PrfaasError | None) -> int:
        """Which kind of error it was; -1 for none."""
        if error is None:
            return -1
        name = type(error).__name__
        if name not in self._codes:
            self._codes[name] = len(self.errors)
            self.errors.append(name)
        return self._codes[name]
