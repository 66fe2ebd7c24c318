"""Tracing of a daemon: what its parts are given, and what they tell it."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event

from opentelemetry.trace import Tracer

from device_profiles.units import MS_PER_S, NS_PER_S
from orchestrator.clock import Clock
from orchestrator.config.tracing import TracingSection
from orchestrator.daemon.tracing import names
from orchestrator.daemon.tracing.context import Attributes, read_trace
from orchestrator.daemon.tracing.export import Exporting
from orchestrator.daemon.tracing.port import ExportCounts
from orchestrator.daemon.tracing.requests import RequestHistograms, RequestSpans
from orchestrator.daemon.tracing.rounds import RoundSpans
from orchestrator.protocol.rounds import RoundReport
from orchestrator.protocol.trace_messages import ResumedStream


class DaemonTracing:
    """Implements tracing.port.TracedDaemon. `headers`: those that the receiver asks for."""

    def __init__(self, section: TracingSection, headers: dict[str, str], clock: Clock) -> None:
        self._clock = clock
        self._round_share = section.sample_rounds
        self._exporting = Exporting(section, headers)
        self._tracer: Tracer = self._exporting.tracer
        self._histograms = RequestHistograms(self._exporting.meter)
        self._rounds: dict[str, RoundSpans] = {}
        self._live: dict[str, RequestSpans] = {}  # by their traceparent

    def begin(self, operation: str, headers: Mapping[str, str]) -> RequestSpans:
        request = RequestSpans(
            *(self._tracer, self._clock, self._histograms, operation, headers),
            round_share=self._round_share,
            forget=self._forget,
        )
        self._live[request.traceparent] = request
        return request

    def _forget(self, parent: str) -> None:
        self._live.pop(parent, None)

    def observe_round(self, model: str, done: RoundReport) -> None:
        if done.trace is not None:
            self._rounds.setdefault(model, RoundSpans(self._tracer, self._clock)).observe_round(done)

    def observe_resumed(self, resumed: ResumedStream) -> None:
        name = names.MOVE if resumed.why == "moved" else names.FAILOVER
        about: Attributes = {
            names.STREAM: resumed.stream,
            names.REASON: resumed.why,
            names.FROM_REPLICA: resumed.left,
            names.TO_REPLICA: resumed.at,
            names.ATTEMPT: resumed.attempt,
            names.PAUSE_MS: resumed.pause_ms,
        }
        live = self._live.get(resumed.trace.parent)
        if live is not None:
            live.observe_resumed(resumed.stream, name, about, resumed.pause_ms)
            return
        now_s = self._clock.wall_s()  # its client is away: nobody counts its tokens
        start_ns = int((now_s - resumed.pause_ms / MS_PER_S) * NS_PER_S)
        span = self._tracer.start_span(name, read_trace(resumed.trace), attributes=about, start_time=start_ns)
        span.end(int(now_s * NS_PER_S))

    def counts(self) -> ExportCounts:
        return self._exporting.counts()

    def begin_close(self) -> Event:
        return self._exporting.begin_close()
