"""Courses: counts that fit each other, and the policy's own rounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.replay.fixed import FixedDepth
from outrider_lab.replay.run import replay
from outrider_lab.simulation.courses import COMPANIES, Course, CourseBook, find_company

from tools.lab.tests.simulation.fleets import COSTS, draw

STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def build(steps):
    tokens = [0]
    for step in steps:
        tokens.append(tokens[-1] + step)
    return Course(tuple(tokens), 1.0, 0.5)


@given(STEPS, st.integers(0, 500))
def test_the_least_rounds_that_make_so_many_tokens(steps, tokens):
    course = build(steps)
    rounds = course.count_rounds(tokens)
    assert course.count_tokens(rounds) >= tokens
    assert rounds == 0 or course.count_tokens(rounds - 1) < tokens


@given(STEPS, st.integers(0, 500))
def test_every_round_makes_tokens_for_ever(steps, rounds):
    course = build(steps)
    assert course.count_tokens(rounds + 1) > course.count_tokens(rounds)
    assert course.count_rounds(course.count_tokens(rounds)) == rounds


@given(st.integers(1, 1000))
def test_a_company_is_the_nearest(sequences):
    found = find_company(sequences)
    assert abs(found - sequences) == min(abs(one - sequences) for one in COMPANIES)


def test_a_course_is_the_policys_own_replay():
    requests = draw()
    for company in (1, 3):
        found = CourseBook(requests, COSTS, most=4, fixed=2).at(company)
        filler = [type(one)(f"{one.key}/more", one.drafts, one.category, 64) for one in requests[:company]]
        played = replay([*requests, *filler], FixedDepth(2), COSTS, concurrency=company, most=4)
        for request, course in zip(requests, found.courses, strict=True):
            rounds = played.courses[request.key]
            assert list(course.tokens[1:]) == [one.done + one.tokens for one in rounds]
            assert course.drafted == sum(one.drafted for one in rounds) / len(rounds)


def test_dear_drafts_are_given_up_by_the_policy_itself():
    cheap = CourseBook(draw(0.7), COSTS, most=4).at(1)
    dear = CourseBook(draw(0.7), type(COSTS)(COSTS.forward, draft_ms=200.0, draft_token_ms=50.0), most=4).at(1)
    assert cheap.drafting > 0.9
    assert dear.drafting < 0.2
