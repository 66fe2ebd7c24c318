"""All that is known between rounds, and what follows from it: what a row of a draft has to bring."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.speculation import pid
from policies.speculation.cost_model import CostModel
from policies.speculation.odds import Odds
from policies.speculation.pid import DEFAULTS, DepthLimits, PidSettings, PidState
from policies.speculation.shape_hysteresis import ShapeHysteresis
from policies.speculation.switching import ON, SpeculationSwitch, observe_start
from policies.speculation.types import RoundContext

# Tokens that a draft is thought to bring at first. Not tuned: learned within a few rounds that ask.
_HOPED = 0.1
COLD_DEPTH = 2.0
"""Where nothing is known requests begin here: deep enough to learn, and cheap where it goes wrong. ADR 0058: no
constant beats 2 by 2 %, and nor would a perfect predictor."""


class RequestState(NamedTuple):
    """What is known of one request. `limits` of its controller."""

    limits: DepthLimits
    pid: PidState
    odds: Odds = Odds()


class SpeculationState(NamedTuple):
    """All that is known. `first_depth`: where the controllers of new requests begin. `gain`: tokens that a round
    makes to those of plain decoding in the same time, on the average: the worth of time. `step_ms`: what
    drafting takes for each token of a round's longest draft. `ask_ms`: what drafting takes for each sequence that
    is asked, `brought`: tokens that this brings, less those that decoding makes in the time that their rows add."""

    cost: CostModel
    settings: PidSettings = DEFAULTS
    requests: Mapping[str, RequestState] = MappingProxyType({})
    first_depth: float = COLD_DEPTH
    switch: SpeculationSwitch = ON  # of drafters that take time and have no gate
    gain: float = 1.0
    step_ms: float = 0.0
    rounds: int = 0
    shape: ShapeHysteresis = ShapeHysteresis()
    ask_ms: float = 0.0
    brought: float = _HOPED


def start_request(state: SpeculationState, key: str, most: int, *, sure: bool = False) -> SpeculationState:
    """A request begins (or goes on after it gave way: then it is known). `most`: the most drafts it may ever have;
    `sure`: it begins with as many."""
    if key in state.requests:
        return state
    limits = state.settings.limits(most)
    request = RequestState(limits, pid.start_pid(most if sure else state.first_depth, limits))
    return state._replace(requests={**state.requests, key: request}, switch=observe_start(state.switch))


def end_request(state: SpeculationState, key: str) -> SpeculationState:
    """A request ended; an unknown one is ignored."""
    if key not in state.requests:
        return state
    return state._replace(requests={other: known for other, known in state.requests.items() if other != key})


def base_ms(state: SpeculationState, now: RoundContext) -> float:
    return state.cost.ms(now.base_rows, len(now.places), now.context_tokens)


def worth_per_ms(state: SpeculationState, now: RoundContext) -> float:
    """Return what a row of a draft has to bring: the tokens per ms that decoding makes on the average, at this round's
    load and price."""
    return now.row_price * max(1.0, state.gain) * len(now.places) / base_ms(state, now)
