"""What a router shows of its breakers and hedges, as metrics and as values for pages."""

import time
from collections import Counter
from typing import Any

from prfaas.live.steering import Steering
from prfaas.observe import names
from prfaas.observe.metrics import Metrics
from prfaas.scheduling.blame import Guard
from prfaas.scheduling.breaker import Cause
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.shut import Shut

#: Of breakers on a page: the rest is only counted.
MAX_SHOWN = 50


def show_breakers(metrics: Metrics, steering: Steering) -> None:
    breakers, hedging, now = steering.breakers, steering.hedging, time.monotonic()
    shut = breakers.shut(now)
    states = Counter((guard, circuit.value) for guard, _, _, circuit, _ in breakers.states(now))
    _, circuit = names.BREAKERS.labels
    for guard in Guard:
        for value in circuit.values:
            metrics.set(names.BREAKERS, states[guard, value], around=guard.value, circuit=value)
        for cause in Cause:
            opened = breakers.opened[guard, cause]
            metrics.follow(names.BREAKERS_OPENED, opened, around=guard.value, cause=cause.value)
        for outcome in ("closed", "failed", "unknown"):
            probes = breakers.probes[guard, outcome]
            metrics.follow(names.BREAKER_PROBES, probes, around=guard.value, outcome=outcome)
    metrics.set(names.FULL_SOURCES, len(shut.full))
    if hedging is not None:
        metrics.follow(names.HEDGES, hedging.started, what="started")
        metrics.follow(names.HEDGES, hedging.won, what="won")


def described_breakers(breakers: Breakers, now: float) -> dict[str, Any]:
    """Those that are not closed, and sources that have as many prefills under way as they may."""
    breakers.shut(now)
    states = list(breakers.states(now))
    rooms = [room for room in breakers.in_flight() if room[1] >= room[2]]
    return {
        "total": len(states),
        "shown": [
            {
                "around": guard.value,
                "source": source,
                "target": target or None,
                "circuit": circuit.value,
                "rests_seconds": rests_s,
            }
            for guard, source, target, circuit, rests_s in states[:MAX_SHOWN]
        ],
        "full_sources": {
            "total": len(rooms),
            "shown": [
                {"source": source, "under_way": taken, "limit": limit} for source, taken, limit in rooms[:MAX_SHOWN]
            ],
        },
    }


def described_shut(shut: Shut) -> dict[str, Any]:
    """What a route could not take."""
    return {
        "sources": sorted(shut.sources)[:MAX_SHOWN],
        "pairs": [[source, decode] for decode in sorted(shut.pairs) for source in sorted(shut.pairs[decode])][
            :MAX_SHOWN
        ],
        "links": [list(link) for link in sorted(shut.links)][:MAX_SHOWN],
    }
