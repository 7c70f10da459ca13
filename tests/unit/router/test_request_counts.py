"""What is counted of requests that have ended."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.flows.ports import PrefillReport
from prfaas.flows.story import Migration, Moved
from prfaas.observe import names
from prfaas.observe.metrics import Metrics
from prfaas.request import TTFT_TERMS, Path, TtftAccount
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
        (503, "Stopping", "overloaded"),
        (503, "PeerUnavailable", "failed"),
        (504, "DeadlineExceeded", "failed"),
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


def test_what_decode_computed_itself_is_counted_by_path():
    """So that KV that is lost on its way between regions shows, however much is decoded where it was prefilled."""
    counted, served = Counted(), record(request([1] * 64))
    served.stories[0].recomputed_tokens = 7
    counted.counts.count(served)
    assert counted.value("recomputed_tokens_total", path="remote") == 7
    assert counted.value("recomputed_tokens_total", path="local") == 0


def test_tenants_without_end_are_others():
    counted = Counted()
    for number in range(names.MAX_OPEN_VALUES + 10):
        counted.counts.count(RequestLog(route="chat", status=200, tenant=f"t{number}", output_tokens=1))
    assert counted.value("tenant_tokens_total", kind="output") == names.MAX_OPEN_VALUES + 10
    assert counted.value("tenant_tokens_total", tenant="other", kind="output") >= 10


REPLAY = PrefillReport(queue_s=0.0, compute_s=0.1, exposed_s=0.0, prefill_tokens=30, kv_bytes=700, cached_tokens=35)


def test_streams_that_lost_their_node_are_counted_by_what_became_of_them():
    """Those that went on have a gap, and what the next node had to compute again; the prompt is counted once."""
    counted, served = Counted(), record(request([1] * 64))
    assert counted.value("kv_transfer_bytes_total", path="local") == 0
    for outcome in Moved:
        assert counted.value("migrations_total", outcome=outcome.value) == 0
    story = served.stories[0]
    story.migrations = [
        Migration(2, 10.0, Moved.MOVED, gap_s=0.5, path=Path.LOCAL, prefill=REPLAY),
        Migration(5, 12.0, Moved.EXHAUSTED),
    ]
    counted.counts.count(served)
    assert (
        counted.value("migrations_total", outcome="moved")
        == counted.value("migrations_total", outcome="exhausted")
        == 1
    )
    assert counted.value("migrations_total") == 2
    assert (counted.value("migration_gap_seconds_count"), counted.value("migration_gap_seconds_sum")) == (1, 0.5)
    assert counted.value("replayed_tokens_total", kind="computed") == 30
    assert counted.value("replayed_tokens_total", kind="cached") == 35
    assert counted.value("kv_transfer_bytes_total", path="local") == 700
    assert counted.value("prompt_tokens_total") == 64
