"""Tells the times of a share of the rounds, for the requests that are traced."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.messages import Delta, Submit
from orchestrator.protocol.trace_messages import RoundTrace, SequenceTrace
from orchestrator.worker.engine.batch import ScheduledSequence
from policies.sampling import VerifiedDraft


class RoundTraces:
    """`share`: of the rounds whose times are told, as the last traced request has it; 0 until there was one."""

    def __init__(self, clock: Clock, chance: random.Random | None = None) -> None:
        self.share = 0.0
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311 -- it chooses rounds, and no secret

    def observe_request(self, request: Submit) -> None:
        """A request has come."""
        if request.trace is not None:
            self.share = request.trace.round_share

    def describe(
        self,
        times: tuple[int, float, float, float],
        parts: Sequence[ScheduledSequence],
        verdicts: Sequence[VerifiedDraft | None],
        deltas: Sequence[Delta],
    ) -> RoundTrace | None:
        """Return the times of a round that ends now; None where it is not drawn, or nobody traces it. `times`: its
        number, when it began and when drafts were asked for (seconds of the clock), and how long that took in ms."""
        if self._chance.random() >= self.share:
            return None
        committed = {delta.request_id: len(delta.tokens) for delta in deltas}
        sequences = [
            _describe_sequence(part, judged, committed.get(part.sequence.key, 0))
            for part, judged in zip(parts, verdicts, strict=True)
            if part.sequence.submit.trace is not None
        ]
        if not sequences:
            return None
        number, started_s, asked_s, draft_ms = times
        schedule_ms = (asked_s - started_s) * MS_PER_S
        took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        return RoundTrace(
            number=number,
            pid=os.getpid(),
            ended_s=self._clock.wall_s(),
            schedule_ms=schedule_ms,
            draft_ms=draft_ms,
            verify_ms=max(0.0, took_ms - schedule_ms - draft_ms),
            sequences=sequences,
        )


def _describe_sequence(part: ScheduledSequence, judged: VerifiedDraft | None, committed: int) -> SequenceTrace:
    sequence = part.sequence
    assert sequence.submit.trace is not None  # noqa: S101 -- the caller has looked
    drafted = sequence.draft.guessed if part.emits_logits else 0
    return SequenceTrace(
        trace=sequence.submit.trace,
        stream=sequence.key,
        prefill=part.is_prefill,
        rows=part.rows,
        drafted=drafted,
        accepted=min(judged.accepted, drafted) if judged is not None else 0,
        committed=committed,
        drafter=sequence.draft.drafter if drafted else "",
    )
