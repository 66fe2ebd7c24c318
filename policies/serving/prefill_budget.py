"""How many rows of prefill a forward may carry beside sequences that decode, so that their tokens keep coming.

A prefill makes every running stream wait for the whole forward. The wait is bounded by a time, not by a number of rows.
The cost of a row depends on the device, the model and the context, so it is measured as the loop runs.
Replays, of streams that were served before, have a budget of their own (policies.serving.replay_budget).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.running_mean import update_mean

# So many rows of prefill count as much as all that was known before. ADR 0014. Not tuned.
_HALF_WEIGHT_ROWS = 128
# Costs grow along a prompt (each row attends to more positions than the last) and vary by the forward. ADR 0014: with
# it 97 % of gaps keep `limits.max_itl_ms` of 200, the longest 201 ms (benchmarks, Scheduling).
_MARGIN = 1.35


def observe_prefill(row_ms: float | None, *, prefill_rows: int, decode_ms: float, forward_ms: float) -> float:
    """Return what a row of prefill adds to a forward (None: not measured yet), one more of them taken into account.

    `prefill_rows` (above 0) of it were prefill. `decode_ms`: what the rest of it takes alone, 0 where that is not known
    or there is none. Many rows teach more than few, whose share of what a forward costs anyway is large.
    """
    found_ms = max(0.0, forward_ms - decode_ms) / prefill_rows
    if row_ms is None:
        return found_ms
    mean_ms = update_mean(row_ms, found_ms, prefill_rows / (prefill_rows + _HALF_WEIGHT_ROWS))
    return min(max(row_ms, found_ms), max(min(row_ms, found_ms), mean_ms))


def rows_within(
    row_ms: float | None, *, decode_ms: float, bound_ms: float, most: int, least: int, share: float = 1.0
) -> int:
    """Return how many rows of prefill keep the forward within `share` (above 0) of `bound_ms`, from `least` to `most`;
    `least` where nothing was measured.

    Where decoding alone takes more than half of the bound, prefill gets as much time as decoding, or `share` of that
    where it is below 1. So on a device too slow for the bound, prompts still get on and streams at most halve their
    pace.
    """
    if row_ms is None:
        return least
    room_ms = max(share * bound_ms - decode_ms, min(share, 1.0) * decode_ms)
    if room_ms >= most * row_ms * _MARGIN:
        return most
    return max(least, int(room_ms / (row_ms * _MARGIN)))


def share_prefill_rows(wanted: Sequence[int], rows: int, *, min_rows: int) -> list[tuple[int, int]]:
    """Return which of some prefills get rows, by their place, and how many. The oldest comes first; each can use so
    many as it `wanted` (above 0), and is charged for `min_rows` at least.

    Half of the rows are for the oldest, so that it always gets on. The rest is for the shortest, so that a long prompt
    does not hold up short ones. Rows that they leave are the oldest's.
    """
    if not wanted or rows < min_rows:
        return []
    shortest = sorted(range(1, len(wanted)), key=lambda place: wanted[place])
    half = min(wanted[0], rows if not shortest else max(rows // 2, min_rows))
    left = rows - max(half, min_rows)
    given: list[tuple[int, int]] = []
    for place in shortest:
        if left < min_rows:
            break
        given.append((place, min(wanted[place], left)))
        left -= max(given[-1][1], min_rows)
    return [(0, min(wanted[0], half + max(0, left))), *given]
