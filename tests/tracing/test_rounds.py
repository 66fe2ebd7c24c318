"""Rounds that workers time: which, for whom, and when they were by the daemon's clock."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.daemon.tracing import names
from orchestrator.daemon.tracing.export import BoundedSpanProcessor, CountedSpanExporter, Receiver
from orchestrator.daemon.tracing.rounds import RoundSpans
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.frames import decode_commands, decode_events, encode
from orchestrator.protocol.rounds import RoundReport
from orchestrator.protocol.trace_messages import RoundTrace, SequenceTrace, TraceContext
from tests.api.support import HandClock
from tests.support.loops import loop_over, suffix, toy

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


def trace(key: str, share: float, prompt: bytes = b"the sea is the sea is ") -> Submit:
    return Submit(key, list(prompt), 60, trace=TraceContext(PARENT, "", share))


def decode(*submits: Submit) -> list[RoundReport]:
    loop = loop_over(toy(), suffix())
    for submit in submits:
        assert loop.submit(submit) is None
    rounds = []
    while not loop.idle:
        rounds.append(loop.run_round())
    return rounds


def test_only_traced_sequences_are_told_of():
    rounds = decode(trace("a", 1.0), Submit("b", list(b"the land "), 60))
    told = [one.trace for one in rounds if one.trace is not None]
    assert {sequence.stream for trace in told for sequence in trace.sequences} == {"a"}
    mine = [sequence for trace in told for sequence in trace.sequences]
    assert sum(one.committed for one in mine) == 60
    assert mine[0].prefill
    assert all(one.accepted <= one.drafted < one.rows for one in mine)
    assert [trace.number for trace in told] == sorted(trace.number for trace in told)


def test_a_share_of_the_rounds_is_told():
    assert not any(one.trace for one in decode(Submit("a", list(b"the sea "), 60)))
    assert not any(one.trace for one in decode(trace("a", 0.0)))
    assert all(one.trace for one in decode(trace("a", 1.0)))
    told, every = 0, 0
    for _ in range(40):
        rounds = decode(trace("a", 0.5))
        told += sum(one.trace is not None for one in rounds)
        every += len(rounds)
    assert 0 < told < every


def test_context_and_times_cross_the_boundary():
    submit = trace("a", 0.25)
    assert decode_commands(encode([submit])) == [submit]
    (first, *_) = decode(trace("a", 1.0))
    assert decode_events(encode([first])) == [first]


def report(trace: RoundTrace) -> RoundReport:
    return RoundReport([], 1, 5, 1, 4, 3, [], 10.0, 6.0, 2.0, trace=trace)


class Spans:
    """What a RoundSpans makes of reports that come when the test says so."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self._rounds = RoundSpans(provider.get_tracer("test"), self.clock)

    def tell(self, ended_s: float, *, pid: int = 1) -> list[ReadableSpan]:
        """Tell of a round that ended then, by its worker's clock."""
        sequence = SequenceTrace(TraceContext(PARENT), "a", False, 5, 4, 3, 4, "suffix")
        self._kept.clear()
        self._rounds.observe_round(report(RoundTrace(7, pid, ended_s, 1.0, 2.0, 7.0, [sequence])))
        return list(self._kept.get_finished_spans())


def ms_of(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return round(span.start_time / 1e6, 3), round(span.end_time / 1e6, 3)


def test_a_round_is_draft_and_verify_behind_each_other():
    draft, verify, whole = Spans().tell(100.0)
    assert [one.name for one in (draft, verify, whole)] == [names.DRAFT, names.VERIFY, names.ROUND]
    assert (ms_of(whole), ms_of(draft), ms_of(verify)) == ((99990, 100000), (99991, 99993), (99993, 100000))
    assert whole.parent is not None
    assert f"{whole.parent.trace_id:032x}" == "1" * 32
    assert f"{whole.parent.span_id:016x}" == "2" * 16
    assert {one.parent.span_id for one in (draft, verify) if one.parent} == {whole.context.span_id}


def test_a_worker_whose_clock_is_wrong_is_set_right():
    spans = Spans()
    for ahead_s in (-3600.0, 3600.0):
        pid = int(ahead_s)
        assert ms_of(spans.tell(100.0 + ahead_s, pid=pid)[-1])[1] == 100_000
        spans.clock.now_s = 100.5  # a report that took 50 ms: its round ended before it came
        assert ms_of(spans.tell(100.45 + ahead_s, pid=pid)[-1])[1] == 100_450
        spans.clock.now_s = 100.0


def test_what_finds_no_room_is_counted():
    kept = InMemorySpanExporter()
    exporter = CountedSpanExporter(kept, Receiver("http://127.0.0.1:9"))
    processor = BoundedSpanProcessor(exporter, most_waiting=2)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for _ in range(10_000):
        tracer.start_span("one").end()
    provider.shutdown()
    assert processor.dropped > 0
    assert exporter.exported + processor.dropped == 10_000
    assert len(kept.get_finished_spans()) == exporter.exported
