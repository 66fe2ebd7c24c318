"""How much replay running streams bear: many streams that come from a dead worker at once are computed again beside
them, for seconds.

A chunk of replay costs much before its first row, since it reads all that is cached of its stream. So a chunk is no
smaller than is worth that, and forwards between chunks only decode, until the mean is right. What replays took is
measured, not predicted: costs that are off, drafts and a busy machine change the pace of replays and not the share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.running_mean import update_mean
from policies.serving.prefill_budget import observe_prefill

REPLAY_SHARE = 0.5
"""Replays take at most this share of the time that forwards take without them. ADR 0052: mean ITL 96 to 101 ms, with
1.0 125 to 131, without a budget 161; with 0.25 the last waits four times as long."""
# Fewer are not worth a chunk. ADR 0052: 16 rows behind 900 tokens cost 1.5 to 5 ms each, 64 rows 1.2.
_CHUNK_ROWS = 32
# Where so many take longer than a forward may. ADR 0052.
_LEAST_ROWS = 16
# In forwards that only decode: so replays get on, whatever one of them took. ADR 0052: after eight forwards at the
# latest.
_MOST_DEBT = 4.0
# Weight of the newest forward in what decoding takes. ADR 0052. Not tuned: every second forward tells.
_NEWEST = 0.25


class ReplayBudget(NamedTuple):
    """`decode_ms`: what a forward takes that only decodes, drafts included; 0 where none was seen. `debt_ms`: what
    replays took beyond their share. `rests`: the last forward had a replay, so the next one has none. `row_ms`: what a
    row of replay adds to a forward (None: not measured yet)."""

    decode_ms: float = 0.0
    row_ms: float | None = None
    debt_ms: float = 0.0
    rests: bool = False

    @property
    def spent(self) -> bool:
        """True where the next forward is to have no replay."""
        return self.rests or self.debt_ms > 0.5 * REPLAY_SHARE * self.decode_ms


def observe_decoding(budget: ReplayBudget, forward_ms: float) -> ReplayBudget:
    decode_ms = update_mean(budget.decode_ms or forward_ms, forward_ms, _NEWEST)
    debt_ms = max(0.0, budget.debt_ms - REPLAY_SHARE * decode_ms)
    return ReplayBudget(decode_ms, budget.row_ms, debt_ms)


def observe_replay(budget: ReplayBudget, forward_ms: float, *, rows: int) -> ReplayBudget:
    """Return the budget after a forward that decoded and replayed so many rows (above 0)."""
    decode_ms = budget.decode_ms
    row_ms = observe_prefill(budget.row_ms, prefill_rows=rows, decode_ms=decode_ms, forward_ms=forward_ms)
    debt_ms = budget.debt_ms + max(0.0, forward_ms - decode_ms) - REPLAY_SHARE * decode_ms
    return ReplayBudget(decode_ms, row_ms, min(max(0.0, debt_ms), _MOST_DEBT * decode_ms), rests=True)


def bound_replay_rows(budget: ReplayBudget, *, bound_ms: float, most: int) -> int:
    """Return the rows of replay that the next forward may have, up to `most`; 0 where it is to have none.

    A chunk takes twice the share, as every second forward at most has one, or _CHUNK_ROWS where these keep the forward
    within `bound_ms`.
    """
    if budget.spent:
        return 0
    if budget.row_ms is None:
        return min(most, _CHUNK_ROWS)
    room_ms = max(2.0 * REPLAY_SHARE * budget.decode_ms, min(_CHUNK_ROWS * budget.row_ms, bound_ms - budget.decode_ms))
    if room_ms >= most * budget.row_ms:
        return most
    return min(most, max(_LEAST_ROWS, int(room_ms / budget.row_ms)))


def share_replay_rows(wanted: Sequence[int], rows: int, *, min_rows: int) -> list[int]:
    """Return the rows that each of some replays gets, in their order; they `wanted` so many (above 0).

    The first gets all that it can use: one stream that goes on is worth more than two that nearly do. Each that gets
    any is charged for `min_rows` at least.
    """
    given = []
    for need in wanted:
        taken = min(need, rows) if rows >= min_rows else 0
        given.append(taken)
        rows -= max(taken, min_rows) if taken else 0
    return given
