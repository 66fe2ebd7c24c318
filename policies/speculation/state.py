"""All that is known between rounds, and what follows from it: what a row of a draft has to bring."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.speculation import class_prior, odds, pid
from policies.speculation.class_prior import COLD, ClassKey, Course, Seed
from policies.speculation.cost_model import MeasuredCost
from policies.speculation.odds import Odds
from policies.speculation.pid import GAINS, Gains, Limits, Pid
from policies.speculation.shape_hysteresis import SameRows
from policies.speculation.switching import ON, Switch
from policies.speculation.types import Round

_HOPED = 0.1  # tokens that a draft is thought to bring at first
_LOADS = 6
_PROMISES = 4.0  # accepted tokens that are taken as promised at first
_MOST_OPTIMISM = 1.3


class Request(NamedTuple):
    """What is known of one request. `limits` of its controller. `evidence`: draft tokens that were judged."""

    of: ClassKey
    limits: Limits
    pid: Pid
    odds: Odds
    evidence: int = 0


class Speculation(NamedTuple):
    """All that is known. `cold`: what is taken to be usual in a class of which nothing is. `gain`: tokens that a round
    makes to those of plain decoding in the same time, on the average: the worth of time. `step_ms`: what
    drafting takes for each token of a round's longest draft. `ask_ms`: what drafting takes for each sequence that
    is asked, `brought[load_of(n)]`: tokens that this brings for each of n, less those that decoding makes in the time
    that their rows add. `promised`, `kept`: tokens of late that verified drafts promised, and that were accepted."""

    cost: MeasuredCost
    gains: Gains = GAINS
    requests: Mapping[str, Request] = MappingProxyType({})
    seeds: Mapping[ClassKey, Seed] = MappingProxyType({})
    cold: Seed = COLD
    switch: Switch = ON  # of drafters that take time
    gain: float = 1.0
    step_ms: float = 0.0
    rounds: int = 0
    same: SameRows = SameRows()
    ask_ms: float = 0.0
    brought: tuple[float, ...] = (_HOPED,) * _LOADS
    promised: float = 0.0
    kept: float = 0.0


def begun(state: Speculation, key: str, of: ClassKey, most: int) -> Speculation:
    """A request begins (or goes on after it gave way: then it is known). `most`: the most drafts it may ever have."""
    if key in state.requests:
        return state
    running = [_course(known) for known in state.requests.values() if known.of == of]
    seed = class_prior.with_running(state.seeds.get(of, state.cold), running)
    limits = Limits(min(1, most), most)
    request = Request(of, limits, pid.begun(seed.depth, limits), odds.begun(seed.log_factor))
    return state._replace(requests={**state.requests, key: request})


def ended(state: Speculation, key: str) -> Speculation:
    """A request ended; an unknown one is ignored."""
    request = state.requests.get(key)
    if request is None:
        return state
    left = {other: known for other, known in state.requests.items() if other != key}
    seed = class_prior.ended(state.seeds.get(request.of, state.cold), _course(request))
    return state._replace(requests=left, seeds=class_prior.remembered(state.seeds, request.of, seed))


def _course(request: Request) -> Course:
    return Course(request.pid.integral, request.odds.log_factor, request.evidence)


def load_of(sequences: int) -> int:
    """Return the place of a number of sequences among loads of 1, 2 to 3, 4 to 7, ... of them: what speculation brings
    where one runs says nothing of where many do."""
    return min(sequences.bit_length(), _LOADS) - 1


def base_ms(state: Speculation, now: Round) -> float:
    """Return what this round takes without drafts."""
    return state.cost.ms(now.base_rows, len(now.places), now.context_tokens)


def worth_per_ms(state: Speculation, now: Round) -> float:
    """Return what a row of a draft has to bring: the tokens per ms that decoding makes on the average, at this round's
    load and price."""
    return now.row_price * max(1.0, state.gain) * len(now.places) / base_ms(state, now)


def optimism(state: Speculation) -> float:
    """Return how many times as many tokens the chances of verified drafts promise as are accepted, 1 or more. To take
    the best of many estimates is to take those that err upwards (Smith and Winkler, "The optimizer's curse", 2006)."""
    return min(_MOST_OPTIMISM, max(1.0, (state.promised + _PROMISES) / (state.kept + _PROMISES)))
