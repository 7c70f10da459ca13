"""How spans leave the process: by the protocol that the environment names, and without a word for each batch.

A collector that is away is told of once, and once more when it is back: spans are worth less than a log that can be
read. What OpenTelemetry says of single batches is said when debugging. Imported with OpenTelemetry alone.
"""

import logging
import os
from collections.abc import Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from prfaas.errors import ConfigError

#: Who tells of each batch that the collector does not take.
WORDY = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.exporter.otlp.proto.grpc.exporter")

log = structlog.get_logger()


def exporter() -> SpanExporter:
    """Raises ConfigError."""
    for name in WORDY:
        logging.getLogger(name).addFilter(_when_debugging)
    return ToldOnce(_by_protocol())


class ToldOnce(SpanExporter):
    """An exporter whose outages are told of when they begin and when they end. One thread exports."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self._away = exporter, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            log.warning("the trace collector takes no spans: they are dropped until it does")
        elif self._away and not away:
            log.info("the trace collector takes spans again")
        self._away = away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _by_protocol() -> SpanExporter:
    chosen = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    match chosen or "http/protobuf":
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

            return http.OTLPSpanExporter()
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            return grpc.OTLPSpanExporter()
        case other:
            raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL", f"{other!r} is neither http/protobuf nor grpc")


def _when_debugging(record: logging.LogRecord) -> bool:
    return logging.root.isEnabledFor(logging.DEBUG)
