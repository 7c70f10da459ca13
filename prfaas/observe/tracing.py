"""Spans of a process, for a collector that speaks OTLP.

Off unless the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`);
then nothing of OpenTelemetry is even imported, and a span costs a method call. What else OpenTelemetry's own variables
set (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*` ...) its SDK reads. Spans are made per request and per
command, never per token; a thread sends them, and at the end there is a limit to how long it may.

Parents are passed by hand, as W3C `traceparent`s: that is what crosses the wire, and one loop serves many requests.
"""

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import context, trace

#: How long the last spans may take to be sent.
FLUSH_S = 2.0

Fact = str | bool | int | float | Sequence[str]
Facts = Mapping[str, Fact]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def valid_traceparent(given: str) -> bool:
    """As W3C has it: of version 00 exactly so long, of a later one at least, none of version ff, and no id of zeros."""
    match = _TRACEPARENT.fullmatch(given) if len(given) <= 512 else None
    if match is None:
        return False
    version, trace_id, span_id, _, more = match.groups()
    return version != "ff" and bool(int(trace_id, 16) and int(span_id, 16)) and (version != "00" or more is None)


def trace_id_of(traceparent: str) -> str:
    return traceparent[3:35]


class Span:
    """One span under way. `traceparent` is what makes others its children."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: "trace.Span") -> None:
        context = span.get_span_context()
        self._span = span
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def recorded(self) -> bool:
        """Whether it is sampled: else what is noted goes nowhere."""
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def note(self, facts: Facts) -> None:
        self._span.set_attributes(facts)

    def fail(self, kind: str, detail: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, detail or None))

    def end(self) -> None:
        self._span.end()


class Off:
    """A span of a process without tracing: what is its parent's is passed on."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def note(self, facts: Facts) -> None:
        pass

    def __enter__(self) -> "Off":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Tracing:
    """Without a `tracer` nothing is traced."""

    def __init__(self, tracer: "trace.Tracer | None" = None, provider: Any = None) -> None:
        self._tracer, self._provider = tracer, provider
        if tracer is not None:
            from opentelemetry import context, trace

            self._trace, self._context = trace, context

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def begin(self, name: str, parent: str, facts: Facts, *, server: bool = False, ago_s: float = 0.0) -> Span | None:
        """A span that began so long ago, and is the caller's to end; None without tracing. `parent` is a traceparent;
        what is none begins a trace of its own."""
        if self._tracer is None:
            return None
        kind = self._trace.SpanKind
        return Span(
            self._tracer.start_span(
                name,
                context=self._under(parent),
                kind=kind.SERVER if server else kind.INTERNAL,
                attributes=facts,
                start_time=time.time_ns() - round(ago_s * 1e9),
            )
        )

    def span(self, name: str, parent: str, facts: Facts) -> AbstractContextManager[Span | Off]:
        """Around some work. What the work raises is noted."""
        return Off(parent) if self._tracer is None else self._around(name, parent, facts)

    @contextmanager
    def _around(self, name: str, parent: str, facts: Facts) -> Iterator[Span]:
        span = self.begin(name, parent, facts)
        assert span is not None
        try:
            yield span
        except asyncio.CancelledError:
            span.fail("cancelled")
            raise
        except BaseException as error:
            span.fail(type(error).__name__, str(error))
            raise
        finally:
            span.end()

    def _under(self, traceparent: str) -> "context.Context":
        trace, none = self._trace, self._context.Context()
        if not valid_traceparent(traceparent):
            return none
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        remote = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
        )
        under: context.Context = trace.set_span_in_context(trace.NonRecordingSpan(remote), none)
        return under

    async def close(self) -> None:
        """Send what is left, if that does not take long."""
        if self._provider is None:
            return
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is gone: it took too long
                loop.call_soon_threadsafe(sent.set)

        # A thread that the interpreter does not wait for: a collector that does not answer must not hold the end up.
        threading.Thread(target=send, name="last spans", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await sent.wait()


NO_TRACING = Tracing()


def open_tracing(service: str, instance: str) -> Tracing:
    """As the environment says. `service` is its name unless the environment has one. Raises ConfigError."""
    if not _wanted():
        return NO_TRACING
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from prfaas.observe.span_exporter import exporter

    own = {"service.instance.id": instance}
    if not (os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")):
        own["service.name"] = service
    try:
        provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter()))
    except ValueError as error:
        raise ConfigError("OTEL_*", str(error)) from error
    return Tracing(provider.get_tracer("prfaas"), provider)


def _wanted() -> bool:
    named = any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return named and not disabled and os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() in ("", "otlp")
