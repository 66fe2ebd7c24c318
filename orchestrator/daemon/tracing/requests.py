"""Makes the spans of requests from what the API sees of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer

from device_profiles.units import MS_PER_S, NS_PER_S
from orchestrator.clock import Clock
from orchestrator.daemon.tracing import names
from orchestrator.daemon.tracing.context import Attributes, enter, link_to, read_headers, write_trace
from orchestrator.daemon.tracing.port import RequestResult, TracedRequest
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, RequestStats


class RequestHistograms:
    """The metrics of the conventions."""

    def __init__(self, meter: Meter) -> None:
        self._histograms = {
            name: meter.create_histogram(name, "s", meaning, explicit_bucket_boundaries_advisory=list(bounds_s))
            for name, meaning, bounds_s in names.METRICS
        }

    def observe_request(self, about: Mapping[str, str], duration_s: float, result: RequestResult | None) -> None:
        """A request has ended. One that failed counts with its duration alone."""
        figures: dict[str, float | None] = {names.REQUEST_DURATION: duration_s}
        if result is not None and names.ERROR_TYPE not in about:
            figures |= {names.TIME_TO_FIRST_TOKEN: result.ttft_s, names.TIME_PER_OUTPUT_TOKEN: result.tpot_s}
        for name, value in figures.items():
            if value is not None:
                self._histograms[name].record(value, dict(about))


@dataclass(slots=True)
class SequenceTimes:
    """One choice, with the replica that has it. Times are seconds of the clock. `lost`: the span before it was lost."""

    stream: str
    engine: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    stats: RequestStats | None = None
    lost: SpanContext | None = None


class RequestSpans:
    """Implements tracing.port.RequestTrace. `forget` is called at its end."""

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        histograms: RequestHistograms,
        operation: str,
        headers: Mapping[str, str],
        *,
        round_share: float,
        forget: Callable[[str], None],
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._histograms = histograms
        self._forget = forget
        self._started_s = clock.monotonic_s()
        self._epoch_s = clock.wall_s() - self._started_s
        self._about: dict[str, str] = {names.OPERATION: operation, names.PROVIDER_NAME: names.PROVIDER}
        self._span: Span = tracer.start_span(
            operation,
            read_headers(headers),
            SpanKind.SERVER,
            attributes=dict(self._about),
            start_time=self._ns(self._started_s),
        )
        self._trace = write_trace(self._span, round_share)
        self._sampled = self._span.is_recording()
        self._sequences: dict[str, SequenceTimes] = {}
        self._over = False

    @property
    def traceparent(self) -> str:
        return self._trace.parent

    def mark(self, submit: Submit) -> Submit:
        return msgspec.structs.replace(submit, trace=self._trace) if self._sampled else submit

    def describe_request(self, request: TracedRequest) -> None:
        submit, model = request.submit, request.model
        self._about |= {names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model}
        if not self._sampled:
            return
        self._span.update_name(f"{self._about[names.OPERATION]} {model}")
        self._span.set_attributes(
            {
                **self._about,
                names.RESPONSE_ID: submit.request_id if request.kept is None else request.kept.request_id,
                names.REQUEST_MAX_TOKENS: submit.max_tokens,
                names.REQUEST_TEMPERATURE: submit.sampling.temperature,
                names.REQUEST_TOP_P: submit.sampling.top_p,
                names.REQUEST_STREAM: request.stream,
            }
        )
        if request.choices > 1:
            self._span.set_attribute(names.REQUEST_CHOICES, request.choices)
        if request.kept is not None:
            self._span.set_attribute(names.RESUMED, True)
            if request.kept.trace is not None:
                for link in link_to(request.kept.trace):
                    self._span.add_link(link.context)

    def observe_delta(self, stream: str, delta: Delta, now_s: float) -> None:
        if not self._sampled or not delta.tokens:
            return
        sequence = self._sequences.setdefault(stream, SequenceTimes(stream))
        if sequence.first_s is None:
            sequence.first_s = now_s
            sequence.engine = delta.engine
            if delta.stats is not None and sequence.lost is None:
                self._tell_start(sequence, delta.stats, now_s)
        sequence.last_s = now_s
        sequence.tokens += len(delta.tokens)
        sequence.stats = delta.stats or sequence.stats

    def observe_resumed(self, stream: str, name: str, attributes: Attributes, pause_ms: float) -> None:
        """A choice goes on with another worker, behind a pause that ends now. `name`: of the span."""
        now_s = self._clock.monotonic_s()
        known = self._sequences.get(stream)
        lost = self._tell_decode(known) if known is not None else None
        self._tell(name, now_s - pause_ms / MS_PER_S, now_s, attributes, lost)
        if known is not None:
            self._sequences[stream] = SequenceTimes(stream, lost=lost)

    def end(self, status: int, error: str | None = None, result: RequestResult | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._forget(self._trace.parent)
        if status >= HTTPStatus.BAD_REQUEST:
            self._about[names.ERROR_TYPE] = error or str(int(status))
        now_s = self._clock.monotonic_s()
        self._histograms.observe_request(self._about, now_s - self._started_s, result)
        if not self._sampled:
            return
        for sequence in self._sequences.values():
            self._tell_decode(sequence)
        self._span.set_attribute(names.STATUS_CODE, int(status))
        if status >= HTTPStatus.BAD_REQUEST:
            self._span.set_attribute(names.ERROR_TYPE, self._about[names.ERROR_TYPE])
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._span.set_status(Status(StatusCode.ERROR))
        if result is not None:
            self._tell_result(result)
        self._span.end(self._ns(now_s))

    def _tell_result(self, result: RequestResult) -> None:
        self._span.set_attributes(
            {
                names.INPUT_TOKENS: result.input_tokens,
                names.CACHED_TOKENS: result.cached_tokens,
                names.OUTPUT_TOKENS: result.output_tokens,
                names.DRAFTED: result.drafted,
                names.ACCEPTED: result.accepted,
                names.RESPONSE_FINISH: result.finish_reasons,
            }
        )
        if result.ttft_s is not None:
            self._span.set_attribute(names.RESPONSE_FIRST_CHUNK, result.ttft_s)

    def _tell_start(self, sequence: SequenceTimes, stats: RequestStats, now_s: float) -> None:
        """Tell of a sequence's way to its first token, which came now."""
        about: Attributes = {names.STREAM: sequence.stream, names.ENGINE: sequence.engine}
        begun_s = max(self._started_s, now_s - stats.prefill_ms / MS_PER_S)
        queued_s = max(self._started_s, begun_s - stats.queue_ms / MS_PER_S)
        self._tell(names.QUEUE, queued_s, begun_s, about)
        self._tell(names.PREFILL, begun_s, now_s, about)

    def _tell_decode(self, sequence: SequenceTimes) -> SpanContext | None:
        """Tell of what one replica decoded of a sequence; None where that was nothing."""
        if sequence.first_s is None:
            return sequence.lost
        about: Attributes = {
            names.STREAM: sequence.stream,
            names.ENGINE: sequence.engine,
            names.COMMITTED: sequence.tokens,
        }
        if sequence.stats is not None:
            about |= {names.DRAFTED: sequence.stats.drafted, names.ACCEPTED: sequence.stats.accepted}
        return self._tell(names.DECODE, sequence.first_s, sequence.last_s, about)

    def _tell(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        linked: SpanContext | None = None,
    ) -> SpanContext:
        span = self._tracer.start_span(
            name,
            enter(self._span),
            attributes=attributes,
            links=[Link(linked)] if linked is not None else [],
            start_time=self._ns(start_s),
        )
        span.end(self._ns(end_s))
        return span.get_span_context()

    def _ns(self, time_s: float) -> int:
        return int((time_s + self._epoch_s) * NS_PER_S)
