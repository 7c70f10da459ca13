"""A collector of spans for tests: OTLP over HTTP or gRPC on the loopback address."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

LIVENESS_S = 30.0


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    facts: dict[str, Any]
    resource: dict[str, Any]
    start_ns: int
    end_ns: int
    #: Of its status: 0 unset, 1 ok, 2 error.
    status: int
    kind: int


@dataclass
class Collector:
    endpoint: str = ""
    protocol: str = ""
    spans: list[Seen] = field(default_factory=list)
    _change: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        with self._change:
            for resource in request.resource_spans:
                about = _facts(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans.extend(_seen(span, about) for span in scope.spans)
            self._change.notify_all()

    def wait_for(self, enough: Callable[[list[Seen]], bool]) -> list[Seen]:
        """The spans so far, once that is enough."""
        until_s = time.monotonic() + LIVENESS_S
        with self._change:
            while not enough(self.spans):
                assert self._change.wait(until_s - time.monotonic()), [span.name for span in self.spans]
            return [*self.spans]

    def environment(self) -> dict[str, str]:
        """What makes a process send its spans here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }


@contextmanager
def collector(protocol: str = "http/protobuf", port: int = 0) -> Iterator[Collector]:
    found = Collector(protocol=protocol)
    with (_http if protocol == "http/protobuf" else _grpc)(found, port):
        yield found


@contextmanager
def _http(found: Collector, port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            found.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _grpc(found: Collector, port: int) -> Iterator[None]:
    class Servicer(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            found.take(request)
            return pb.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Servicer(), server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        facts=_facts(span.attributes),
        resource=resource,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.code,
        kind=span.kind,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
