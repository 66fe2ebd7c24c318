"""Every round's depths: one PID controller for each request, under the guard of goodput, behind switches.

    decide_draft_limits -> (the drafter drafts) -> decide_depths -> (the target verifies) -> observe_round

Each request's PID controller holds its acceptance rate at a set point. That is the configured one, or the rate that its
drafts lead to expect where that is less. So it cuts drafts that keep less than they promise, and leaves alone those
that are only hard (ADR 0028). The guard then takes from all drafts the tokens that are worth their rows. Verdicts
correct each request's chances (policies.speculation.odds), rounds correct the costs (policies.speculation.cost_model),
and the switches leave drafters alone whose drafts do not pay for what they cost.
"""

from policies.speculation.ask import decide_draft_limits as decide_draft_limits
from policies.speculation.ask import decide_pause as decide_pause
from policies.speculation.ask import find_rest as find_rest
from policies.speculation.ask import least_chance as least_chance
from policies.speculation.ask import observe_pause as observe_pause
from policies.speculation.learn import observe_round as observe_round
from policies.speculation.select import decide_depths as decide_depths
from policies.speculation.state import SpeculationState as SpeculationState
from policies.speculation.state import end_request as end_request
from policies.speculation.state import start_request as start_request
from policies.speculation.types import DepthDecision as DepthDecision
from policies.speculation.types import DraftComparison as DraftComparison
from policies.speculation.types import DraftSummary as DraftSummary
from policies.speculation.types import Rest as Rest
from policies.speculation.types import RoundContext as RoundContext
from policies.speculation.types import RoundSequence as RoundSequence
from policies.speculation.types import RoundTimes as RoundTimes
