"""Which part of its KV cache a target is loaded with where memory is short."""

from __future__ import annotations

SHARES = (1, 2, 4)
"""A whole KV cache, a half, a quarter: what is tried, in this order (docs/configuration.md, "Out of memory"). ADR 0049,
0053. Not tuned."""

_NAMES = {1: "all", 2: "half", 4: "a quarter"}


def name_share(share: int) -> str:
    """Return what a part of so many is called: "half" of a KV cache."""
    return _NAMES[share]


def choose_share(kv_cache_bytes: int, other_bytes: int, room_bytes: int) -> int | None:
    """Return the first share whose KV cache fits into the room beside what else is needed; None where none does."""
    return next((share for share in SHARES if kv_cache_bytes // share + other_bytes <= room_bytes), None)


def find_next_share(share: int) -> int | None:
    """Return the share to try after one that was too large; None after the last."""
    return next((larger for larger in SHARES if larger > share), None)
