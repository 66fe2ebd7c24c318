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

from policies.sampling.coupled import choose
from policies.sampling.filters import distribution
from policies.sampling.params import (
    Acceptance,
    BestRows,
    Breaker,
    Dry,
    NotFinite,
    Row,
    Rule,
    Sampling,
    require_finite,
)
from policies.sampling.tolerance import ToleranceGoal, ToleranceState, calibrate_tolerance, watch_tolerance
from policies.sampling.verify import (
    PROPOSAL_WIDTH,
    CoupledDraft,
    DraftDistribution,
    VerifiedDraft,
    propose,
    verify_coupled_drafts,
    verify_draft,
)

__all__ = [
    "PROPOSAL_WIDTH",
    "Acceptance",
    "BestRows",
    "Breaker",
    "CoupledDraft",
    "DraftDistribution",
    "Dry",
    "NotFinite",
    "Row",
    "Rule",
    "Sampling",
    "ToleranceGoal",
    "ToleranceState",
    "VerifiedDraft",
    "calibrate_tolerance",
    "choose",
    "distribution",
    "propose",
    "require_finite",
    "verify_coupled_drafts",
    "verify_draft",
    "watch_tolerance",
]
