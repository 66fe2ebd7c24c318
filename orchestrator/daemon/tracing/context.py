"""W3C Trace Context: between headers, messages of workers and contexts of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from orchestrator.protocol.trace_messages import TraceContext

Attributes = dict[str, str | int | float]

_PARENT, _STATE = "traceparent", "tracestate"
_NOWHERE = Context()
_w3c = TraceContextTextMapPropagator()


def read_headers(headers: Mapping[str, str]) -> Context:
    """Return where a request's span belongs by its headers; an empty context where they do not say, or not rightly."""
    carrier = {name: value for name in (_PARENT, _STATE) if (value := headers.get(name)) is not None}
    return _w3c.extract(carrier, _NOWHERE)


def read_trace(message: TraceContext) -> Context:
    """Return the context that a message names."""
    return _w3c.extract({_PARENT: message.parent, _STATE: message.state}, _NOWHERE)


def write_trace(span: Span, round_share: float) -> TraceContext:
    """Return a span as messages name it."""
    carrier: dict[str, str] = {}
    _w3c.inject(carrier, enter(span))
    return TraceContext(carrier.get(_PARENT, ""), carrier.get(_STATE, ""), round_share)


def enter(span: Span) -> Context:
    """Return the context of a span's children."""
    return trace.set_span_in_context(span, _NOWHERE)


def link_to(message: TraceContext) -> list[Link]:
    """Return a link to the span that a message names; nothing where it names none."""
    span = trace.get_current_span(read_trace(message)).get_span_context()
    return [Link(span)] if span.is_valid else []
