"""A receiver of OTLP over HTTP, as a collector has one: what comes is parsed and kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ARRIVES_WITHIN_S = 240.0


def value_of(value: AnyValue) -> object:
    """A value as Python has it; a list as a tuple."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(value_of(one) for one in value.array_value.values)
    return getattr(value, kind) if kind else None


@dataclass(frozen=True)
class SeenSpan:
    """A span that was received. Ids are hexadecimal, times ns since 1970."""

    span: Span
    service: object

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def trace_id(self) -> str:
        return str(self.span.trace_id.hex())

    @property
    def span_id(self) -> str:
        return str(self.span.span_id.hex())

    @property
    def parent_id(self) -> str:
        return str(self.span.parent_span_id.hex())

    @property
    def links(self) -> list[str]:
        return [link.span_id.hex() for link in self.span.links]

    @property
    def attributes(self) -> dict[str, object]:
        return {one.key: value_of(one.value) for one in self.span.attributes}

    def holds(self, other: SeenSpan) -> bool:
        """Whether the other's time is within this one's."""
        begins, ends = self.span.start_time_unix_nano, self.span.end_time_unix_nano
        return bool(begins <= other.span.start_time_unix_nano <= other.span.end_time_unix_nano <= ends)


@dataclass
class Receiver:
    """What came; the names of headers in small letters. `status`: of the answers from now on."""

    status: int = HTTPStatus.OK
    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.bodies.append(body)
        self.headers.append(headers)
        if path == "/v1/metrics":
            asked = ExportMetricsServiceRequest.FromString(body)
            self.metrics += [
                metric for about in asked.resource_metrics for scope in about.scope_metrics for metric in scope.metrics
            ]
            return
        assert path == "/v1/traces", path
        for about in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {one.key: value_of(one.value) for one in about.resource.attributes}["service.name"]
            self.spans += [SeenSpan(span, service) for scope in about.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> list[SeenSpan]:
        """The spans of a trace, in the order of their beginnings."""
        found = [one for one in self.spans if one.trace_id == trace_id]
        return sorted(found, key=lambda one: one.span.start_time_unix_nano)

    def wait(self, trace_id: str, complete: Callable[[list[SeenSpan]], bool] | None = None) -> list[SeenSpan]:
        """Wait until a trace is complete: by default, until its request span is there, which ends last."""
        done = complete or (lambda found: any(one.span.kind == Span.SPAN_KIND_SERVER for one in found))
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while not done(found := self.of(trace_id)):
            assert time.monotonic() < deadline, [one.name for one in found]
            time.sleep(0.02)
        return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on a free port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.status == HTTPStatus.OK:
                receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
