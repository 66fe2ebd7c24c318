"""What is told for traces: where a request's spans belong, the times of a sampled round, and streams that go on."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """Where spans of a request belong, as W3C Trace Context has it: `parent` is a traceparent, `state` a tracestate.
    `round_share`: the share of rounds (0..1) whose times the worker is to tell."""

    parent: str
    state: str = ""
    round_share: float = 0.0


class SequenceTrace(msgspec.Struct, frozen=True, array_like=True):
    """One sequence in a sampled round. `stream`: its id with this worker. `prefill`: its prompt was read. `rows`: its
    own of the forward; `drafted` and `accepted`: draft tokens; `committed`: tokens that became output."""

    trace: TraceContext
    stream: str
    prefill: bool
    rows: int
    drafted: int
    accepted: int
    committed: int
    drafter: str = ""


class RoundTrace(msgspec.Struct, frozen=True, array_like=True):
    """The times of a sampled round. `number`: of the worker's rounds, from 0. `pid`: the worker's. `ended_s`: seconds
    since 1970 by the worker's clock. The times in ms follow each other: until drafts were asked for, drafting, and the
    target's forward with all behind it. `sequences`: those of requests that are traced."""

    number: int
    pid: int
    ended_s: float
    schedule_ms: float
    draft_ms: float
    verify_ms: float
    sequences: list[SequenceTrace]


class ResumedStream(NamedTuple):
    """A traced stream of which a replica has committed something again. `stream`: the request's id. `why`: "lost" (its
    worker was), "not_finite" (its logits were no numbers) or "moved". It left the replica `left` and is on `at` now,
    where it was sent as the `attempt`th; it stood still for `pause_ms`."""

    trace: TraceContext
    stream: str
    why: str
    left: str
    at: str
    attempt: int
    pause_ms: float
