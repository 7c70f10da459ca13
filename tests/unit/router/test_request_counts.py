"""What is counted of requests that have ended."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.observe import names
from prfaas.observe.metrics import Metrics
from prfaas.request import TTFT_TERMS, TtftAccount
from services.router.openai.record import RequestLog
from services.router.request_counts import RequestCounts
from tests.unit.router.test_request_log import record, request


class Counted:
    def __init__(self) -> None:
        self._metrics = Metrics(names.ROUTER, {"model": ["m"], "tenant": [""]})
        self.counts = RequestCounts(self._metrics)

    def value(self, name: str, **labels: str) -> float:
        """Of all series with these labels, which are there before anything is counted."""
        families = text_string_to_metric_families(self._metrics.exposition().decode())
        samples = [each for family in families for each in family.samples if each.name == f"prfaas_router_{name}"]
        found = [each.value for each in samples if labels.items() <= each.labels.items()]
        assert found, name
        return sum(found)


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, "ok"),
        (499, None, "disconnected"),
        (400, "InvalidRequest", "invalid"),
        (429, "Overloaded", "overloaded"),
        (503, "Overloaded", "overloaded"),
        (500, "EngineFailed", "failed"),
        (200, "PeerUnavailable", "failed"),
    ],
)
def test_each_request_has_one_outcome(status: int, error: str | None, outcome: str):
    """As its client saw it; one that left is none of the others, and a stream that broke is no success."""
    counted = Counted()
    assert counted.value("requests_total", model="m", path="none", outcome=outcome) == 0
    counted.counts.count(RequestLog(route="chat", status=status, error=error, model="m"))
    assert counted.value("requests_total", model="m", path="none", outcome=outcome) == 1
    assert counted.value("requests_total") == 1


def test_where_the_time_to_the_first_token_went_is_counted_term_by_term():
    """By path, with what no term covers, whichever way it is off; all series are there from the start."""
    counted, served = Counted(), record(request([1] * 64))
    for term in TTFT_TERMS:
        for path in ("local", "remote"):
            assert counted.value("ttft_term_seconds_count", term=term, path=path) == 0
    served.account = TtftAccount({term: float(place) for place, term in enumerate(TTFT_TERMS)}, 35.5)
    counted.counts.count(served)
    for place, term in enumerate(TTFT_TERMS):
        assert counted.value("ttft_term_seconds_sum", term=term, path="remote") == place
        assert counted.value("ttft_term_seconds_count", term=term, path="remote") == 1
        assert counted.value("ttft_term_seconds_count", term=term, path="local") == 0
    assert counted.value("ttft_unaccounted_seconds_sum", path="remote") == 0.5
    assert counted.value("ttft_seconds_sum", path="remote") == 35.5


def test_every_sequence_of_a_request_counts():
    """Each has routes and attempts of its own, and takes of the cache; the request is one."""
    counted = Counted()
    counted.counts.count(record(request([1] * 64), request([2] * 64)))
    assert counted.value("requests_total") == counted.value("request_duration_seconds_count") == 1
    assert counted.value("routes_total", path="remote", reason="long_prompt") == 2
    assert counted.value("attempts_total", ending="done") == counted.value("uncached_tokens_count") == 2
    assert counted.value("cached_tokens_total") == 2 * 128
    assert (counted.value("prompt_tokens_total"), counted.value("output_tokens_total")) == (128, 6)
    assert counted.value("tenant_tokens_total", tenant="acme", kind="prompt") == 128


def test_tenants_without_end_are_others():
    counted = Counted()
    for number in range(names.MAX_OPEN_VALUES + 10):
        counted.counts.count(RequestLog(route="chat", status=200, tenant=f"t{number}", output_tokens=1))
    assert counted.value("tenant_tokens_total", kind="output") == names.MAX_OPEN_VALUES + 10
    assert counted.value("tenant_tokens_total", tenant="other", kind="output") >= 10
