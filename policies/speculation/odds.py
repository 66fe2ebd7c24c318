"""How a request's drafts fare against the chances that were given for them, as one factor on the odds.

A draft token's chance c (from its drafter, or usual at its position) becomes c w / (1 - c + c w), with log w learned
from verdicts. It is a logistic regression with an offset and one coefficient, updated by its Laplace approximation

    log w += sum of (outcome - chance) / precision;   precision = fade * precision + sum of chance * (1 - chance)

over the tokens that could be compared: all accepted ones and the first that was not (McCormick, Raftery and others,
"Dynamic logistic regression", 2012, section 2). `fade` forgets slowly, for a steady text. Surprises that add up to two
and a quarter standard deviations make it forget at once, so that a text whose acceptance changes is followed within a
few rounds.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

# ADR 0039: of the precision, a verdict. The factor is worth -0.1 % in the mean, and recovers in 3 to 9 rounds, not 15
# to 30 (ADR 0043).
FADE = 0.985
PRIOR_PRECISION = 3.0
"""A request's factor is at first known to about a factor e. ADR 0039. Not tuned apart."""
MOST = 6.0
"""|log w| stays within this: further, it would take too long to come back. Not tuned: a factor of 400 either way."""
# Of the sum of surprises, from one verdict to the next. ADR 0039: forgetting after surprises brings recovery from 7 to
# 14 rounds down to 4 to 7 (ADR 0043).
_RECENT = 0.7
# About 2.4 standard deviations: a surprise by chance in one of 70 verdicts (ADR 0039). Not tuned apart.
_SIGMAS_SQUARED = 6.0
# Of the precision, after a surprise. ADR 0039, 0043, as above.
_FORGETTING = 0.12
# So that one step stays finite. Not tuned apart (ADR 0039).
_LEAST_PRECISION = 0.25
# Added to the variance: a single token that was thought certain is no proof. ADR 0039.
_UNCERTAIN = 0.3
# The furthest that one verdict moves log w. ADR 0039. Not tuned apart.
_STEP = 2.0


class Odds(NamedTuple):
    """`log_factor` is log w, `factor` is w. `surprise` and `spread`: recent outcomes less their chances, and the
    variance that this sum would have if the chances were right."""

    log_factor: float = 0.0
    factor: float = 1.0
    precision: float = PRIOR_PRECISION
    surprise: float = 0.0
    spread: float = 0.0


def observe_acceptance_gap(odds: Odds, gap: float, variance: float) -> Odds:
    """Take in verdicts: `gap` is the sum of outcomes less chances, `variance` the sum of chance * (1 - chance)."""
    surprise = _RECENT * odds.surprise + gap
    spread = _RECENT * _RECENT * odds.spread + variance
    precision = FADE * odds.precision + variance
    if surprise * surprise > _SIGMAS_SQUARED * (spread + _UNCERTAIN):
        precision = max(_FORGETTING * precision, _LEAST_PRECISION)
        surprise = spread = 0.0
    step = gap / max(precision, _LEAST_PRECISION)
    log_factor = odds.log_factor + (_STEP if step > _STEP else -_STEP if step < -_STEP else step)
    log_factor = MOST if log_factor > MOST else -MOST if log_factor < -MOST else log_factor
    return Odds(log_factor, exp(log_factor), precision, surprise, spread)
