"""What a router tells of its breakers: metrics, the live page, and why a request could not go elsewhere."""

import time

from prfaas.cluster import NodeId, RegionId
from prfaas.errors import TransferFailed
from prfaas.flows.story import Story
from prfaas.live.steering import Steering
from prfaas.observe import names
from prfaas.observe.metrics import Metrics
from prfaas.request import AttemptId, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.breaker import BreakerParams
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.hedging import HedgeParams, Hedging
from prfaas.scheduling.routing import RoutingParams
from services.router.breaker_metrics import MAX_SHOWN, described_breakers, show_breakers
from services.router.explain import explanation

PARAMS = BreakerParams(min_outcomes=2, rest_s=100.0, max_rest_s=100.0, in_flight=1, least_in_flight=1)


def steering(hedging: Hedging | None = None) -> Steering:
    return Steering(RegionId("near"), RoutingParams(100), 0.0, DemandParams(), breakers=PARAMS, hedging=hedging)


def begin(breakers: Breakers, number: int, source: str = "p0", decode: str = "d0") -> AttemptId:
    attempt = AttemptId(f"a{number}")
    ends = (NodeId(source), RegionId("far")), (NodeId(decode), RegionId("near"))
    breakers.begin(attempt, *ends, None, time.monotonic())
    return attempt


def break_pair(breakers: Breakers, source: str = "p0", decode: str = "d0") -> None:
    for number in range(PARAMS.min_outcomes):
        attempt = begin(breakers, number, source, decode)
        breakers.failed(attempt, TransferFailed(attempt, "checksum"), time.monotonic())


def shown(steered: Steering) -> dict[str, float]:
    metrics = Metrics(names.ROUTER, {})
    show_breakers(metrics, steered)
    lines = metrics.exposition().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_the_series_are_there_from_the_start():
    """At 0."""
    told = shown(steering())
    prefixes = ("prfaas_router_breaker", "prfaas_router_hedges", "prfaas_router_full_sources")
    mine = {name: value for name, value in told.items() if name.startswith(prefixes)}
    assert len(mine) == 3 * 2 + 3 * 3 + 3 * 3 + 1 + 2
    assert set(mine.values()) == {0.0}


def test_an_open_breaker_is_counted_once_and_shown_while_it_is_open():
    """With why; and a source that may have no more under way is told as well."""
    hedging = Hedging(HedgeParams())
    steered = steering(hedging)
    hedging.take()
    break_pair(steered.breakers)
    begin(steered.breakers, 99, "p1")
    told = shown(steered)
    assert told['prfaas_router_breakers{around="pair",circuit="open"}'] == 1
    assert told['prfaas_router_breakers_opened_total{around="pair",cause="failed"}'] == 1
    assert told["prfaas_router_full_sources"] == 1
    assert told['prfaas_router_hedges_total{what="started"}'] == 1


def test_the_live_page_tells_of_those_that_are_open_and_never_too_much():
    """Of many the first; the others are counted."""
    breakers = steering().breakers
    break_pair(breakers)
    told = described_breakers(breakers, time.monotonic())
    [one] = told["shown"]
    assert (one["around"], one["source"], one["target"], one["circuit"]) == ("pair", "p0", "d0", "open")
    assert 99 < one["rests_seconds"] <= 100
    for number in range(2 * MAX_SHOWN):
        break_pair(breakers, f"p{number + 1}")
    told = described_breakers(breakers, time.monotonic())
    assert told["total"] > 2 * MAX_SHOWN and len(told["shown"]) == MAX_SHOWN


def test_an_explanation_names_what_was_shut():
    """As it was when the request got its route."""
    steered = steering()
    break_pair(steered.breakers)
    request = Request(id=RequestId("r"), model="m", prompt=bytes(40), sampling=Sampling(max_tokens=1))
    route = Route(
        prefill=NodeId("d0"),
        decode=NodeId("d0"),
        path=Path.LOCAL,
        reason=Reason.BREAKER_OPEN,
        uncached_tokens=10,
        transfer_tokens=0,
        threshold_tokens=1,
    )
    steered.decisions.begun(request, Story())
    steered.routed(request, route, time.monotonic())
    found = steered.decisions.find("r")
    assert found is not None
    under = explanation(found)["decided_under"]
    assert under["shut"] == {"sources": [], "pairs": [["p0", "d0"]], "links": []}
