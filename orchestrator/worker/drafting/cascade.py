"""Cheaper drafters inside a draft model's own steps: their tokens are fed with a step, and it checks several at once.

They go on behind what the model has drafted so far, also where a token of theirs was not the model's own choice. So a
cheaper drafter may be a model too: each checks for the next larger one, and the target for all of them. The draft is
the model's own, token for token, whatever they propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.worker.drafting.cache import count_common_prefix
from orchestrator.worker.drafting.port import NO_HINTS, Draft, Drafter, DraftHints
from policies.running_mean import update_mean
from policies.sampling import Sampling
from policies.speculation.calibration import Calibration, chance, observe_draft_outcome
from policies.speculation.cascade import MOST_CHECKED, StepTimes, count_checked_tokens, estimate_accepted_tokens
from policies.speculation.probe import Probe

# ADR 0090: a cheaper drafter that takes more than it saves is asked in one step of 16. Not tuned.
_SELDOM = Probe(16)
_NEWEST = 0.1  # weight of the newest step in running means. Not tuned.
# Tokens that one is thought to bring at first. ADR 0090: above what it takes, so that it is tried.
_HOPED = 2.0


def count_draft_rows(slots: int) -> int:
    """Return the most rows of a draft model's forward whose logits are wanted: of each sequence the last one, and those
    that check cheaper drafters' tokens."""
    return slots * (MOST_CHECKED + 1)


@runtime_checkable
class ContinuingDrafter(Protocol):
    """A drafter that can go on behind tokens which are not committed."""

    def continue_from(self, key: str, tokens: Sequence[int], limit: int) -> Draft:
        """Return a draft of up to `limit` tokens behind all that is committed to a sequence and `tokens`. Nothing
        that it remembers changes. One that does not know the sequence has none."""
        ...


class Checked:
    """One sequence's draft of a model: what cheaper drafters proposed in it, by how long it was then."""

    def __init__(self) -> None:
        self.proposed: list[tuple[_Cheaper, int, Draft]] = []


@dataclass(slots=True, eq=False)
class _Cheaper:
    """`usual`: how many tokens of an ask are the model's own choice. `took_ms`: an ask."""

    drafter: ContinuingDrafter
    calibration: Calibration = field(default_factory=Calibration)
    usual: float = _HOPED
    took_ms: float = 0.0
    asks: int = 0


class Cascade:
    """The cheaper drafters of one draft model, in order of cost. `owned` ones are told of sequences here; whoever owns
    the rest does that."""

    def __init__(self, drafters: Sequence[ContinuingDrafter], clock: Clock, *, owned: Sequence[Drafter] = ()) -> None:
        self.times = StepTimes()
        self._drafters = [_Cheaper(drafter) for drafter in drafters]
        self._owned = tuple(owned)
        self._clock = clock

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        for drafter in self._owned:
            drafter.begin(key, tokens, sampling, hints)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        for drafter in self._owned:
            drafter.extend(key, tokens)

    def end(self, key: str, *, keep: bool) -> None:
        for drafter in self._owned:
            drafter.end(key, keep=keep)

    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes() for drafter in self._owned)

    def propose(self, checked: Checked, key: str, tokens: Sequence[int], most: int, rows: int) -> tuple[int, ...]:
        """Return the tokens, up to `most`, that are worth their rows in the model's next step: behind the committed
        tokens and `tokens`, which are its draft so far. `rows`: of that step without them."""
        best: tuple[int, ...] = ()
        chances: tuple[float, ...] = ()
        most = min(most, MOST_CHECKED)
        for cheaper in self._drafters if most > 0 and self.times.rows else ():
            if not self._pays(cheaper, chances, rows):
                continue
            started_s = self._clock.monotonic_s()
            draft = cheaper.drafter.continue_from(key, tokens, most)
            if draft.tokens:  # else it may have read a text, which it does once
                took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
                cheaper.took_ms = update_mean(cheaper.took_ms, took_ms, _NEWEST)
            checked.proposed.append((cheaper, len(tokens), draft))
            calibrated = tuple(chance(cheaper.calibration, confidence) for confidence in draft.confidences)
            if estimate_accepted_tokens(calibrated) > estimate_accepted_tokens(chances):
                best, chances = draft.tokens, calibrated
        return best[: count_checked_tokens(chances, self.times, rows)]

    def _pays(self, cheaper: _Cheaper, chances: Sequence[float], rows: int) -> bool:
        """Return whether to ask a drafter: what it usually brings, beyond what is there, is worth what it takes."""
        cheaper.asks += 1
        saved_ms = (cheaper.usual - estimate_accepted_tokens(chances)) * self.times.estimate_ms(rows) / rows
        return saved_ms > cheaper.took_ms or _SELDOM.is_due(cheaper.asks)

    def observe_draft(self, checked: Checked, tokens: Sequence[int]) -> None:
        for cheaper, at, draft in checked.proposed:
            chosen = tokens[at:]
            if not chosen:
                continue
            cheaper.calibration = observe_draft_outcome(cheaper.calibration, draft.tokens, draft.confidences, chosen)
            right = count_common_prefix(draft.tokens, chosen)
            cheaper.usual = update_mean(cheaper.usual, right, _NEWEST)
        checked.proposed.clear()
