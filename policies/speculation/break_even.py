"""When drafting pays, whoever drafts.

Let T be the time of a round without drafts, c the time that drafts add to it and a the mean number of accepted drafts
per sequence. A round with drafts then yields 1 + a tokens per sequence in T + c, and one without yields 1 in T. Drafts
pay while (T + c) / (1 + a) < T, so while c < a T (the condition of Leviathan et al., arXiv 2211.17192, section 3.5, in
measured times). Within a draft, one token more pays while the chance that it is accepted, times T, is above what it
takes.
"""

from __future__ import annotations


def worth_ms(accepted: float, round_ms: float) -> float:
    """Return what drafts with so many accepted tokens per sequence may add to a round of `round_ms` at most."""
    return accepted * round_ms


def token_price(step_ms: float, round_ms: float) -> float:
    """Return the chance of being accepted below which a further token is not worth what it takes (0 ms: unknown)."""
    return step_ms / round_ms if round_ms > 0.0 else 0.0
