"""How long a round may wait for drafts that another process makes.

A wait is worth what `policies/speculation/gate` says of it: w ms while w + a r < a t, where each of the a accepted
tokens is a row of r ms more to verify. Decoding makes a token in t ms meanwhile: in T / g, where a round without drafts
takes T ms and rounds with them make g times as many tokens. So a wait that costs more tokens than it brings
is none (Dinkelbach 1967). A drafter that is slower than that is asked all the same, and not waited for. An answer that
comes late may still fit behind the target's choices in the meantime.

How far a draft worker runs ahead of a target that is behind a link.

With a round trip of r ms the worker learns of a verdict r/2 late, and its lines arrive r/2 late. Meanwhile the target
runs r / T rounds of T ms, and takes a tokens of its drafts and one of its own in each. So a line must be longer by
(1 + a) r / T tokens than one that takes no time on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from policies.running_mean import update_mean
from policies.speculation.gate import worth_ms
from policies.speculation.probe import Probe

MOST_LEAD = 64
"""Tokens. A longer lead is a guess that hardly ever comes true."""
RESTS_AFTER = 24
"""Rounds in which nobody asks, and nothing is drafted ahead any more. Not tuned: above the 20 from one ask to the next
of drafts that hardly pay (`ask.SELDOM_OF_MANY`), which have to be there when they are asked for."""
_NOTICED = 0.1  # of a token: links of one host take less
_NEWEST = 0.1  # weight of the newest answer in running means
RETRY = Probe(64)
"""One request in so many is waited for although the drafter seems too slow: it may be faster while the target waits."""


def count_lead_tokens(rtt_ms: float, round_ms: float, accepted: float) -> int:
    """Return how many tokens a round trip is worth, at rounds of so many ms (0: not known, so none) and so many
    accepted tokens in each."""
    if round_ms <= 0.0:
        return 0
    return max(0, min(MOST_LEAD, ceil((1.0 + accepted) * rtt_ms / round_ms - _NOTICED)))


@dataclass(frozen=True, slots=True)
class DraftWait:
    """Running means: accepted drafts per answered sequence, and the time from a request to its answer (0 ms: not
    measured yet). `asks` counts requests. It begins hopeful, so that waiting is tried."""

    accepted: float = 1.0
    answer_ms: float = 0.0
    asks: int = 0


def count_draft_request(pace: DraftWait) -> DraftWait:
    return replace(pace, asks=pace.asks + 1)


def observe_draft_answer(pace: DraftWait, answer_ms: float) -> DraftWait:
    return replace(pace, answer_ms=update_mean(pace.answer_ms or answer_ms, answer_ms, _NEWEST))


def observe_accepted_tokens(pace: DraftWait, accepted: int) -> DraftWait:
    """Take in how many tokens of one sequence's draft the target chose too."""
    return replace(pace, accepted=update_mean(pace.accepted, accepted, _NEWEST))


def gain_ms(pace: DraftWait, token_ms: float, row_ms: float, served: float) -> float:
    """Return what waiting for an answer is worth where `served` tokens of a round are expected to be right without."""
    return worth_ms(max(0.0, pace.accepted - served), max(0.0, token_ms - row_ms))


def patience_ms(pace: DraftWait, token_ms: float, row_ms: float, bound_ms: float) -> float:
    """Return how long to wait for the answer to this request, at most `bound_ms`. `token_ms`: in how long decoding
    makes a token (0: not known), `row_ms`: what a row more adds to a round."""
    wait_ms = min(bound_ms, worth_ms(pace.accepted, max(0.0, token_ms - row_ms))) if token_ms else bound_ms
    return wait_ms if pace.answer_ms <= wait_ms or RETRY.is_due(pace.asks) else 0.0
