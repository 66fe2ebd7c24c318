"""How many rows of prefill a forward may carry beside sequences that decode, so that their tokens keep coming.

A prefill makes every running stream wait for the whole forward. The wait is bounded by a time, not by a number of rows.
The cost of a row depends on the device, the model and the context, so it is measured as the loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECODE_WEIGHT = 0.2  # of the newest forward, in an exponential mean
_HALF_WEIGHT_ROWS = 128  # so many rows of prefill count as much as all that was known before
_MARGIN = 1.35  # costs grow along a prompt (each row attends to more positions than the last) and vary by the forward


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """`decode_ms`: a forward that only decodes. `row_ms`: what one row of prefill adds. None where not measured yet."""

    decode_ms: float | None = None
    row_ms: float | None = None


def observe_prefill(cost: PrefillCost, *, prefill_rows: int, decoding: bool, forward_ms: float) -> PrefillCost:
    """Return the cost with one forward taken into account.

    `prefill_rows` of it were prefill, and `decoding` says whether sequences decoded in it too. Many rows teach more
    than few, whose share of what a forward costs anyway is large.
    """
    if not prefill_rows:
        return PrefillCost(_mean(cost.decode_ms, forward_ms, _DECODE_WEIGHT), cost.row_ms) if decoding else cost
    base_ms = (cost.decode_ms or 0.0) if decoding else 0.0
    found_ms = max(0.0, forward_ms - base_ms) / prefill_rows
    weight = prefill_rows / (prefill_rows + _HALF_WEIGHT_ROWS)
    return PrefillCost(cost.decode_ms, _mean(cost.row_ms, found_ms, weight))


def rows_within(cost: PrefillCost, *, bound_ms: float, most: int, least: int, share: float = 1.0) -> int:
    """Return how many rows keep the forward within `share` (above 0) of `bound_ms`, from `least` to `most`; `least`
    where nothing was measured.

    Where decoding alone takes more than half of the bound, prefill gets as much time as decoding, or `share` of that
    where it is below 1. So on a device too slow for the bound, prompts still get on and streams at most halve their
    pace.
    """
    if cost.row_ms is None:
        return least
    decode_ms = cost.decode_ms or 0.0
    room_ms = max(share * bound_ms - decode_ms, min(share, 1.0) * decode_ms)
    if room_ms >= most * cost.row_ms * _MARGIN:
        return most
    return max(least, int(room_ms / (cost.row_ms * _MARGIN)))


def _mean(before: float | None, now: float, weight: float) -> float:
    return now if before is None else min(max(before, now), max(min(before, now), before + weight * (now - before)))
