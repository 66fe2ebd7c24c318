"""What gives way when a service level objective is at risk, and how many sequences share a round (ADR 0031).

TTFT is late where requests wait, or prefills get too few rows beside decoding. TPOT is late where rounds are long for
the tokens that they bring each sequence. There may be too many sequences, too much prefill in the rounds, or drafts
that bring fewer tokens than they take time. But where drafts bring more, speculating is what helps. So the answer is
not "less speculation" but whatever moves the objective that is at risk, and the other one's slack pays for it.

What was moved comes back in steps, and only with slack: else a bound that keeps an objective is given up as soon as it
does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from enum import StrEnum
from math import ceil, inf
from typing import NamedTuple

from device_profiles.units import MS_PER_S, ceil_div

AT_RISK = 0.9
"""An objective is at risk from this share of it on. ADR 0031: all levers together brought goodput from 0.77 to 1.39
requests/s."""
SLACK = 0.7
"""Below this share of an objective something may be asked of it. ADR 0031. Far enough below the risk that asking for
something does not cause one."""
LEAST_GROUP = 8
"""Smaller groups read the weights again for few rows. ADR 0031: n turns never take less time than one round, as weights
are read once for all."""
# An objective that is missed by more moves levers no further (ADR 0031). Not tuned apart.
_MOST_STRESS = 2.0
# ADR 0031: a row is dearer by so much of itself at the objective. Not tuned apart from the other levers.
_PRICE_STEP = 0.5
# ADR 0031: also where prompts take nearly all the time. Not tuned apart.
_LEAST_PRICE = 0.25
# What was moved stays so until the objective is below this share. ADR 0031: between risk and slack, so that levers do
# not swing.
_RELEASED = 0.8
# What may run grows by a fourth at each step back. ADR 0031: a bound that follows percentiles at once fell to one and
# came back in full, over and over.
_BACK = 4


class Objective(NamedTuple):
    """`percentile` (0 to 100) of requests are to stay within `ms`; None: no objective."""

    ms: float | None = None
    percentile: float = 95.0


ANY = Objective()
"""No objective."""


class Objectives(NamedTuple):
    """What requests are to have. `max_round_ms`: the longest that a round may be planned to take (0: no bound)."""

    ttft: Objective = ANY
    tpot: Objective = ANY
    max_round_ms: float = 0.0


NO_OBJECTIVES = Objectives()


class SloObservation(NamedTuple):
    """What requests of late had, at the percentile of their objective; None: too few. `waiting` and `running`
    requests. `gain`: tokens that rounds with speculation bring to those of plain rounds in the same time.
    `sequence_gain`: the same for one sequence's TPOT: 1 + accepted drafts a round, over how much longer it takes; at
    the percentile, so that it is a slow sequence's. `prefill_time`: the share of the time that goes to prompts."""

    ttft_ms: float | None
    tpot_ms: float | None
    waiting: int
    running: int
    gain: float = 1.0
    sequence_gain: float = 1.0
    prefill_time: float = 0.0


class SloAction(StrEnum):
    """Which load gives way, or gains."""

    NOTHING = "nothing"
    DRAFTS_GIVE_WAY = "drafts_give_way"  # their rows and time go to prefill, or rounds get shorter
    DRAFTS_GAIN = "drafts_gain"  # they bring tokens sooner than rounds without them
    PREFILL_GIVES_WAY = "prefill_gives_way"
    PREFILL_GAINS = "prefill_gains"
    ADMISSION_GIVES_WAY = "admission_gives_way"  # fewer at a time
    NOTHING_HELPS = "nothing_helps"  # both are missed: more machines, or fewer requests


class SloDecision(NamedTuple):
    """`row_price`: the guard's price of a draft row, times that. `prefill_share`: of the default bound of prefill rows
    beside decoding. `running`: how many may run from now on. `levers`: the actions, most important first.
    `beside_prompts`: the price is for rounds with a prefill, for whose sake it is raised."""

    row_price: float
    prefill_share: float
    running: int
    levers: tuple[SloAction, ...]
    beside_prompts: bool = False

    @property
    def explained(self) -> str:
        if self.levers == (SloAction.NOTHING,):
            return "nothing is moved"
        beside = "beside prompts " * self.beside_prompts
        moved = [f"{beside}a draft's row is priced {self.row_price:.2f} times"] * (self.row_price != 1.0)
        moved += [f"prompts get {self.prefill_share:g} times their time"] * (self.prefill_share != 1.0)
        moved += [f"{self.running} may run"] * (SloAction.ADMISSION_GIVES_WAY in self.levers)
        names = [lever.replace("_", " ") for lever in self.levers if lever is not SloAction.NOTHING_HELPS]
        if SloAction.NOTHING_HELPS in self.levers:
            names.append(f"nothing {'else ' if names else ''}helps but more machines or fewer requests")
        return "; ".join([", ".join(names), *moved])


def at_rest(max_running: int) -> SloDecision:
    return SloDecision(1.0, 1.0, max_running, (SloAction.NOTHING,))


def stress(seen_ms: float | None, objective: Objective) -> float:
    """Return the observed latency over the objective, at most 2; 0 where either is missing."""
    if objective.ms is None or seen_ms is None:
        return 0.0
    return min(seen_ms / objective.ms, _MOST_STRESS)


def answer(seen: SloObservation, ttft: Objective, tpot: Objective, *, max_running: int) -> SloDecision:
    """Return what admission, prefill and the guard are to do. `max_running` (>= 1) is the most that may ever run."""
    late_ttft, late_tpot = stress(seen.ttft_ms, ttft), stress(seen.tpot_ms, tpot)
    if late_ttft >= AT_RISK and late_tpot >= AT_RISK:
        return _both(seen, late_tpot, max_running)
    if late_ttft >= AT_RISK:
        return _first_token(seen, late_ttft, max_running, tpot_slack=tpot.ms is not None and late_tpot <= SLACK)
    if late_tpot >= AT_RISK:
        return _each_token(seen, late_tpot, max_running, ttft_slack=late_ttft <= SLACK)
    return at_rest(max_running)


def decide_slo_actions(
    before: SloDecision, seen: SloObservation, objectives: Objectives, *, max_running: int, drafts: bool = True
) -> SloDecision:
    """Return what is to be done after `before`.

    Prices and shares follow the decision at once and stay until there is some slack. The number that may run is at most
    halved, and comes back by steps. `drafts` False: there is no drafter.
    """
    late_ttft, late_tpot = stress(seen.ttft_ms, objectives.ttft), stress(seen.tpot_ms, objectives.tpot)
    wanted = answer(seen, objectives.ttft, objectives.tpot, max_running=max_running)
    if wanted.levers == (SloAction.NOTHING,) and max(late_ttft, late_tpot) > _RELEASED:
        wanted = before._replace(running=max_running)
    running = before.running
    if wanted.running < running:
        running = max(wanted.running, running // 2, 1)
    elif late_tpot <= SLACK or late_ttft >= AT_RISK:
        running = min(wanted.running, running + max(1, running // _BACK))
    decision = wanted._replace(running=running, levers=_in_force(wanted.levers, fewer=running < max_running))
    return decision if drafts else _without_drafts(decision)


def _in_force(levers: tuple[SloAction, ...], *, fewer: bool) -> tuple[SloAction, ...]:
    others = tuple(lever for lever in levers if lever not in (SloAction.NOTHING, SloAction.ADMISSION_GIVES_WAY))
    return (*others, *[SloAction.ADMISSION_GIVES_WAY] * fewer) or (SloAction.NOTHING,)


def _without_drafts(decision: SloDecision) -> SloDecision:
    levers = tuple(
        lever for lever in decision.levers if lever not in (SloAction.DRAFTS_GIVE_WAY, SloAction.DRAFTS_GAIN)
    )
    return decision._replace(row_price=1.0, levers=levers or (SloAction.NOTHING_HELPS,), beside_prompts=False)


def _first_token(seen: SloObservation, late: float, max_running: int, *, tpot_slack: bool) -> SloDecision:
    """Requests wait too long: the time and the rows of drafts go to prefill, unless drafts free slots sooner."""
    if seen.waiting and seen.running >= max_running and seen.gain > 1.0:
        return SloDecision(
            1.0, 1.0, max_running, (SloAction.DRAFTS_GAIN,)
        )  # only what runs sooner to its end makes room
    price = 1.0 + _PRICE_STEP * (1.0 + late - AT_RISK)
    if not tpot_slack:
        return SloDecision(price, 1.0, max_running, (SloAction.DRAFTS_GIVE_WAY,), beside_prompts=True)
    return SloDecision(
        price, 2.0, max_running, (SloAction.DRAFTS_GIVE_WAY, SloAction.PREFILL_GAINS), beside_prompts=True
    )


def _each_token(seen: SloObservation, late: float, max_running: int, *, ttft_slack: bool) -> SloDecision:
    """Tokens come too slowly: drafts where they bring them sooner, then less prefill, then fewer at a time.

    The guard takes the drafts that make the most of the time of rounds that only decode. Where prompts take a share of
    the time, a sequence's time is worth less than that, and more drafts pay for it.
    """
    levers: list[SloAction] = []
    if seen.sequence_gain > 1.0:
        price = max(_LEAST_PRICE, 1.0 - seen.prefill_time)
        levers += [SloAction.DRAFTS_GAIN] * (price < 1.0)
    else:
        price = 1.0 + _PRICE_STEP * (1.0 + late - AT_RISK)
        levers.append(SloAction.DRAFTS_GIVE_WAY)
    share, running = 1.0, max_running
    if ttft_slack:
        share = 0.5
        levers.append(SloAction.PREFILL_GIVES_WAY)
        if late > 1.0:
            running = max(1, min(max_running, int(seen.running / late)))
            levers.append(SloAction.ADMISSION_GIVES_WAY)
    return SloDecision(price, share, running, tuple(levers) or (SloAction.NOTHING_HELPS,))


def _both(seen: SloObservation, late_tpot: float, max_running: int) -> SloDecision:
    """Both are late: only what makes more tokens in the same time helps both."""
    if seen.gain > 1.0:
        return SloDecision(1.0, 1.0, max_running, (SloAction.DRAFTS_GAIN, SloAction.NOTHING_HELPS))
    return SloDecision(
        1.0 + _PRICE_STEP * late_tpot, 1.0, max_running, (SloAction.DRAFTS_GIVE_WAY, SloAction.NOTHING_HELPS)
    )


def group_size(round_ms: Callable[[int], float], ready: int, *, bound_ms: float, turns_ms: float = inf) -> int:
    """Return how many of `ready` sequences share the next round.

    All of them share it where it keeps within `bound_ms`. Else the same number shares each of as few turns as keep
    within it. Groups are never smaller than LEAST_GROUP, and where a turn of all would take longer than `turns_ms`,
    there are none: every group reads the weights anew.

    `round_ms(sequences)` is the time of such a round, never falling.
    """
    if ready <= LEAST_GROUP or round_ms(ready) <= bound_ms:
        return ready
    fitting = bisect_right(range(1, ready + 1), bound_ms, key=round_ms)
    turns = ceil_div(ready, max(fitting, LEAST_GROUP))
    size = max(LEAST_GROUP, ceil_div(ready, turns))
    return size if turns * round_ms(size) <= turns_ms else ready


def rows_that_fit(round_ms: Callable[[int], float], base_rows: int, most: int, *, bound_ms: float) -> int:
    """Return how many rows of drafts, at most `most`, keep a round of `base_rows` within `bound_ms`.

    `round_ms(rows)` is the time of such a round, never falling.
    """
    return bisect_right(range(base_rows + 1, base_rows + most + 1), bound_ms, key=round_ms)


def round_bound_ms(seen_tpot_ms: float | None, objectives: Objectives, plain_ms: float) -> float:
    """Return the latency budget of a round: the operator's, and where TPOT is at risk, its objective: then a sequence
    meets it even if none of its drafts is accepted. Where rounds without drafts (`plain_ms`) are longer than that, only
    drafts can help, and there is no such bound."""
    bound_ms = objectives.max_round_ms or inf
    tpot = objectives.tpot
    if tpot.ms is not None and stress(seen_tpot_ms, tpot) >= AT_RISK and plain_ms <= tpot.ms:
        bound_ms = min(bound_ms, tpot.ms)
    return bound_ms


def predict_ttft_ms(ahead: int, gap_ms: float, alone_ms: float) -> float:
    """Return when a request that comes now can expect its first token. `ahead`: requests that must end before it may
    start; one ends every `gap_ms`. `alone_ms`: from its start to its first token."""
    return max(0, ahead) * gap_ms + alone_ms


def retry_s(expected_ms: float, objective: Objective) -> int:
    """Return after how many seconds a request can expect to meet its TTFT, as things are. That is when the surplus of
    the queue is gone, and 0 where the request can meet it now."""
    return max(0, ceil((expected_ms - objective.ms) / MS_PER_S)) if objective.ms is not None else 0
