"""The router's span of a completion, as a collector gets it."""

from collections.abc import Iterator

import pytest

from prfaas.observe.tracing import open_tracing
from prfaas.request import TTFT_TERMS
from services.router.http.messages import HttpRequest
from services.router.openai import spans
from services.router.openai.record import RequestLog
from tests.otlp_collector import Collector, Seen, collector
from tests.unit.router.test_request_log import record, request

SERVER, ERROR = 2, 2
HTTP = HttpRequest(method="POST", path="/v1/chat/completions", headers={}, received_s=10.0)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found


async def sent(collected: Collector, *records: RequestLog) -> list[Seen]:
    tracing = open_tracing("prfaas-router", "r")
    for each in records:
        spans.begin(tracing, HTTP, each, now_s=10.5)
        assert each.span is not None and each.traceparent == each.span.traceparent
        spans.end(each)
    await tracing.close()
    return collected.wait_for(lambda seen: len(seen) == len(records))


async def test_a_completion_has_a_span_in_the_words_of_the_conventions(collected: Collector):
    """What was asked and what came of it, with the account; no token of it."""
    served = record(request([70_123] * 200), request([1] * 64))
    served.stream, served.traceparent = True, f"00-{'a' * 32}-{'b' * 16}-01"
    [span] = await sent(collected, served)
    assert (span.name, span.kind, span.status, span.trace_id, span.parent_id) == (
        "chat m",
        SERVER,
        0,
        "a" * 32,
        "b" * 16,
    )
    assert span.end_ns - span.start_ns >= 0.5e9
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "prfaas",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 264,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 128,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "prfaas.tenant": "acme",
        "prfaas.path": "remote",
        "prfaas.attempts": 1,
        **{f"prfaas.ttft.{term}_seconds": 0.1 for term in TTFT_TERMS},
    }.items() <= span.facts.items()
    assert "70123" not in str(span)


async def test_whose_fault_it_was_shows_in_the_status(collected: Collector):
    """Of a server's span what the client did wrong is no error; ours is, also in the middle of a stream."""
    found = await sent(
        collected,
        RequestLog(route="chat", status=400, error="InvalidRequest"),
        RequestLog(route="chat", status=499),
        RequestLog(route="chat", status=503, error="Overloaded"),
        RequestLog(route="completions", status=200, error="PeerUnavailable"),
    )
    assert [(span.facts["http.response.status_code"], span.status, span.facts.get("error.type")) for span in found] == [
        (400, 0, "InvalidRequest"),
        (499, 0, None),
        (503, ERROR, "Overloaded"),
        (200, ERROR, "PeerUnavailable"),
    ]
