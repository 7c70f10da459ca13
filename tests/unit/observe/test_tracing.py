"""Spans, as a collector gets them."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from structlog.testing import capture_logs

from prfaas.errors import ConfigError
from prfaas.observe.span_exporter import exporter
from prfaas.observe.tracing import FLUSH_S, NO_TRACING, Tracing, open_tracing, trace_id_of, valid_traceparent
from tests.otlp_collector import Collector, collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
NONSENSE = (
    "",
    "nonsense",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-0",
    f"01-{TRACE}-{PARENT}-01-{'x' * 1000}",
)


@pytest.fixture
def collected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector(getattr(request, "param", "http/protobuf")) as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found


def open_here() -> Tracing:
    tracing = open_tracing("prfaas-test", "node-1")
    assert tracing.on
    return tracing


@pytest.mark.parametrize("given", NONSENSE)
def test_what_is_no_traceparent(given: str):
    """Malformed ones, ids of zeros, the version that is forbidden, and more than version 00 has."""
    assert not valid_traceparent(given)


def test_what_is_a_traceparent():
    """A later version may say more."""
    assert valid_traceparent(SAMPLED) and valid_traceparent(UNSAMPLED)
    assert valid_traceparent(f"01-{TRACE}-{PARENT}-01-more")
    assert trace_id_of(SAMPLED) == TRACE


def test_without_a_collector_nothing_of_opentelemetry_is_even_imported():
    """A process that is not traced pays neither memory nor time."""
    program = (
        "import sys\n"
        "from prfaas.observe.tracing import NO_TRACING, open_tracing\n"
        "assert open_tracing('a', 'b') is NO_TRACING\n"
        "with NO_TRACING.span('x', 'parent', {}) as span:\n"
        "    span.note({'a': 1})\n"
        "    assert span.traceparent == 'parent'\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": ""}, timeout=60)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
)
def test_tracing_can_be_switched_off_as_everywhere(collected: Collector, monkeypatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    assert open_tracing("prfaas-test", "node-1") is NO_TRACING


def test_a_protocol_that_is_not_served_is_refused(collected: Collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        open_tracing("prfaas-test", "node-1")


@pytest.mark.parametrize("collected", ["http/protobuf", "grpc"], indirect=True)
async def test_spans_arrive_with_their_parents(collected: Collector):
    """A trace goes on where the caller began it; a span that began before it was made has that time; what went wrong
    with the work is noted and raised."""
    tracing = open_here()
    outer = tracing.begin("outer", SAMPLED, {"a": 1}, server=True, ago_s=5.0)
    assert outer is not None and outer.recorded and trace_id_of(outer.traceparent) == TRACE
    with tracing.span("inner", outer.traceparent, {}) as inner:
        inner.note({"b": ["x", "y"]})
    with pytest.raises(ValueError, match="no"), tracing.span("broken", outer.traceparent, {}):
        raise ValueError("no")
    outer.end()
    await tracing.close()
    seen = {span.name: span for span in collected.wait_for(lambda spans: len(spans) >= 3)}
    assert {span.trace_id for span in seen.values()} == {TRACE}
    assert seen["outer"].parent_id == PARENT
    assert seen["inner"].parent_id == seen["broken"].parent_id == seen["outer"].span_id
    assert (seen["outer"].facts, seen["inner"].facts) == ({"a": 1}, {"b": ["x", "y"]})
    assert seen["outer"].end_ns - seen["outer"].start_ns >= 5e9
    assert (seen["broken"].status, seen["broken"].facts["error.type"]) == (2, "ValueError")
    about = seen["outer"].resource
    assert (about["service.name"], about["service.instance.id"]) == ("prfaas-test", "node-1")


async def test_the_service_has_the_name_that_the_operator_gave_it(collected: Collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = open_here()
    with tracing.span("one", "", {}):
        pass
    await tracing.close()
    [span] = collected.wait_for(bool)
    assert span.resource["service.name"] == "mine"


@pytest.mark.parametrize("given", NONSENSE)
async def test_nonsense_begins_a_trace_of_its_own(collected: Collector, given: str):
    tracing = open_here()
    span = tracing.begin("one", given, {})
    assert span is not None and valid_traceparent(span.traceparent) and trace_id_of(span.traceparent) != TRACE
    span.end()
    await tracing.close()
    [seen] = collected.wait_for(bool)
    assert (seen.parent_id, seen.trace_id) == ("", trace_id_of(span.traceparent))


async def test_a_trace_that_is_not_sampled_stays_so(collected: Collector):
    """The decision was the caller's; it is passed on, and nothing is sent."""
    tracing = open_here()
    span = tracing.begin("one", UNSAMPLED, {})
    assert span is not None and not span.recorded
    assert span.traceparent.startswith(f"00-{TRACE}-") and span.traceparent.endswith("-00")
    span.end()
    await tracing.close()
    assert collected.spans == []


async def test_a_collector_that_does_not_answer_holds_no_end_up(monkeypatch):
    """It takes connections and says nothing; the process has somewhere to be."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing = open_here()
        with tracing.span("one", "", {}):
            pass
        begun_s = time.monotonic()
        async with asyncio.timeout(FLUSH_S + 5):
            await tracing.close()
        assert time.monotonic() - begun_s >= FLUSH_S * 0.9


async def test_a_collector_that_is_away_is_told_of_once(monkeypatch, caplog):
    """And once more when it is back, however many batches were lost in between."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with capture_logs() as lines:
        spans = exporter()
        results = [await asyncio.to_thread(spans.export, ()) for _ in range(4)]
        assert SpanExportResult.SUCCESS not in results
        with collector(port=port):
            assert await asyncio.to_thread(spans.export, ()) is SpanExportResult.SUCCESS
            assert await asyncio.to_thread(spans.export, ()) is SpanExportResult.SUCCESS
        spans.shutdown()
    assert [line["event"].split(":")[0] for line in lines] == [
        "the trace collector takes no spans",
        "the trace collector takes spans again",
    ]
    assert not caplog.records, "nor does OpenTelemetry tell of each"
