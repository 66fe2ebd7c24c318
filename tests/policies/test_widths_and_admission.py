"""Properties of rows and of admission."""

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.admission import count_admissible_requests, expect_gap_s, victims
from policies.speculation.widths import pad_to_width

BLOCKS = st.lists(st.integers(1, 50), max_size=20)


@given(st.integers(1, 500), st.sets(st.integers(1, 40), min_size=1))
def test_rows_are_filled_up_to_the_next_width(rows, widths):
    known = sorted(widths)
    paid = pad_to_width(rows, known)
    assert paid >= rows
    assert paid in widths or paid % known[-1] == 0
    assert all(width < rows or width >= paid for width in widths)
    assert pad_to_width(paid, known) == paid


@given(BLOCKS, st.integers(0, 200), st.integers(0, 8), st.integers(1, 8), st.integers(0, 10))
def test_admission_never_promises_more_than_is_free(waiting, free, running, max_running, spare):
    count = count_admissible_requests(
        waiting, free_blocks=free, running=running, max_running=max_running, spare_blocks=spare
    )
    assert sum(waiting[:count]) <= max(free, 0)
    assert running + count <= max(max_running, running)
    if waiting and not running and waiting[0] <= free:
        assert count >= 1  # an idle engine always starts what fits


@given(BLOCKS, st.integers(-5, 300))
def test_the_oldest_never_gives_way_and_no_more_than_needed_do(held, missing):
    count = victims(held, missing=missing)
    assert count <= max(0, len(held) - 1)
    freed = held[len(held) - count :]
    if count:
        assert sum(freed[1:]) < missing  # without the last victim chosen it would not be enough
    if missing > 0 and count < len(held) - 1:
        assert sum(freed) >= missing


_SECONDS = st.floats(0.0, 1e4)


@given(
    ends_gap_s=st.none() | _SECONDS,
    service_s=st.none() | _SECONDS,
    slots=st.integers(0, 64),
    left_s=st.none() | _SECONDS,
    waited_s=_SECONDS,
)
def test_the_next_end_is_expected_by_what_is_measured(ends_gap_s, service_s, slots, left_s, waited_s):
    gap_s = expect_gap_s(ends_gap_s=ends_gap_s, service_s=service_s, slots=slots, left_s=left_s, waited_s=waited_s)
    assert gap_s >= waited_s
    measured = [
        one for one in (ends_gap_s, None if service_s is None or not slots else service_s / slots) if one is not None
    ]
    assert gap_s <= max([waited_s, min(measured) if measured else left_s or 0.0])
    more = expect_gap_s(
        ends_gap_s=ends_gap_s, service_s=service_s, slots=max(1, slots) * 2, left_s=left_s, waited_s=waited_s
    )
    assert more <= gap_s or not slots
