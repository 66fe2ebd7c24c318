"""What gives way when a service level objective is at risk, and how many sequences share a round.

TTFT is late where requests wait, or prefills get too few rows beside decoding. TPOT is late where rounds are long for
the tokens that they bring each sequence: too many sequences, too much prefill in them, or drafts that bring fewer
tokens than they take time; but where drafts bring more, speculating is what helps. So the answer is not "less
speculation" but whatever moves the objective that is at risk, and the other one's slack pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

AT_RISK = 0.9
"""An objective is at risk from this share of it on."""
SLACK = 0.7
"""Below this share of an objective something may be asked of it."""
_MOST_STRESS = 2.0
_PRICE_STEP = 0.5


class Objective(NamedTuple):
    """`percentile` (0 to 100) of requests are to stay within `ms`; None: no objective."""

    ms: float | None = None
    percentile: float = 95.0


class Seen(NamedTuple):
    """What requests of late had, at the percentile of their objective; None: too few. `waiting` and `running`
    requests. `gain`: tokens that rounds with speculation bring to those of plain rounds in the same time.
    `sequence_gain`: the same for one sequence's TPOT: 1 + accepted drafts a round, over how much longer it takes."""

    ttft_ms: float | None
    tpot_ms: float | None
    waiting: int
    running: int
    gain: float = 1.0
    sequence_gain: float = 1.0


class Lever(StrEnum):
    """What gives way, or gains."""

    NOTHING = "nothing"
    DRAFTS_GIVE_WAY = "drafts_give_way"  # their rows and time go to prefill, or rounds get shorter
    DRAFTS_GAIN = "drafts_gain"  # they bring tokens sooner than rounds without them
    PREFILL_GIVES_WAY = "prefill_gives_way"
    ADMISSION_GIVES_WAY = "admission_gives_way"  # fewer at a time
    NOTHING_HELPS = "nothing_helps"  # both are missed: more machines, or fewer requests


class Answer(NamedTuple):
    """`row_price`: the guard's price of a draft row, times that. `prefill_share`: of the usual bound of prefill rows
    beside decoding. `running`: how many may run from now on. `levers`: what was moved, most important first."""

    row_price: float
    prefill_share: float
    running: int
    levers: tuple[Lever, ...]


def stress(seen_ms: float | None, objective: Objective) -> float:
    """Return what is seen over what is wanted, at most 2; 0 where there is no objective or nothing seen."""
    if objective.ms is None or seen_ms is None:
        return 0.0
    return min(seen_ms / objective.ms, _MOST_STRESS)


def answer(seen: Seen, ttft: Objective, tpot: Objective, *, max_running: int) -> Answer:
    """Return what admission, prefill and the guard are to do. `max_running` (>= 1) is the most that may ever run."""
    late_ttft, late_tpot = stress(seen.ttft_ms, ttft), stress(seen.tpot_ms, tpot)
    if late_ttft >= AT_RISK and late_tpot >= AT_RISK:
        return _both(seen, late_tpot, max_running)
    if late_ttft >= AT_RISK:
        return _first_token(seen, late_ttft, max_running, tpot_slack=late_tpot <= SLACK)
    if late_tpot >= AT_RISK:
        return _each_token(seen, late_tpot, max_running, ttft_slack=late_ttft <= SLACK)
    return Answer(1.0, 1.0, max_running, (Lever.NOTHING,))


def _first_token(seen: Seen, late: float, max_running: int, *, tpot_slack: bool) -> Answer:
    """Requests wait too long: the time and the rows of drafts go to prefill, unless drafts free slots sooner."""
    if seen.waiting and seen.running >= max_running and seen.gain > 1.0:
        return Answer(1.0, 1.0, max_running, (Lever.DRAFTS_GAIN,))  # only what runs sooner to its end makes room
    price = 1.0 + _PRICE_STEP * (1.0 + late - AT_RISK)
    return Answer(price, 2.0 if tpot_slack else 1.0, max_running, (Lever.DRAFTS_GIVE_WAY,))


def _each_token(seen: Seen, late: float, max_running: int, *, ttft_slack: bool) -> Answer:
    """Tokens come too slowly: drafts where they bring them sooner, then less prefill, then fewer at a time."""
    gains = seen.sequence_gain > 1.0
    price = 1.0 / (1.0 + _PRICE_STEP * late) if gains else 1.0 + _PRICE_STEP * (1.0 + late - AT_RISK)
    levers = [Lever.DRAFTS_GAIN if gains else Lever.DRAFTS_GIVE_WAY]
    share, running = 1.0, max_running
    if ttft_slack:
        share = 0.5
        levers.append(Lever.PREFILL_GIVES_WAY)
        if late > 1.0:
            running = max(1, min(max_running, int(seen.running / late)))
            levers.append(Lever.ADMISSION_GIVES_WAY)
    return Answer(price, share, running, tuple(levers))


def _both(seen: Seen, late_tpot: float, max_running: int) -> Answer:
    """Both are late: only what makes more tokens in the same time helps both."""
    if seen.gain > 1.0:
        return Answer(1.0, 1.0, max_running, (Lever.DRAFTS_GAIN, Lever.NOTHING_HELPS))
    return Answer(1.0 + _PRICE_STEP * late_tpot, 1.0, max_running, (Lever.DRAFTS_GIVE_WAY, Lever.NOTHING_HELPS))


def group_size(round_ms: Callable[[int], float], ready: int, *, bound_ms: float, least: int = 8, most: int = 16) -> int:
    """Return how many of `ready` sequences share the next round: as many as keep it within `bound_ms`, up to `most`,
    but `least` (or all there are) in any case: smaller groups read the weights again for few rows.

    `round_ms(sequences)` is the time of such a round, never falling.
    """
    size = min(ready, least)
    while size < min(ready, most) and round_ms(size + 1) <= bound_ms:
        size += 1
    return size


def waits_for_more(ready: int, running: int, *, waited_ms: float, budget_ms: float, saved_ms: float) -> bool:
    """Return whether a round waits for sequences that are about to be ready (their drafts are on the way): not beyond
    the latency budget, nor longer than one round instead of two saves (`saved_ms`)."""
    return ready < running and waited_ms < min(budget_ms, saved_ms)


def goodput(met: int, elapsed_s: float) -> float:
    """Return requests that met every objective per second (DistServe); 0 before any time has passed."""
    return met / elapsed_s if elapsed_s > 0.0 else 0.0
