"""How far a draft worker runs ahead of a target that is behind a link.

With a round trip of r ms the worker learns of a verdict r/2 late, and its lines arrive r/2 late. Meanwhile the target
runs r / T rounds of T ms, and takes a tokens of its drafts and one of its own in each. So a line must be longer by
(1 + a) r / T tokens than one that takes no time on its way.
"""

from __future__ import annotations

from math import ceil

MOST_LEAD = 64
"""Tokens. A longer lead is a guess that hardly ever comes true."""
_NOTICED = 0.1  # of a token: links of one host take less


def count_lead_tokens(rtt_ms: float, round_ms: float, accepted: float) -> int:
    """Return how many tokens a round trip is worth, at rounds of so many ms (0: not known, so none) and so many
    accepted tokens in each."""
    if round_ms <= 0.0:
        return 0
    return max(0, min(MOST_LEAD, ceil((1.0 + accepted) * rtt_ms / round_ms - _NOTICED)))
