"""What the API asks of tracing. Who implements it imports OpenTelemetry; this module does not."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event
from typing import NamedTuple, Protocol

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, RoundReport
from orchestrator.protocol.trace_messages import ResumedStream


class TracedRequest(NamedTuple):
    """A request that was taken in. `kept`: how it was asked for before, where its client comes back for its answer."""

    model: str
    submit: Submit
    choices: int
    stream: bool
    kept: Submit | None = None


class RequestResult(NamedTuple):
    """How a request ended. Times in seconds, None where there was no token, or one only."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    finish_reasons: tuple[str, ...]
    ttft_s: float | None
    tpot_s: float | None


class RequestTrace(Protocol):
    """The spans of one request."""

    @property
    def traceparent(self) -> str:
        """The request's span, as W3C Trace Context has it."""
        ...

    def mark(self, submit: Submit) -> Submit:
        """Return a request as workers are to have it: with its context, if it is sampled."""
        ...

    def describe_request(self, request: TracedRequest) -> None:
        """It was taken in."""
        ...

    def observe_delta(self, stream: str, delta: Delta, now_s: float) -> None:
        """A choice, the request with this id to control, got tokens from the decode loop. `now_s`: by the clock."""
        ...

    def end(self, status: int, error: str | None = None, result: RequestResult | None = None) -> None:
        """It is over, with this HTTP status; only the first call counts. `error`: its code."""
        ...


class Tracing(Protocol):
    """Makes spans of requests."""

    def begin(self, operation: str, headers: Mapping[str, str]) -> RequestTrace:
        """A request has come; its headers may say which span it belongs to."""
        ...


class ExportCounts(NamedTuple):
    """Spans since the daemon started: exported, not exported as the receiver failed, and dropped as too many waited."""

    exported: int
    failed: int
    dropped: int


class TracedDaemon(Tracing, Protocol):
    """Tracing of a whole daemon. All is called in the event loop."""

    def observe_round(self, model: str, done: RoundReport) -> None:
        """A worker of this model has told of a round."""
        ...

    def observe_resumed(self, resumed: ResumedStream) -> None:
        """A traced stream goes on."""
        ...

    def counts(self) -> ExportCounts:
        """Return what became of spans so far."""
        ...

    def begin_close(self) -> Event:
        """Send what waits; the event is set when that is over."""
        ...
