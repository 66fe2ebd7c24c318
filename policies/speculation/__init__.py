"""Every round's depths: one PID controller for each request, under the guard of goodput, behind switches.

    decide_draft_limits -> (the drafter drafts) -> decide_depths -> (the target verifies) -> observe_round

Each request's PID controller holds its acceptance rate at a set point. That is the configured one, or the rate that its
drafts lead to expect where that is less. So it cuts drafts that keep less than they promise, and leaves alone those
that are only hard (ADR 0028). The guard then takes from all drafts the tokens that are worth their rows. Verdicts
correct each request's chances (policies.speculation.odds), rounds correct the costs (policies.speculation.cost_model),
and the switches leave drafters alone whose drafts do not pay for what they cost.
"""

from policies.speculation.ask import decide_draft_limits, decide_pause, find_rest, least_chance, observe_pause
from policies.speculation.learn import observe_round
from policies.speculation.select import decide_depths
from policies.speculation.state import SpeculationState, end_request, start_request
from policies.speculation.types import (
    DepthDecision,
    DraftComparison,
    DraftSummary,
    Rest,
    RoundContext,
    RoundSequence,
    RoundTimes,
)

__all__ = [
    "DepthDecision",
    "DraftComparison",
    "DraftSummary",
    "Rest",
    "RoundContext",
    "RoundSequence",
    "RoundTimes",
    "SpeculationState",
    "decide_depths",
    "decide_draft_limits",
    "decide_pause",
    "end_request",
    "find_rest",
    "least_chance",
    "observe_pause",
    "observe_round",
    "start_request",
]
