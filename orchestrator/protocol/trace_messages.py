"""What is told for traces: where a request's spans belong, the times of a sampled round, and streams that go on."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """Where spans of a request belong, as W3C Trace Context has it: a traceparent and a tracestate."""

    parent: str
    state: str = ""
    round_share: float = 0.0
    """The share of rounds (0 to 1) whose times the worker is to tell."""


class SequenceTrace(msgspec.Struct, frozen=True, array_like=True):
    trace: TraceContext
    stream: str
    """Its id with this worker."""
    prefill: bool
    """Its prompt was read."""
    rows: int
    """Its own of the forward."""
    drafted: int
    accepted: int
    committed: int
    """Tokens that became output."""
    drafter: str = ""


class RoundTrace(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Of the worker's rounds, from 0."""
    pid: int
    ended_s: float
    """Seconds since 1970 by the worker's clock."""
    schedule_ms: float
    """Until drafts were asked for. The next two follow."""
    draft_ms: float
    verify_ms: float
    """The target's forward with all behind it."""
    sequences: list[SequenceTrace]
    """Those of requests that are traced."""


class ResumedStream(NamedTuple):
    """A traced stream of which a replica has committed something again: it `left` one, and is `at` another now."""

    trace: TraceContext
    stream: str
    why: str
    """"lost" (its worker was), "not_finite" (its logits were no numbers), "elsewhere" (it gave the request up) or
    "moved"."""
    left: str
    at: str
    attempt: int
    """It was sent there as the so-manieth."""
    pause_ms: float
