"""What the router counts of caches: promised against reported, and how fresh the indexes are."""

import math
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.cluster import ClusterView, Incarnation, Namespace, NodeId, Pool, RegionId
from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.kvcache.feed import Heartbeat, SnapshotBegin, SnapshotEnd, Update
from prfaas.live.link_stream import LinkCounters
from prfaas.live.pools import CachePools
from prfaas.live.steering import Steering
from prfaas.request import AttemptId, Match, Path, Pull, Reason, Route
from prfaas.rpc.identity import dial
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from prfaas.security import PeerRole
from services.router.explain import described_caches
from services.router.metrics import RouterMetrics
from services.router.openai.record import RequestLog

STATES = ("current", "syncing", "held", "stale")
P0, D0, FAR = NodeId("p0"), NodeId("d0"), RegionId("far")
POOL = Pool(
    id=NodeId("c0"), region=FAR, incarnation=Incarnation(1), namespace=Namespace("ns"), rpc_address="127.0.0.1:1"
)
ROUTE = Route(
    prefill=P0,
    decode=D0,
    path=Path.REMOTE,
    reason=Reason.LONG_PROMPT,
    uncached_tokens=488,
    prefill_tokens=488,
    transfer_tokens=999,
    threshold_tokens=100,
)


class Counted:
    def __init__(self, caches: CachePools | None = None) -> None:
        self.metrics = RouterMetrics(
            ["m"], lambda: 0.0, lambda: False, LinkCounters(), Admission(AdmissionParams(max_running=1)), caches
        )
        self.steering = Steering(RegionId("near"), RoutingParams(100), 0.0, DemandParams())

    def ended(self, route: Route, cached_tokens: int, pulled_bytes: int = 0) -> None:
        report = PrefillReport(
            queue_s=0.0,
            compute_s=1.0,
            exposed_s=0.0,
            prefill_tokens=1,
            kv_bytes=1,
            cached_tokens=cached_tokens,
            pulled_bytes=pulled_bytes,
        )
        attempts = [Attempt(AttemptId("a"), route, Ending.DONE)]
        story = Story(attempts=attempts, prefill=report, match=Match(512, 640))
        self.metrics.request_ended(RequestLog(route="chat", status=200, model="m", prompt_tokens=1000, story=story))

    def value(self, name: str, **labels: str) -> float:
        text = self.metrics.exposition(ClusterView(), 0, self.steering, ready=True).decode()
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        (found,) = [each.value for each in samples if each.name == name and each.labels == labels]
        return found


@pytest.mark.parametrize(
    ("reported", "sign", "error"), [(512, "over", 0.0), (448, "over", 64.0), (0, "over", 512.0), (640, "under", 128.0)]
)
def test_field_I6_what_was_promised_is_compared_with_what_prefill_reports(reported: int, sign: str, error: float):
    """The index promised 512 tokens; the histogram tells how far off that was, and in which direction."""
    counted = Counted()
    counted.ended(ROUTE, reported)
    assert counted.value("prfaas_router_cache_error_tokens_count", sign=sign) == 1
    assert counted.value("prfaas_router_cache_error_tokens_sum", sign=sign) == error
    assert counted.value("prfaas_router_cached_tokens_total") == reported
    assert counted.value("prfaas_router_cache_matched_tokens_total", kind="joint") == 512
    assert counted.value("prfaas_router_cache_matched_tokens_total", kind="kv") == 640


def test_an_attempt_without_a_cache_and_a_prompt_without_a_prefix_tell_nothing_of_the_index():
    counted = Counted()
    counted.ended(replace(ROUTE, use_cache=False), 0)
    counted.ended(replace(ROUTE, prefill_tokens=1000), 0)
    for sign in ("over", "under"):
        assert counted.value("prfaas_router_cache_error_tokens_count", sign=sign) == 0


def test_pulls_are_counted_with_what_they_brought():
    counted = Counted()
    counted.ended(replace(ROUTE, pull=Pull(source=P0, tokens=64, chosen=True)), 512, pulled_bytes=4096)
    counted.ended(replace(ROUTE, pull=Pull(source=P0, tokens=64)), 512)
    assert counted.value("prfaas_router_pulls_total", outcome="chosen") == 1
    assert counted.value("prfaas_router_pulls_total", outcome="not_worth_it") == 1
    assert counted.value("prfaas_router_pulled_bytes_total") == 4096


def test_how_fresh_each_index_is_can_be_seen():
    """By region in the metrics, shard by shard for the operator: stale, current, then silent for too long."""
    now = [10.0]
    caches = CachePools(
        "r0",
        ClusterView,
        partial(dial, None, PeerRole.CACHE_POOL),
        bound_bytes=1 << 20,
        stale_s=5.0,
        now=lambda: now[0],
    )
    followed = caches.shards.follow(POOL)
    counted = Counted(caches)

    def seen() -> tuple[str, float | None]:
        states = {state: counted.value("prfaas_router_pool_shards", region=FAR, state=state) for state in STATES}
        (state,) = [state for state, shards in states.items() if shards]
        (told,) = described_caches(caches)["shards"]
        age_s = counted.value("prfaas_router_pool_index_age_seconds", region=FAR)
        assert told["state"] == state
        assert (told["age_seconds"] if told["age_seconds"] is not None else math.inf) == age_s
        return state, told["age_seconds"]

    assert seen() == ("stale", None)
    for kind in (SnapshotBegin(Namespace("ns")), SnapshotEnd(0), Heartbeat()):
        assert followed.feed.apply(Update(Incarnation(1), 0, kind), now[0]) is None
    followed.heard_at = now[0]
    now[0] += 2.0
    assert seen() == ("current", 2.0)
    now[0] += 3.0
    assert seen() == ("held", 5.0)
