"""Judges drafts by each request's rule, and learns how far the tolerant one may go."""

from __future__ import annotations

from orchestrator.decoding.session import Session
from policies.acceptance import Row, Sampling, ToleranceGoal, ToleranceState, Verdict, calibrated, verdict


class Judging:
    """What was learned is the worker's: greedy and sampled requests each share one tolerance."""

    def __init__(self, goal: ToleranceGoal) -> None:
        self._goal = goal
        self._learned = {"greedy": ToleranceState(), "sampled": ToleranceState()}

    def verdict(self, session: Session, rows: Row) -> Verdict:
        """Judge a session's draft by its rows (see policies.acceptance.verdict). Raises NotFinite and GrammarFailed."""
        sampling = session.submit.sampling
        delta = self._learned[_kind(sampling)].delta if sampling.rule == "tolerance" else None
        if delta is not None and session.draft.tokens:
            session.tolerance_delta = delta
        found = verdict(
            rows,
            session.draft.tokens,
            sampling,
            len(session.tokens),
            session.rules.shape if session.rules is not None else None,
            proposals=session.draft.proposals,
            delta=delta,
        )
        if found.gaps:
            kind, greedy = _kind(sampling), sampling.temperature == 0.0
            self._learned[kind] = calibrated(self._learned[kind], found.gaps, self._goal, greedy=greedy)
        return found

    @property
    def deltas(self) -> dict[str, float]:
        """The tolerances that are known, in nats."""
        return {kind: state.delta for kind, state in self._learned.items() if state.delta is not None}


def _kind(sampling: Sampling) -> str:
    return "greedy" if sampling.temperature == 0.0 else "sampled"
