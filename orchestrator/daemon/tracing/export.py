"""Sends spans and metrics by OTLP over HTTP, in threads of its own. A receiver that is down costs them, and no more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from orchestrator.config.tracing import TracingSection
from orchestrator.daemon.tracing.port import ExportCounts
from orchestrator.telemetry import get_logger

MOST_WAITING = 8192
"""Spans that may wait for their export; more are dropped. ADR 0071."""
_BATCH = 512  # the SDK's own default
# ADR 0071. Not tuned.
_SPANS_EVERY_MS, _METRICS_EVERY_MS = 1000.0, 15_000.0
# ADR 0071: a receiver that is down costs its spans. Not tuned.
_TIMEOUT_S = 3.0

_log = get_logger(__name__)


class Receiver:
    """Whether the receiver answers: told once when it stops to, and once when it does again. Thread-safe."""

    def __init__(self, endpoint: str) -> None:
        self.closing = False
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def gives_up(self, kind: str) -> bool:
        """Whether to try no more: the daemon ends, and the receiver did not answer before."""
        return self.closing and kind in self._failing

    def observe_export(self, kind: str, *, sent: bool) -> None:
        """Take in how sending spans or metrics went."""
        with self._lock:
            known = kind in self._failing
            if sent:
                self._failing.discard(kind)
            else:
                self._failing.add(kind)
        if sent and known:
            _log.info("the receiver of OpenTelemetry takes data again", kind=kind, endpoint=self._endpoint)
        if not sent and not known:
            text = "the receiver of OpenTelemetry takes nothing; what it misses is dropped and counted"
            _log.warning(text, kind=kind, endpoint=self._endpoint)


class CountedSpanExporter(SpanExporter):
    """Sends spans, and counts them."""

    def __init__(self, inner: SpanExporter, receiver: Receiver) -> None:
        self._inner = inner
        self._receiver = receiver
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Called by one thread at a time."""
        result = SpanExportResult.FAILURE
        if not self._receiver.gives_up("spans"):
            result = self._inner.export(spans)
            self._receiver.observe_export("spans", sent=result is SpanExportResult.SUCCESS)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """End."""
        self._inner.shutdown()


class BoundedSpanProcessor(SpanProcessor):
    """Lets so many spans wait for their export, and counts those that find no room."""

    def __init__(self, exporter: CountedSpanExporter, most_waiting: int = MOST_WAITING) -> None:
        self.dropped = 0
        self._taken = 0
        self._most_waiting = most_waiting
        self._exporter = exporter
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=most_waiting,
            schedule_delay_millis=_SPANS_EVERY_MS,
            max_export_batch_size=min(_BATCH, most_waiting),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended. Called by the event loop alone."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._taken - self._exporter.exported - self._exporter.failed >= self._most_waiting:
            self.dropped += 1
            return
        self._taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what waits, and end."""
        stop: Callable[[], None] = self._batches.shutdown  # it has no types
        stop()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits."""
        return self._batches.force_flush(timeout_millis)


class WatchedMetricExporter(OTLPMetricExporter):
    """Sends metrics, and says once when that fails."""

    def __init__(self, endpoint: str, headers: dict[str, str], receiver: Receiver) -> None:
        super().__init__(endpoint=f"{endpoint}/v1/metrics", headers=headers, timeout=_TIMEOUT_S)
        self._receiver = receiver

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        """Send metrics."""
        if self._receiver.gives_up("metrics"):
            return MetricExportResult.FAILURE
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self._receiver.observe_export("metrics", sent=result is MetricExportResult.SUCCESS)
        return result


class Exporting:
    """What spans and metrics go through. It is nobody's global provider: libraries that look for one send nothing.
    `headers`: those that the receiver asks for, which are secret."""

    def __init__(self, section: TracingSection, headers: dict[str, str]) -> None:
        for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # each failed batch is an error there; see Receiver
        endpoint, ours = section.endpoint, version("outrider")
        self._receiver = Receiver(endpoint)
        resource = Resource.create({SERVICE_NAME: section.service_name, SERVICE_VERSION: ours})
        sender = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", headers=headers, timeout=_TIMEOUT_S)
        self._exporter = CountedSpanExporter(sender, self._receiver)
        self._processor = BoundedSpanProcessor(self._exporter)
        sampler = ParentBased(TraceIdRatioBased(section.sample_requests))
        self._spans = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._spans.add_span_processor(self._processor)
        self.tracer = self._spans.get_tracer("outrider", ours)
        readers: list[MetricReader] = []
        if section.metrics:
            exporter = WatchedMetricExporter(endpoint, headers, self._receiver)
            readers.append(PeriodicExportingMetricReader(exporter, export_interval_millis=_METRICS_EVERY_MS))
        self._metrics = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.meter = self._metrics.get_meter("outrider", ours)

    def counts(self) -> ExportCounts:
        """Return what became of spans so far."""
        return ExportCounts(self._exporter.exported, self._exporter.failed, self._processor.dropped)

    def begin_close(self) -> threading.Event:
        """Send what waits, in a thread that the end of the process does not wait for; the event is set behind that."""
        self._receiver.closing = True
        closed = threading.Event()

        def close() -> None:
            self._spans.shutdown()
            self._metrics.shutdown()
            closed.set()

        threading.Thread(target=close, name="close tracing", daemon=True).start()
        return closed
