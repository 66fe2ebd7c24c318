"""Makes spans of the rounds that workers have timed, and of streams that go on with another worker."""

from __future__ import annotations

from opentelemetry.trace import Tracer

from device_profiles.units import MS_PER_S, NS_PER_S
from orchestrator.clock import Clock
from orchestrator.daemon.tracing import names
from orchestrator.daemon.tracing.context import Attributes, enter, read_trace
from orchestrator.protocol.rounds import RoundReport
from orchestrator.protocol.trace_messages import RoundTrace, SequenceTrace

_MOST_WORKERS = 256  # whose clocks are remembered. Bounds memory.


class RoundSpans:
    """Spans of the rounds of one model's workers."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._ahead_s: dict[tuple[int, int], float] = {}

    def observe_round(self, done: RoundReport) -> None:
        """A round's report has come."""
        if done.trace is None:
            return
        end_s = done.trace.ended_s + self._correct_s(done.engine, done.trace)
        for sequence in done.trace.sequences:
            self._tell(done, done.trace, sequence, end_s)

    def _correct_s(self, engine: int, trace: RoundTrace) -> float:
        """Return what to add to a worker's clock: by the report that came soonest behind its round's end. So another
        host's clock need not be right, and no round ends behind its report."""
        late_s = self._clock.wall_s() - trace.ended_s
        worker = (engine, trace.pid)
        if worker not in self._ahead_s and len(self._ahead_s) >= _MOST_WORKERS:
            del self._ahead_s[next(iter(self._ahead_s))]
        self._ahead_s[worker] = min(late_s, self._ahead_s.get(worker, late_s))
        return self._ahead_s[worker]

    def _tell(self, done: RoundReport, trace: RoundTrace, sequence: SequenceTrace, end_s: float) -> None:
        verify_s = end_s - trace.verify_ms / MS_PER_S
        draft_s = verify_s - trace.draft_ms / MS_PER_S
        start_s = draft_s - trace.schedule_ms / MS_PER_S
        about: Attributes = {
            names.STREAM: sequence.stream,
            names.ENGINE: done.engine,
            names.WORKER_PID: trace.pid,
            names.ROUND_NUMBER: trace.number,
            names.ROUND_SEQUENCES: done.sequences,
            names.ROUND_ROWS: done.rows,
            names.ROUND_DEVICE_MS: done.device_ms,
            names.ROWS: sequence.rows,
            names.PHASE: "prefill" if sequence.prefill else "decode",
            names.DRAFTED: sequence.drafted,
            names.ACCEPTED: sequence.accepted,
            names.COMMITTED: sequence.committed,
        }
        whole = self._tracer.start_span(
            names.ROUND, read_trace(sequence.trace), attributes=about, start_time=_ns(start_s)
        )
        inside = enter(whole)
        if sequence.drafted:
            drafts: Attributes = {names.DRAFTED: sequence.drafted, names.DRAFTER: sequence.drafter}
            draft = self._tracer.start_span(names.DRAFT, inside, attributes=drafts, start_time=_ns(draft_s))
            draft.end(_ns(verify_s))
        accepted: Attributes = {names.ACCEPTED: sequence.accepted}
        verify = self._tracer.start_span(names.VERIFY, inside, attributes=accepted, start_time=_ns(verify_s))
        verify.end(_ns(end_s))
        whole.end(_ns(end_s))


def _ns(time_s: float) -> int:
    return int(time_s * NS_PER_S)
