"""Which waiting requests may start, and which running one gives way when the KV pool is full."""

from __future__ import annotations

from collections.abc import Sequence


def count_admissible_requests(
    waiting_blocks: Sequence[int], *, free_blocks: int, running: int, max_running: int, spare_blocks: int
) -> int:
    """Return how many of the waiting requests start now, in order (the first that does not fit stops the rest).

    `waiting_blocks[i]` is what request i's known tokens take. `spare_blocks` stay free for what already runs,
    unless nothing runs: then the first request may take everything.
    """
    count = 0
    for blocks in waiting_blocks:
        spare = spare_blocks if running + count else 0
        if running + count >= max_running or blocks + spare > free_blocks:
            break
        free_blocks -= blocks
        count += 1
    return count


def expect_gap_s(
    *, ends_gap_s: float | None, service_s: float | None, slots: int, left_s: float | None, waited_s: float
) -> float:
    """Return in about how many seconds the next stream ends, where `slots` of them run.

    `ends_gap_s` lay between the last ends, on the mean, also where nothing ran between them. `service_s` is what a
    stream takes, on the mean. Where neither is known, `left_s` is what the one that is nearest to its end needs at its
    own pace. `waited_s`: none has ended for so long, though some ran. What did not happen for so long is not expected
    sooner.
    """
    of_service_s = None if service_s is None or slots < 1 else service_s / slots
    measured = [gap_s for gap_s in (ends_gap_s, of_service_s) if gap_s is not None]
    return max(min(measured) if measured else left_s or 0.0, waited_s)


def victims(held_blocks: Sequence[int], *, missing: int) -> int:
    """Return how many of the youngest running requests must give way to free `missing` blocks.

    `held_blocks` is in order of admission; the oldest is never chosen, so there is always progress.
    """
    count = 0
    for blocks in reversed(held_blocks[1:]):
        if missing <= 0:
            break
        missing -= blocks
        count += 1
    return count
