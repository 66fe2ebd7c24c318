"""Judges drafts by each request's rule, and learns how far the tolerant one may go."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import GrammarFailed
from orchestrator.worker.engine.sequence import SequenceState
from policies.sampling import (
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

    def verdicts(self, asked: Sequence[tuple[SequenceState, Row]]) -> list[Verdict]:
        """Judge sequences' drafts by their rows (see policies.sampling.verify), each by itself: why it could not be
        done, where a grammar failed or a row is garbage."""
        found = [None if _side_by_side(sequence) else self._verdict(sequence, rows) for sequence, rows in asked]
        following = iter(_judge_side_by_side([pair for pair, own in zip(asked, found, strict=True) if own is None]))
        return [next(following) if own is None else own for own in found]

    def _verdict(self, sequence: SequenceState, rows: Row) -> Verdict:
        sampling = sequence.submit.sampling
        delta = self._delta_of(_kind(sampling)) if sampling.rule == "tolerance" else None
        if delta is not None and sequence.draft.tokens:
            sequence.tolerance_delta = delta
        try:
            found = verify_draft(
                rows,
                sequence.draft.tokens,
                sampling,
                len(sequence.tokens),
                sequence.rules.shape if sequence.rules is not None else None,
                proposals=sequence.draft.proposals,
                delta=delta,
            )
        except (GrammarFailed, NotFinite) as error:
            return error
        if found.gaps and self._goal.fixed_delta is None:
            kind, greedy = _kind(sampling), sampling.temperature == 0.0
            learn = calibrate_tolerance if delta is None else watch_tolerance
            self._learned[kind] = learn(self._learned[kind], found.gaps, self._goal, greedy=greedy)
        return found

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


def _judge_side_by_side(asked: Sequence[tuple[SequenceState, Row]]) -> Sequence[Verdict]:
    """Judge drafts by the coupled rule together; where a row of one is garbage, each alone."""
    drafts = [(rows, one.draft.tokens, one.submit.sampling, len(one.tokens)) for one, rows in asked]
    try:
        return verify_coupled_drafts(drafts)
    except NotFinite:
        return [_judge_alone(draft) for draft in drafts]


def _judge_alone(draft: tuple[Row, Sequence[int], Sampling, int]) -> Verdict:
    try:
        return verify_coupled_drafts([draft])[0]
    except NotFinite as error:
        return error


def _side_by_side(sequence: SequenceState) -> bool:
    """True where a sequence may be judged together with others: by the coupled rule, as its rows are."""
    return sequence.rules is None and sequence.submit.sampling.rule == "coupled"


def _kind(sampling: Sampling) -> str:
    return "greedy" if sampling.temperature == 0.0 else "sampled"
