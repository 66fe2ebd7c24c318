"""What a round is to the policies: who is in it, what was proposed, decided and found."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from policies.speculation.widths import pad_to_width


class Rest(StrEnum):
    """Which drafters are left alone for now, as their drafts bring less than they take. `DEAR`: those to which tokens
    cost time, and that have no gate; `ALL`: all of them. They are asked again now and then."""

    NONE = ""
    DEAR = "dear"
    ALL = "all"


class RoundSequence(NamedTuple):
    """One request's share of a round. `max_draft_tokens`: the most it may have. `num_query_tokens`: its rows before the
    draft. `free`: drafts whose rows are run anyway. `fixed`: the request fixed its depth, and gets `max_draft_tokens`
    whatever it costs."""

    key: str
    max_draft_tokens: int
    num_query_tokens: int = 1
    free: int = 0
    fixed: bool = False


class RoundContext(NamedTuple):
    """A round before its drafts. `base_rows`: what is charged without any. `room`: rows that may be added.
    `context_tokens`: positions held, on the average of the sequences. `widths`: see Capabilities.static_widths.
    `filling_rows`: what prefills run in the same forward. `row_price`: what a row of a draft is to be worth, in what
    it costs: above 1 drafts give way to something else, below 1 they are wanted (policies.serving.slo)."""

    places: Sequence[RoundSequence]
    base_rows: int
    room: int
    context_tokens: float = 0.0
    widths: Sequence[int] = ()
    filling_rows: int = 0
    row_price: float = 1.0


class DraftSummary(NamedTuple):
    """A draft as the policies see it: how many tokens, and how sure of each the drafter is.
    `drawn`: its tokens were drawn from distributions, so whether one is verified must not depend on what was drawn
    there or behind it."""

    tokens: int = 0
    confidences: Sequence[float] = ()
    drawn: bool = False


class DepthDecision(NamedTuple):
    """`depths[s]`: tokens of draft s to verify. Where it has fewer, the rest is filled up with any tokens, so that the
    forward has as many rows as the one before. `cumulative_acceptance[s]`: the chances of its tokens, all before
    included, as far as they were looked at: its first one at least. `forced`: some request fixed its depth. `regret`:
    see ShapeHysteresis. `asks`: places whose drafter was asked."""

    depths: list[int]
    cumulative_acceptance: list[list[float]]
    forced: bool = False
    regret: float = 0.0
    asks: int = 0


class DraftComparison(NamedTuple):
    """Of the leading draft tokens, `compared` could be compared with the target's choices, and `accepted` of them were
    equal. Tokens that were not verified are compared too, as far as the target went their way without them."""

    accepted: int = 0
    compared: int = 0


class RoundTimes(NamedTuple):
    """What a round took: making its drafts, and its forward with all else that goes with its rows. `beside`: meanwhile
    a drafter computed that may take the target's time, though no round waits for it. `reading`: it had a text to read
    first, so that there was no draft. `gated_ms`: of drafting, by drafters whose own gate judges what it is worth."""

    forward_ms: float
    draft_ms: float = 0.0
    beside: bool = False
    reading: bool = False
    gated_ms: float = 0.0


def count_added_rows(now: RoundContext, depths: Sequence[int]) -> int:
    if not any(depths):
        return 0
    if not now.widths:
        return sum(depths) - sum(
            [min(place.free, depth) for place, depth in zip(now.places, depths, strict=True) if place.free]
        )
    return sum(
        pad_to_width(place.num_query_tokens + depth, now.widths) - pad_to_width(place.num_query_tokens, now.widths)
        for place, depth in zip(now.places, depths, strict=True)
    )
