"""Starts and ends tracing, where it is wanted; only then is OpenTelemetry's SDK imported."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.tracing import TracingSection, headers_path, read_headers_file
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.tracing.port import TracedDaemon
from orchestrator.errors import DaemonError
from orchestrator.protocol.rounds import RoundReport
from orchestrator.protocol.trace_messages import ResumedStream
from orchestrator.telemetry import get_logger

INSTALL = "outrider extras install otel"
LIBRARY = "opentelemetry.exporter.otlp.proto.http"
# Two exports of 3 s each and some; a receiver that is down costs spans alone (ADR 0071).
_CLOSE_WITHIN_S = 8.0

_log = get_logger(__name__)


def open_tracing(section: TracingSection, base: Path, clock: Clock) -> TracedDaemon | None:
    """Return what makes spans; None where none are wanted. `base`: the configuration file's directory. Raises
    DaemonError where the SDK is not installed, and ConfigError for headers that cannot be read."""
    if not section.endpoint:
        return None
    try:
        from orchestrator.daemon.tracing.daemon_tracing import DaemonTracing
    except ModuleNotFoundError as error:
        text = f"tracing.endpoint is set, and {error.name} is not installed: {INSTALL}, or leave tracing out"
        raise DaemonError(text) from None
    headers = headers_path(section, base)
    _log.info("tracing", endpoint=section.endpoint, requests=section.sample_requests, rounds=section.sample_rounds)
    return DaemonTracing(section, {} if headers is None else read_headers_file(headers), clock)


def connect_tracing(tracing: TracedDaemon | None, model: str, control: TargetControl) -> None:
    """Let a model's control tell of rounds and of streams that go on."""
    if tracing is not None:
        control.observers.follow(RoundReport, partial(tracing.observe_round, model))
        control.observers.follow(ResumedStream, tracing.observe_resumed)


def count_spans(tracing: TracedDaemon | None, metrics: Metrics) -> None:
    if tracing is not None:
        metrics.traces = tracing.counts


async def close_tracing(tracing: TracedDaemon | None) -> None:
    """Send what waits, for as long as a stop may wait for that."""
    if tracing is None:
        return
    closed = tracing.begin_close()
    if not await asyncio.to_thread(closed.wait, _CLOSE_WITHIN_S):
        _log.warning("the last spans may be lost: the receiver is too slow")
