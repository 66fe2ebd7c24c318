"""Whether a draft that is made on the target's own time pays, and when to look again where it does not.

With T the time of a round without drafting, D what drafting adds and a the mean number of accepted drafts per sequence,
a round with drafts yields 1 + a tokens per sequence in T + D, and one without yields 1 in T. Drafting pays while
(T + D) / (1 + a) < T, so while D < a T (the condition of Leviathan et al., arXiv 2211.17192, section 3.5, in measured
times). Within a draft, one token more pays while the chance that it is accepted, times T, is above what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TRIAL_ROUNDS = 4
"""A look again lasts so many rounds: the first of them only reads what the draft model missed."""
FIRST_PAUSE_ROUNDS = 64
LONGEST_PAUSE_ROUNDS = 4096
_NEWEST = 0.2  # weight of the newest observation in the running means


@dataclass(frozen=True, slots=True)
class Worth:
    """Running means: accepted drafts per sequence and draft, and what drafting added to a round, in ms (0: not
    measured yet). `verdicts`: drafts judged so far; until there are TRIAL_ROUNDS of them drafting is tried. `left`:
    rounds until this changes, of a pause or of a trial; `pause` is the length of the last pause, 0 while drafting
    pays."""

    accepted: float = 1.0
    verdicts: int = 0
    draft_ms: float = 0.0
    pause: int = 0
    left: int = 0
    paused: bool = False


def pays(worth: Worth, round_ms: float) -> bool:
    """Return whether drafting pays where a round without it takes `round_ms` (0: not measured, so it may)."""
    return round_ms <= 0.0 or worth.verdicts < TRIAL_ROUNDS or worth.draft_ms < worth.accepted * round_ms


def decided(worth: Worth, round_ms: float) -> tuple[Worth, bool]:
    """Return what is known one round later, and whether to draft in this one."""
    if worth.left > 0:
        return replace(worth, left=worth.left - 1), not worth.paused
    if worth.paused:  # the pause is over: look again
        return replace(worth, paused=False, left=TRIAL_ROUNDS - 1), True
    if pays(worth, round_ms):
        return replace(worth, pause=0), True
    pause = min(max(2 * worth.pause, FIRST_PAUSE_ROUNDS), LONGEST_PAUSE_ROUNDS)
    return replace(worth, paused=True, pause=pause, left=pause - 1), False


def drafted(worth: Worth, draft_ms: float) -> Worth:
    """Take in what drafting added to a round."""
    mean = draft_ms if worth.draft_ms == 0.0 else worth.draft_ms + _NEWEST * (draft_ms - worth.draft_ms)
    return replace(worth, draft_ms=mean)


def judged(worth: Worth, accepted: int) -> Worth:
    """Take in how many tokens of one sequence's draft the target chose too."""
    mean = accepted if worth.verdicts == 0 else worth.accepted + _NEWEST * (accepted - worth.accepted)
    return replace(worth, accepted=mean, verdicts=worth.verdicts + 1)


def token_price(step_ms: float, round_ms: float) -> float:
    """Return the chance of being accepted below which a further token is not worth the step that drafts it."""
    return step_ms / round_ms if round_ms > 0.0 else 0.0
