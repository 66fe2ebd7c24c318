"""Whom a pass of a shared draft model takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.draft_pass import (
    LIKELY,
    MOST_BRANCHES,
    READ_EVERY,
    PassTimes,
    WantedRow,
    choose_rows,
    count_branches,
    price_branch,
    price_new_branch,
)

ROWS = st.lists(st.builds(WantedRow, st.booleans(), st.booleans(), st.floats(0.0, 1.0)), max_size=12)


@given(ROWS, st.integers(0, 2 * READ_EVERY))
def test_whatever_is_asked_for_and_read_is_taken_and_nothing_waits_for_company(rows, unread):
    chosen = choose_rows(rows, unread)
    assert chosen == sorted(set(chosen))
    assert {number for number, row in enumerate(rows) if row.urgent and not row.reading} <= set(chosen)
    assert bool(chosen) == bool(rows), "the model does not idle while anything is wanted"


@given(ROWS)
def test_what_is_hardly_needed_does_not_hold_up_who_waits(rows):
    urgent = any(row.urgent and not row.reading for row in rows)
    ahead = {number for number, row in enumerate(rows) if not row.urgent and not row.reading}
    likely = {number for number in ahead if rows[number].chance >= LIKELY}
    assert ahead & set(choose_rows(rows, 0)) == (likely if urgent else ahead)


@given(ROWS)
def test_texts_are_read_apart_from_what_an_answer_waits_for_but_not_for_ever(rows):
    urgent = any(row.urgent and not row.reading for row in rows)
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


@given(ROWS, st.lists(st.floats(0.0, 1.0), max_size=50), st.floats(0.0, 1.0))
def test_branches_change_nothing_for_lines_and_are_taken_where_they_are_worth_it(rows, chances, row_share):
    branches = [WantedRow(urgent=False, reading=False, chance=chance, branch=True) for chance in chances]
    chosen = choose_rows([*rows, *branches], 0, row_share)
    lines = [number for number in chosen if number < len(rows)]
    assert lines == choose_rows(rows, 0, row_share)
    taken = [chances[number - len(rows)] for number in chosen[len(lines) :]]
    assert len(taken) <= count_branches(row_share) <= MOST_BRANCHES
    assert all(chance >= price_branch(row_share, sum(rows[number].chance for number in lines)) for chance in taken)
    left = sorted(chances, reverse=True)[len(taken) :]
    assert not taken or not left or min(taken) >= left[0], "the likeliest are taken"
    assert row_share * len(taken) <= 0.5 + 1e-9, "a pass gets no longer than by half"


@given(ROWS, st.lists(st.floats(0.0, 1.0), max_size=50), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_branch_is_begun_where_the_next_pass_has_a_row_for_it(rows, chances, row_share, chance):
    rows = [*rows, *(WantedRow(urgent=False, reading=False, chance=own, branch=True) for own in chances)]
    least = price_new_branch(rows, 0, row_share)
    new = WantedRow(urgent=False, reading=False, chance=chance, branch=True)
    chosen = choose_rows([new, *rows], 0, row_share)  # the first of equals
    assert (0 in chosen) == (chance >= least)


@given(st.floats(0.0, 1.0), st.floats(0.0, 20.0), st.floats(0.0, 1.0))
def test_a_branch_costs_more_the_likelier_the_lines_that_it_holds_up_are_needed(row_share, needed, more):
    assert 0.0 < price_branch(row_share, needed) <= price_branch(row_share, needed + more)


def test_what_a_row_takes_is_learned_from_passes_of_few_and_of_many():
    times = PassTimes()
    for _ in range(50):
        times.observe(1, 0.010)
        times.observe(16, 0.025)
    assert times.row_share == pytest.approx(0.1)


def test_rows_that_seemed_dear_once_are_tried_again():
    times = PassTimes()
    times.observe(16, 1.0)  # something else ran
    for _ in range(10):
        times.observe(1, 0.010)
    assert count_branches(times.row_share) == 0
    for number in range(200):
        times.observe(1 + number % 2, 0.010)
    assert count_branches(times.row_share) == MOST_BRANCHES
