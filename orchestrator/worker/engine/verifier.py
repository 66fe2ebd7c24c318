"""Judges drafts by each request's rule, and learns how far the tolerant one may go."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.errors import GrammarFailed
from orchestrator.worker.engine.batch import ScheduledSequence, WantedRows
from orchestrator.worker.engine.sequence import SequenceState
from policies.sampling import (
    CoupledDraft,
    NotFinite,
    Row,
    Sampling,
    ToleranceGoal,
    ToleranceState,
    VerifiedDraft,
    calibrate_tolerance,
    verify_coupled_drafts,
    verify_draft,
    watch_tolerance,
)

Verdict = VerifiedDraft | GrammarFailed | NotFinite


class Verifier:
    """What was learned is the worker's: greedy and sampled requests each share one tolerance. Where the goal fixes one,
    that is both's, and nothing is learned."""

    def __init__(self, goal: ToleranceGoal) -> None:
        self._goal = goal
        self._learned = {"greedy": ToleranceState(), "sampled": ToleranceState()}

    def set_goal(self, goal: ToleranceGoal) -> None:
        """Let the tolerant rule reach this; what it has learned stays."""
        self._goal = goal

    def verdicts(self, parts: Sequence[ScheduledSequence], rows: Sequence[WantedRows]) -> list[Verdict | None]:
        """Judge each part's draft by its rows (see policies.sampling.verify), and score its prompt where that is asked
        for. A verdict may be why that could not be done: a grammar failed, or a row is garbage. None: the part chooses
        no token."""
        verdicts: list[Verdict | None] = []
        coupled: dict[int, CoupledDraft] = {}
        for number, (part, own) in enumerate(zip(parts, rows, strict=True)):
            verdict: Verdict | None = _score_prompt(part.sequence, own.logits)
            if verdict is None and part.emits_logits:
                if part.sequence.rules is None and part.sequence.submit.sampling.rule == "coupled":
                    coupled[number] = _to_coupled_draft(part, own)
                else:
                    verdict = self._verdict(part, part.find_choosing(own))
            verdicts.append(verdict)
        for number, verdict in zip(coupled, _judge_together(list(coupled.values())), strict=True):
            verdicts[number] = verdict
        return verdicts

    def _verdict(self, part: ScheduledSequence, rows: WantedRows) -> Verdict:
        sequence, draft = part.sequence, part.draft
        sampling = sequence.submit.sampling
        delta = self._delta_of(_kind(sampling)) if sampling.rule == "tolerance" else None
        if delta is not None and draft.tokens:
            sequence.tolerance_delta = delta
        try:
            verified = verify_draft(
                rows.logits,
                draft.tokens,
                sampling,
                len(sequence.tokens),
                sequence.rules.shape if sequence.rules is not None else None,
                proposals=draft.proposals,
                delta=delta,
                ids=rows.best.ids if rows.best is not None else None,
            )
        except (GrammarFailed, NotFinite) as error:
            return error
        if verified.gaps and self._goal.fixed_delta is None:
            kind, greedy = _kind(sampling), sampling.temperature == 0.0
            learn = calibrate_tolerance if delta is None else watch_tolerance
            self._learned[kind] = learn(self._learned[kind], verified.gaps, self._goal, greedy=greedy)
        return verified

    def _delta_of(self, kind: str) -> float | None:
        return self._learned[kind].delta if self._goal.fixed_delta is None else self._goal.fixed_delta

    @property
    def deltas(self) -> dict[str, float]:
        """The tolerances that are known, in nats."""
        return {kind: delta for kind in self._learned if (delta := self._delta_of(kind)) is not None}

    @property
    def recalibrations(self) -> int:
        """How often a learned tolerance became another one, since acceptance had drifted."""
        return sum(state.recalibrations for state in self._learned.values())


def _score_prompt(sequence: SequenceState, rows: Row) -> NotFinite | None:
    """Score a prompt's rows where that is asked for; returns why not, where they are garbage."""
    if sequence.scores is not None and sequence.scores_prompt:
        try:
            sequence.scores.see_prompt(rows, sequence.cached + 1)
        except NotFinite as error:
            return error
    return None


def _to_coupled_draft(part: ScheduledSequence, rows: WantedRows) -> CoupledDraft:
    sequence, own = part.sequence, part.find_choosing(rows)
    return CoupledDraft(own.logits, part.draft.tokens, sequence.submit.sampling, len(sequence.tokens), own.best)


def _judge_together(drafts: Sequence[CoupledDraft]) -> Sequence[Verdict]:
    """Judge drafts by the coupled rule together; where a row of one is garbage, each alone."""
    try:
        return verify_coupled_drafts(drafts)
    except NotFinite:
        return [_judge_alone(draft) for draft in drafts]


def _judge_alone(draft: CoupledDraft) -> Verdict:
    try:
        return verify_coupled_drafts([draft])[0]
    except NotFinite as error:
        return error


def _kind(sampling: Sampling) -> str:
    return "greedy" if sampling.temperature == 0.0 else "sampled"
