"""Whom a pass of a shared draft model takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.draft_pass import LIKELY, READ_EVERY, PassTimes, WantedRow, choose_rows

ROWS = st.lists(st.builds(WantedRow, st.booleans(), st.booleans(), st.floats(0.0, 1.0)), max_size=12)


@given(ROWS, st.integers(0, 2 * READ_EVERY))
def test_whatever_is_asked_for_and_read_is_taken_and_nothing_waits_for_company(rows, unread):
    chosen = choose_rows(rows, unread)
    assert chosen == sorted(set(chosen))
    assert {number for number, row in enumerate(rows) if row.asked and not row.reading} <= set(chosen)
    assert bool(chosen) == bool(rows), "the model does not idle while anything is wanted"


@given(ROWS)
def test_what_is_hardly_needed_does_not_hold_up_who_waits(rows):
    urgent = any(row.asked and not row.reading for row in rows)
    ahead = {number for number, row in enumerate(rows) if not row.asked and not row.reading}
    likely = {number for number in ahead if rows[number].chance >= LIKELY}
    assert ahead & set(choose_rows(rows, 0)) == (likely if urgent else ahead)


@given(ROWS)
def test_texts_are_read_apart_from_what_an_answer_waits_for_but_not_for_ever(rows):
    urgent = any(row.asked and not row.reading for row in rows)
    readers = {number for number, row in enumerate(rows) if row.reading}
    assert bool(readers & set(choose_rows(rows, 0))) == bool(readers and not urgent)
    assert readers <= set(choose_rows(rows, READ_EVERY - 1))


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(0.001, 1.0)), min_size=1))
def test_the_times_of_passes_are_those_of_their_kind(passes):
    times = PassTimes()
    for rows, took_s in passes:
        times.observe(rows, took_s)
    kind = [took_s for rows, took_s in passes if rows.bit_length() == passes[-1][0].bit_length()]
    assert min(kind) - 1e-9 <= times.mean_s <= max(kind) + 1e-9
    assert times.mean_s <= times.safe_s <= times.mean_s + max(kind) - min(kind) + 1e-9
