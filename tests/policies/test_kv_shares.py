"""A KV cache that is too large is halved, and halved again, and no more often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.models.kv_shares import SHARES, choose_share, find_next_share

sizes = st.integers(0, 1 << 40)


@given(sizes, sizes, sizes)
def test_the_largest_part_that_fits_is_taken(kv_cache: int, other: int, room: int) -> None:
    share = choose_share(kv_cache, other, room)
    fits = [share for share in SHARES if kv_cache // share + other <= room]
    assert share == (fits[0] if fits else None)


@given(sizes, sizes, sizes, sizes)
def test_more_room_never_means_a_smaller_part(kv_cache: int, other: int, room: int, more: int) -> None:
    before, after = choose_share(kv_cache, other, room), choose_share(kv_cache, other, room + more)
    assert before is None or (after is not None and after <= before)


def test_each_part_is_tried_once() -> None:
    shares: list[int] = [SHARES[0]]
    while (following := find_next_share(shares[-1])) is not None:
        shares.append(following)
    assert tuple(shares) == SHARES == (1, 2, 4)
