"""What the router shows of admission, by tenant."""

from prometheus_client.parser import text_string_to_metric_families

from prfaas.cluster import ClusterView, RegionId
from prfaas.live.link_stream import LinkCounters
from prfaas.live.steering import Steering
from prfaas.observe.names import MAX_OPEN_VALUES, OTHER
from prfaas.scheduling.admission import Admission, AdmissionParams, Ask
from prfaas.scheduling.allowance import UNLIMITED
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from services.router.metrics import RouterMetrics
from services.router.openai.record import RequestLog

Labels = frozenset[tuple[str, str]]


def shown(metrics: RouterMetrics) -> dict[tuple[str, Labels], float]:
    steering = Steering(RegionId("near"), RoutingParams(100), 0.0, DemandParams())
    text = metrics.exposition(ClusterView(), 0, steering, ready=True).decode()
    return {
        (sample.name.removeprefix("prfaas_router_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**values: str) -> Labels:
    return frozenset(values.items())


def router_metrics(machine: Admission) -> RouterMetrics:
    return RouterMetrics(["m"], lambda: 0.0, lambda: False, LinkCounters(), machine)


def test_who_waits_and_who_runs_is_seen():
    machine = Admission(AdmissionParams(max_running=1))
    metrics = router_metrics(machine)
    for tokens in (10, 20, 30):
        machine.arrive(Ask(tenant="t", quota=UNLIMITED, tokens=tokens), 0.0)
        machine.moves(0.0)
    seen = shown(metrics)
    names = ("admission_queued_requests", "admission_queued_tokens", "admission_running_tokens")
    assert [seen[name, labels()] for name in names] == [2, 50, 10]


def test_tenants_are_told_apart_until_they_are_too_many():
    """Refusals of nobody in particular are there from the start, at 0."""
    metrics = router_metrics(Admission(AdmissionParams(max_running=1)))
    assert shown(metrics)["admission_refused_total", labels(tenant="", reason="key")] == 0
    for number in range(MAX_OPEN_VALUES + 10):
        metrics.refused(f"t{number}", "tokens")
        metrics.admitted(f"t{number}", 0.1)
    seen = shown(metrics)
    assert seen["admission_refused_total", labels(tenant="t3", reason="tokens")] == 1
    assert seen["admission_refused_total", labels(tenant=OTHER, reason="tokens")] == 11
    assert seen["admission_admitted_total", labels(tenant=OTHER)] == 11
    assert seen["admission_wait_seconds_count", labels()] == MAX_OPEN_VALUES + 10


def test_tokens_are_counted_by_tenant():
    metrics = router_metrics(Admission(AdmissionParams(max_running=1)))
    metrics.request_ended(RequestLog(route="chat", status=200, tenant="acme", model="m", output_tokens=5))
    assert shown(metrics)["tenant_tokens_total", labels(tenant="acme", kind="output")] == 5
