"""The canary's trial: which variant a request is served by, what is known of both, and how it ends.

A request's variant follows from its id and is sent with it, so that a worker that goes on with it serves it the same
way. Figures are folded in until something is decided; from then on every new request gets the variant that won.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec

from device_profiles.whole_file import replace_file
from orchestrator.clock import Clock
from orchestrator.daemon.control.port import PROMOTED, ROLLED_BACK, TRIAL, Control, StateView, TrialDecision, TrialView
from orchestrator.daemon.control.state import FAILED, STARTING
from orchestrator.protocol.commands import Submit
from policies.sampling import Acceptance
from policies.serving.canary import (
    CanaryMove,
    CanaryVariant,
    Figures,
    Interval,
    PromotionRule,
    arm_of,
    decide_canary,
    difference,
    looks,
    observe_request_figures,
)

# ADR 0030: what a killed daemon forgets of a trial. Not tuned.
_SAVED_EVERY_S = 5.0
_PHASES = {CanaryMove.PROMOTE: PROMOTED, CanaryMove.ROLL_BACK: ROLLED_BACK, CanaryMove.GO_ON: TRIAL}
_IDENTICAL_RULES = ("greedy", "coupled")
"""Under these the output does not depend on the drafts; requests that name another one take no part in a trial."""

_OUT_OF_USE = ("failed", "refused")
"""States of a drafter that does not draft any more (see DrafterState)."""

_log = logging.getLogger(__name__)


class CanaryTerms(NamedTuple):
    """What cluster.yaml says of the trial. `differs`: what is other in the canary, a line each. `to_keep`: what to
    change in cluster.yaml to keep it. `drafters`: the names of those that only the canary has. `acceptance`: the rule
    of its requests that name none; None: no other."""

    share: float
    by_rule: bool
    rule: PromotionRule
    differs: tuple[str, ...]
    to_keep: tuple[str, ...]
    drafters: frozenset[str] = frozenset()
    acceptance: Acceptance | None = None


class CanaryEntry(NamedTuple):
    """A request that was taken in. `counted`: its figures belong to the trial of this number. `restarts` of workers
    when it came: what waited for one says nothing of its variant."""

    variant: CanaryVariant
    counted: bool
    trial: int
    restarts: int


class TrialState(msgspec.Struct, frozen=True):
    """`number` counts trials of one configuration. `arms`: figures by the variant's name, until it was decided."""

    number: int = 0
    phase: str = TRIAL
    arms: dict[str, Figures] = {}
    decision: TrialDecision | None = None


class TrialFile:
    """One file, written whole or not at all. What cannot be read or written is logged: a trial is no reason to fail."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> TrialState | None:
        """Return what was kept; None where nothing was, or it cannot be used."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=TrialState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("the canary's trial begins anew: %s cannot be used: %s", self._path, error)
            return None

    def write(self, state: TrialState) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self._path) as file:
                file.write(msgspec.json.encode(state))
        except OSError as error:
            _log.warning("the canary's trial is not kept: %s: %s", self._path, error.strerror or error)


class CanaryTrial:
    """See the module. One event loop calls it. `salt` draws the variants; `control` tells of workers and drafters."""

    def __init__(self, terms: CanaryTerms, salt: str, file: TrialFile, control: Control, clock: Clock) -> None:
        self._terms = terms
        self._salt = salt
        self._file = file
        self._control = control
        self._clock = clock
        self._state = file.read() or TrialState()
        self._saved_s = clock.monotonic_s()
        if self._state.phase != TRIAL and self._state.decision is not None:
            _log.info("the canary is %s, as before: %s", _format_phase(self._state.phase), self._state.decision.reason)

    def assign_variant(self, submit: Submit, *, names_rule: bool = False) -> tuple[Submit, CanaryEntry]:
        """Give a request its variant. A request that says itself how it is drafted for takes no part while nothing is
        decided. Nor does one that names its acceptance rule (`names_rule`), where that is what is tried or its output
        may depend on its drafts. Before each draft worker was ready once nothing counts."""
        state = self._state
        demands = submit.policy_depth or submit.depth is not None or submit.most_depth is not None
        bound = names_rule and (self._terms.acceptance is not None or submit.sampling.rule not in _IDENTICAL_RULES)
        part = not demands and not bound
        if state.phase == PROMOTED:
            variant = CanaryVariant.CANARY
        elif state.phase == TRIAL and part:
            variant = arm_of(submit.request_id, share=self._terms.share, salt=f"{self._salt}{state.number}")
        else:
            variant = CanaryVariant.CONTROL
        view = self._control.view()
        counted = part and not any(
            draft.phase == STARTING for draft in view.drafts
        )  # a variant may lack its drafts yet
        entry = CanaryEntry(variant, counted, state.number, view.totals.restarts)
        if variant is CanaryVariant.CANARY and self._terms.acceptance is not None and not names_rule:
            submit = msgspec.structs.replace(
                submit, sampling=replace(submit.sampling, acceptance=self._terms.acceptance)
            )
        return msgspec.structs.replace(submit, variant=variant.value), entry

    def end_entry(
        self,
        entry: CanaryEntry,
        *,
        ttft_ms: float | None,
        tpot_ms: float | None,
        acceptance: float | None,
        agreement: float | None = None,
    ) -> None:
        state, view = self._state, self._control.view()
        if state.phase != TRIAL or not entry.counted or entry.trial != state.number:
            return
        if entry.restarts == view.totals.restarts:
            arms = {CanaryVariant(name): figures for name, figures in state.arms.items()}
            observed = observe_request_figures(
                arms.get(entry.variant, Figures()),
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                acceptance=acceptance,
                agreement=agreement,
            )
            self._state = msgspec.structs.replace(state, arms={**state.arms, entry.variant.value: observed})
        if failed := self._describe_failed_drafter(view):
            self._decide(CanaryMove.ROLL_BACK, "drafter", "drafter", failed)
        elif self._terms.by_rule:
            self._follow_the_rule(entry.variant)
        if self._clock.monotonic_s() - self._saved_s >= _SAVED_EVERY_S:
            self.save()

    def _describe_failed_drafter(self, view: StateView) -> str:
        """Return which of the drafters that only the canary has does not draft any more, and why; "" where all may."""
        mine = self._terms.drafters
        for state in view.gauges.drafters if view.gauges is not None else []:
            if state.name in mine and state.state in _OUT_OF_USE:
                return f"its drafter {state.name} failed: {state.reason}"
        for draft in view.drafts:
            if draft.name in mine and draft.phase == FAILED:
                return f"the worker of its drafter {draft.name} failed: {draft.detail}"
        return ""

    def _follow_the_rule(self, variant: CanaryVariant) -> None:
        verdict = decide_canary(self._arms, self._terms.rule)
        seen = {each: figures.ttft_ms.seen for each, figures in self._arms.items()}
        fewest = min(seen.values())
        last = seen[CanaryVariant.CANARY] >= self._terms.rule.most_requests
        due = last or (seen[variant] == fewest and looks(fewest, self._terms.rule))
        if verdict.move is CanaryMove.ROLL_BACK or (verdict.move is CanaryMove.PROMOTE and due):
            self._decide(
                verdict.move, "rule", verdict.figure, self._why(verdict.figure, verdict.interval), verdict.interval
            )

    @property
    def _arms(self) -> dict[CanaryVariant, Figures]:
        return {variant: self._state.arms.get(variant.value, Figures()) for variant in CanaryVariant}

    def _why(self, figure: str, interval: Interval) -> str:
        control, canary = (self._arms[variant] for variant in (CanaryVariant.CONTROL, CanaryVariant.CANARY))
        counts = f"{canary.ttft_ms.seen} requests of the canary and {control.ttft_ms.seen} others"
        if figure == "agreement":
            return (
                f"{interval.low:.1%} to {interval.high:.1%} of its output's tokens (95 %) are the target's own choice, "
                f"and {self._terms.rule.least_agreement:.1%} must be (canary.least_agreement), after {counts}"
            )
        name = {"ttft_ms": "TTFT", "tpot_ms": "TPOT"}[figure]
        mean, kept = getattr(control, figure).mean, canary.agreement.mean
        lost = f"; {kept:.1%} of its output's tokens are the target's own choice" if 0.0 < kept < 1.0 else ""
        return (
            f"{name} {interval.low:+.3g} to {interval.high:+.3g} ms (95 %) against {mean:.4g} ms of the others, after "
            f"{counts}{lost}"
        )

    def promote(self) -> None:
        self._obey(CanaryMove.PROMOTE)

    def abort(self) -> None:
        self._obey(CanaryMove.ROLL_BACK)

    def _obey(self, move: CanaryMove) -> None:
        interval = difference(self._arms[CanaryVariant.CANARY].tpot_ms, self._arms[CanaryVariant.CONTROL].tpot_ms)
        if isfinite(interval.low):
            self._decide(move, "operator", "tpot_ms", self._why("tpot_ms", interval), interval)
        else:
            self._decide(move, "operator", "", "before there were figures")

    def restart(self) -> None:
        self._state = TrialState(number=self._state.number + 1)
        _log.info("the canary's trial begins anew")
        self.save()

    def _decide(self, move: CanaryMove, by: str, figure: str, reason: str, interval: Interval | None = None) -> None:
        at = datetime.fromtimestamp(self._clock.wall_s(), UTC).isoformat(timespec="seconds")
        low, high = interval if interval is not None else (None, None)
        decision = TrialDecision(by, reason, at, figure, low, high)
        self._state = msgspec.structs.replace(self._state, phase=_PHASES[move], decision=decision)
        write = _log.warning if by == "drafter" else _log.info
        write("the canary is %s (by the %s): %s", _format_phase(self._state.phase), by, reason)
        if move is CanaryMove.PROMOTE:
            for line in self._terms.to_keep:
                _log.info("to keep the canary: %s", line)
        self.save()

    def save(self) -> None:
        """Keep the state for a daemon that starts again with this configuration; a failure is logged."""
        self._saved_s = self._clock.monotonic_s()
        self._file.write(self._state)

    def view(self) -> TrialView:
        state, terms, arms = self._state, self._terms, self._arms
        shares = {PROMOTED: 1.0, ROLLED_BACK: 0.0}
        return TrialView(
            phase=state.phase,
            share=terms.share,
            effective_share=shares.get(state.phase, terms.share),
            differs=terms.differs,
            by_rule=terms.by_rule,
            rule=terms.rule,
            decision=state.decision,
            arms={variant.value: figures for variant, figures in arms.items()},
            differences={
                name: difference(getattr(arms[CanaryVariant.CANARY], name), getattr(arms[CanaryVariant.CONTROL], name))
                for name in Figures._fields
            },
            outlook=self._outlook(arms),
            to_keep=terms.to_keep,
        )

    def _outlook(self, arms: dict[CanaryVariant, Figures]) -> str:
        if self._state.phase == PROMOTED:
            return "every new request gets it; change cluster.yaml to keep it"
        if self._state.phase == ROLLED_BACK:
            return "no new request gets it; take `canary` out of cluster.yaml, or `outrider canary restart`"
        if not self._terms.by_rule:
            return "goes on until `outrider canary promote` or `abort`"
        rule, canary, control = self._terms.rule, arms[CanaryVariant.CANARY], arms[CanaryVariant.CONTROL]
        missing = [
            f"{rule.least_requests - figures.ttft_ms.seen} more {name}"
            for name, figures in (("of the canary", canary), ("of the others", control))
            if figures.ttft_ms.seen < rule.least_requests
        ]
        if missing:
            return f"nothing is decided before {' and '.join(missing)}"
        return (
            f"goes on until TPOT is surely {rule.gain:.0%} lower (promoted), TTFT or TPOT surely {rule.tolerance:.0%} "
            f"higher (rolled back), or {rule.most_requests} requests of the canary are not surely better (rolled back)"
            f"{self._describe_agreement(canary)}"
        )

    def _describe_agreement(self, canary: Figures) -> str:
        """Return what the canary's output has to do with it, where some of it is not the target's own choice."""
        if canary.agreement.mean == 1.0 or not canary.agreement.seen:
            return ""
        least = self._terms.rule.least_agreement
        return f"; promoted only while surely {least:.1%} of its output's tokens are the target's own choice"


def _format_phase(phase: str) -> str:
    return phase.replace("_", " ")
