"""Tells the times of a share of the rounds, for the requests that are traced."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from orchestrator.protocol.trace_messages import RoundTrace, SequenceTrace
from orchestrator.worker.engine.batch import ScheduledSequence
from orchestrator.worker.engine.round import Round
from policies.sampling import VerifiedDraft


class RoundTraces:
    """`share`: of the rounds whose times are told, as the last traced request has it; 0 until there was one."""

    def __init__(self, clock: Clock, chance: random.Random | None = None) -> None:
        self.share = 0.0
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311 -- it chooses rounds, and no secret

    def observe_request(self, request: Submit) -> None:
        if request.trace is not None:
            self.share = request.trace.round_share

    def trace_round(
        self,
        round_: Round,
        verdicts: Sequence[VerifiedDraft | None],
        deltas: Sequence[Delta],
    ) -> RoundTrace | None:
        """Return the times of a round that ends now; None where it is not drawn, or nobody traces it."""
        if not self.share or self._chance.random() >= self.share:
            return None
        committed = {delta.request_id: len(delta.tokens) for delta in deltas}
        sequences = [
            _trace_sequence(part, judged, committed.get(part.sequence.key, 0))
            for part, judged in zip(round_.parts, verdicts, strict=True)
            if part.sequence.submit.trace is not None
        ]
        if not sequences:
            return None
        schedule_ms = (round_.proposed_s - round_.started_s) * MS_PER_S
        took_ms = (self._clock.monotonic_s() - round_.started_s) * MS_PER_S
        return RoundTrace(
            number=round_.number,
            pid=os.getpid(),
            ended_s=self._clock.wall_s(),
            schedule_ms=schedule_ms,
            draft_ms=round_.draft_ms,
            verify_ms=max(0.0, took_ms - schedule_ms - round_.draft_ms),
            sequences=sequences,
        )


def _trace_sequence(part: ScheduledSequence, judged: VerifiedDraft | None, committed: int) -> SequenceTrace:
    sequence = part.sequence
    assert sequence.submit.trace is not None  # noqa: S101 -- the caller has looked
    drafted = part.draft.guessed if part.emits_logits else 0
    return SequenceTrace(
        trace=sequence.submit.trace,
        stream=sequence.key,
        prefill=part.is_prefill,
        rows=part.rows,
        drafted=drafted,
        accepted=min(judged.accepted, drafted) if judged is not None else 0,
        committed=committed,
        drafter=part.draft.drafter if drafted else "",
    )
