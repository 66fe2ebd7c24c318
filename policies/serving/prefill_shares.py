"""How many rows of a forward go to prefills: those of new prompts, and replays of streams that were served before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.serving.prefill_budget import rows_within, share_prefill_rows
from policies.serving.replay_budget import ReplayBudget, bound_replay_rows, share_replay_rows

_LEAST_ROWS = 16
"""Prefills get so many rows, whatever they take. ADR 0014: the first prefill beside decoding, before anything was
measured, has as many."""


class PrefillRows(NamedTuple):
    """The most rows of prefill beside sequences that decode: of all, and of replays where no new prompt waits."""

    every: int
    replays: int


class PrefillShares(NamedTuple):
    """Who gets rows of a forward, in the order in which they are run: (place among the replays or prompts, rows)."""

    replays: list[tuple[int, int]]
    prompts: list[tuple[int, int]]


def bound_prefill_rows(
    replays: ReplayBudget,
    *,
    row_ms: float | None,
    decode_ms: float,
    bound_ms: float,
    most: int,
    share: float = 1.0,
    waits: bool,
) -> PrefillRows:
    """Return the rows of prefill that a forward may have beside sequences that decode, up to `most`.

    `row_ms`, `decode_ms`, `bound_ms` and `share`: see `rows_within`. `waits`: a stream waits for replays (see
    `waits_for_replays`), so that they have a budget of their own.
    """
    every = rows_within(
        row_ms, decode_ms=decode_ms, bound_ms=bound_ms, most=most, least=min(most, _LEAST_ROWS), share=share
    )
    if not waits:
        return PrefillRows(every, every)
    return PrefillRows(every, bound_replay_rows(replays, bound_ms=bound_ms, most=most if share >= 1.0 else every))


def waits_for_replays(first_token_s: Sequence[float], came_s: Sequence[float]) -> bool:
    """Return whether a stream that decodes did so before the first replay came. Those that came with it have waited as
    well, and gain from its end.

    `first_token_s`: when each sequence that decodes had its first token, 0 where it has none yet; `came_s`: when each
    replay came; by one clock.
    """
    first_s = min(came_s, default=0.0)
    return any(0.0 < wait_s <= first_s for wait_s in first_token_s)


def share_rows(
    replays: Sequence[int], prompts: Sequence[int], rows: int, *, bound: PrefillRows | None, min_rows: int
) -> PrefillShares:
    """Share `rows` between replays and prompts, which can use so many each (above 0); each is charged for `min_rows`
    at least. `bound`: None where no sequence decodes.

    Replays come first. Where there are both, replays have half of the rows, and prompts the rest with all that replays
    leave.
    """
    replay_rows = rows
    if bound is not None:
        replay_rows, rows = min(rows, bound.replays), min(rows, bound.every)
    if prompts:
        replay_rows = max(rows // 2, min(rows, min_rows))
    taken = share_replay_rows(replays, replay_rows, min_rows=min_rows)
    given = [(place, count) for place, count in enumerate(taken) if count]
    left = rows - sum([max(count, min_rows) for _, count in given])
    return PrefillShares(given, share_prefill_rows(prompts, left, min_rows=min_rows))
