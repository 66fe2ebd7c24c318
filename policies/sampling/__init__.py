"""Which tokens of a verified draft become output.

Glossary (the field's terms):
    draft      a token that a drafter proposed for a position
    accepted   a draft that becomes output
    recovered  the token chosen at the first position where the draft was not accepted
    bonus      the target's choice after the last draft, when all were accepted
    depth      the number of drafts of one sequence in one round (k)
    proposal   the distribution that a draft was drawn from (q); the target's is p

Rules:
    greedy     temperature 0: a draft is accepted when it is the target's best token
    coupled    a draft is accepted when it is the target's own choice at its position: argmax over its filtered,
               temperature-scaled log-probabilities plus the noise of (seed, position, token). It does not depend on the
               draft, so the output is the target's own sample, token for token, whatever was proposed
    rejection  the output is distributed as the target's, and which sample it is depends on the drafts
    tolerance  lossy: drafts that the target finds a little less likely than the drafter are accepted too

Every verdict holds at least one token: where nothing may follow the last committed token, a sequence has ended and is
not judged.
"""

from policies.sampling.coupled import choose as choose
from policies.sampling.filters import distribution as distribution
from policies.sampling.params import Acceptance as Acceptance
from policies.sampling.params import BestRows as BestRows
from policies.sampling.params import Breaker as Breaker
from policies.sampling.params import Dry as Dry
from policies.sampling.params import NotFinite as NotFinite
from policies.sampling.params import Row as Row
from policies.sampling.params import Rule as Rule
from policies.sampling.params import Sampling as Sampling
from policies.sampling.params import require_finite as require_finite
from policies.sampling.tolerance import ToleranceGoal as ToleranceGoal
from policies.sampling.tolerance import ToleranceState as ToleranceState
from policies.sampling.tolerance import calibrate_tolerance as calibrate_tolerance
from policies.sampling.tolerance import watch_tolerance as watch_tolerance
from policies.sampling.verify import PROPOSAL_WIDTH as PROPOSAL_WIDTH
from policies.sampling.verify import CoupledDraft as CoupledDraft
from policies.sampling.verify import DraftDistribution as DraftDistribution
from policies.sampling.verify import VerifiedDraft as VerifiedDraft
from policies.sampling.verify import propose as propose
from policies.sampling.verify import verify_coupled_drafts as verify_coupled_drafts
from policies.sampling.verify import verify_draft as verify_draft
