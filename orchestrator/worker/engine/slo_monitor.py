"""What requests of late had, beside what they are to have, and what is moved for it (policies.serving.slo)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.rounds import SloState
from orchestrator.worker.engine.sequence import SequenceState
from policies.running_mean import update_mean
from policies.serving.slo import Objective, Objectives, SloObservation, at_rest, decide_slo_actions, round_bound_ms

WINDOW_S = 30.0
"""What is older is forgotten. ADR 0031. Not tuned."""
# ADR 0031: a few rounds, as percentiles move slowly. Not tuned.
_LOOK_EVERY_S = 0.25
_MOST_SAMPLES = 256  # bounds the sort of a percentile. Not tuned.
_LEAST_TTFTS = 4  # of which a percentile says something. Not tuned.
# That a running request got: a prompt beside fewer says little of what its TPOT will be. ADR 0031: 8 cost 12 % of the
# throughput and most of TTFT, 32 cost 0 to 2 %.
_MIN_TOKENS = 32
_LEAST_STEPS = 4  # of a sequence, before its accepted drafts count. Not tuned.
# Weight of the newest round in running means. ADR 0031. Not tuned.
_NEWEST = 0.05


@dataclass(slots=True)
class _Recent:
    """Figures of the last WINDOW_S seconds."""

    _of: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))

    def add(self, now_s: float, value: float) -> None:
        self._of.append((now_s, value))

    def values(self, now_s: float) -> list[float]:
        while self._of and now_s - self._of[0][0] > WINDOW_S:
            self._of.popleft()
        return [value for _, value in self._of]

    def clear(self) -> None:
        self._of.clear()


class SloMonitor:
    """Follows requests and rounds of one decode loop; `answer` says what is moved now. `max_running`: the most that may
    ever run. `drafts`: there is a drafter. Where there are no objectives nothing is followed, and nothing moves."""

    def __init__(self, objectives: Objectives, clock: Clock, *, max_running: int, drafts: bool) -> None:
        self.answer = at_rest(max_running)
        self._objectives = objectives
        self._watches = any(objective.ms is not None for objective in (objectives.ttft, objectives.tpot))
        self._clock = clock
        self._max_running = max_running
        self._drafts = drafts
        self._bound_ms = objectives.max_round_ms or math.inf
        self._ttfts_ms, self._tpots_ms, self._tokens_a_step = _Recent(), _Recent(), _Recent()
        self._tokens_a_round = self._stretch = 1.0
        self._round_ms = self._prompts_ms = 0.0
        self._looked_s = -math.inf
        self._settling = False
        self._seen = SloObservation(None, None, 0, 0)

    @property
    def follows(self) -> bool:
        """True where rounds are of interest: there are objectives, or a bound of rounds."""
        return self._watches or self._objectives.max_round_ms > 0.0

    @property
    def may_take_turns(self) -> bool:
        """True where rounds are bounded even if nobody drafts."""
        return self._objectives.max_round_ms > 0.0

    def observe_commit(self, sequence: SequenceState, *, ended: bool) -> None:
        if not self._watches:
            return
        now_s = self._clock.monotonic_s()
        if sequence.pace_tokens == 0:
            sequence.pace_s, sequence.pace_tokens = sequence.first_token_s, len(sequence.submit.committed) + 1
            if not sequence.submit.committed:  # else its first token came from a worker that was lost
                self._ttfts_ms.add(now_s, (sequence.first_token_s - sequence.submitted_s) * MS_PER_S)
        if ended:
            tokens = sequence.generated - sequence.pace_tokens
            if tokens >= _MIN_TOKENS or (tokens > 0 and sequence.pace_s == sequence.first_token_s):
                self._tpots_ms.add(now_s, (now_s - sequence.pace_s) * MS_PER_S / tokens)
            if sequence.steps >= _LEAST_STEPS:
                self._tokens_a_step.add(now_s, 1.0 + sequence.accepted / sequence.steps)

    def observe_round_time(
        self, *, sequences: int, tokens: int, round_ms: float, plain_ms: float, prompts: bool
    ) -> None:
        """A round took so long; `plain_ms`: what its `sequences` that decode would have taken alone and without drafts.
        `prompts`: it had a prefill, too."""
        if not self.follows:
            return
        self._round_ms = update_mean(self._round_ms, round_ms, _NEWEST)
        self._prompts_ms = update_mean(self._prompts_ms, max(0.0, round_ms - plain_ms) * prompts, _NEWEST)
        if not prompts and sequences and plain_ms > 0.0:
            self._stretch = update_mean(self._stretch, round_ms / plain_ms, _NEWEST)
            self._tokens_a_round = update_mean(self._tokens_a_round, tokens / sequences, _NEWEST)

    def look(self, running: Sequence[SequenceState], waiting: Sequence[SequenceState]) -> None:
        """Move what is to be moved, a few times a second."""
        now_s = self._clock.monotonic_s()
        if not self._watches or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._seen = seen = self._see(running, waiting, now_s)
        if self._settling and seen.tpot_ms is None and running:
            return  # what is known is from before the last step
        before, self._settling = self.answer, False
        self.answer = decide_slo_actions(
            before, seen, self._objectives, max_running=self._max_running, drafts=self._drafts
        )
        if self.answer.running != before.running and self._objectives.tpot.ms is not None:
            self._settling = True
            self._tpots_ms.clear()
            for sequence in running:
                if sequence.pace_tokens:
                    sequence.pace_s, sequence.pace_tokens = now_s, sequence.generated

    def update_round_bound_ms(self, plain_ms: float) -> float:
        """Return the longest that a round may be planned to take, where it takes `plain_ms` without drafts."""
        self._bound_ms = round_bound_ms(self._seen.tpot_ms, self._objectives, plain_ms)
        return self._bound_ms

    def row_price(self, *, prompts: bool) -> float:
        """Return the price of a draft's row in a round; `prompts`: it has a prefill, too."""
        return self.answer.row_price if prompts or not self.answer.beside_prompts else 1.0

    @property
    def turns_ms(self) -> float:
        """The longest that turns of all sequences may take, so that TPOT is kept."""
        tpot_ms = self._objectives.tpot.ms
        return math.inf if tpot_ms is None else tpot_ms * max(1.0, self._tokens_a_round)

    def state(self) -> SloState | None:
        """Return what is seen and moved, for people; None where there is nothing to follow."""
        if not self.follows:
            return None
        seen, answer = self._seen, self.answer
        whys = [
            _why(name, seen_ms, objective)
            for name, seen_ms, objective in (
                ("TTFT", seen.ttft_ms, self._objectives.ttft),
                ("TPOT", seen.tpot_ms, self._objectives.tpot),
            )
            if objective.ms is not None
        ]
        within = f"; rounds within {self._bound_ms:g} ms" if self._bound_ms < math.inf else ""
        return SloState(
            ttft_ms=seen.ttft_ms,
            tpot_ms=seen.tpot_ms,
            row_price=answer.row_price,
            prefill_share=answer.prefill_share,
            max_running=answer.running,
            levers=[lever.value for lever in answer.levers],
            why=f"{', '.join(whys) or 'no objective'}: {answer.explained}{within}",
        )

    def _see(self, running: Sequence[SequenceState], waiting: Sequence[SequenceState], now_s: float) -> SloObservation:
        ttft, tpot = self._objectives.ttft, self._objectives.tpot
        ttfts_ms = self._ttfts_ms.values(now_s)
        if ttft.ms is not None:  # who waits longer than that is known to be late
            ages_ms = [
                (now_s - sequence.submitted_s) * MS_PER_S
                for sequence in (*running, *waiting)
                if sequence.first_token_s == 0.0 and not sequence.submit.committed
            ]
            ttfts_ms += [age_ms for age_ms in ages_ms if age_ms > ttft.ms]
        tpots_ms = self._tpots_ms.values(now_s)
        tpots_ms += [pace_ms for sequence in running if (pace_ms := self._pace_ms(sequence, now_s)) is not None]
        slow = 100.0 - tpot.percentile
        steps = self._tokens_a_step.values(now_s)
        steps += [1.0 + each.accepted / each.steps for each in running if each.steps >= _LEAST_STEPS]
        return SloObservation(
            ttft_ms=_percentile(ttfts_ms, ttft.percentile) if len(ttfts_ms) >= _LEAST_TTFTS else None,
            tpot_ms=_percentile(tpots_ms, tpot.percentile),
            waiting=len(waiting),
            running=len(running),
            gain=self._tokens_a_round / self._stretch,
            sequence_gain=(_percentile(steps, slow) or 1.0) / self._stretch,
            prefill_time=self._prompts_ms / self._round_ms if self._round_ms > 0.0 else 0.0,
        )

    def _pace_ms(self, sequence: SequenceState, now_s: float) -> float | None:
        """Return a running request's TPOT so far, since it was last begun to be counted; None: too early to say."""
        if sequence.pace_tokens == 0:
            return None
        tokens, spent_ms = sequence.generated - sequence.pace_tokens, (now_s - sequence.pace_s) * MS_PER_S
        if tokens < _MIN_TOKENS and spent_ms < _MIN_TOKENS * (self._objectives.tpot.ms or math.inf):
            return None
        return spent_ms / max(1, tokens)


def _percentile(values: Sequence[float], rank: float) -> float | None:
    return float(np.percentile(values, rank)) if values else None


def _why(name: str, seen_ms: float | None, objective: Objective) -> str:
    seen = "not known yet" if seen_ms is None else f"{seen_ms:.0f} ms"
    return f"{name} p{objective.percentile:g} {seen} of {objective.ms:g} ms"
