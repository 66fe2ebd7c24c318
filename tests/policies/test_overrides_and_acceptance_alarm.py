"""Whose word counts on speculation, and when low acceptance is worth a warning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.acceptance_alarm import LEAST_DRAFTED, THRESHOLD, Cause, DraftCounts, Sample, upper_rate, warning
from policies.serving.overrides import OperatorBounds, Override, Scope, effective

SCOPES = st.sampled_from([Scope.REQUEST, Scope.SESSION, Scope.ENGINE])
NUMBERS = st.none() | st.integers(0, 20)
OVERRIDES = st.lists(st.builds(Override, SCOPES, st.none() | st.booleans(), NUMBERS, NUMBERS), max_size=3)
BOUNDS = st.builds(
    lambda enabled, ends: OperatorBounds(enabled, max(ends), min(ends)),
    st.booleans(),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)


@given(OVERRIDES, BOUNDS)
def test_nobody_goes_beyond_the_operator(overrides, bounds):
    bound = effective(overrides, bounds)
    assert 0 <= bound.most <= bounds.most
    if not bounds.enabled:
        assert (bound.most, bound.by) == (0, Scope.OPERATOR)


@given(OVERRIDES, st.booleans(), st.integers(0, 12))
def test_the_request_wins_over_wider_scopes(overrides, enabled, depth):
    bounds = OperatorBounds(most=12)
    others = [override for override in overrides if override.scope != Scope.REQUEST]
    bound = effective([*others, Override(Scope.REQUEST, enabled, depth)], bounds)
    assert bound == effective([Override(Scope.REQUEST, enabled, depth)], bounds)
    assert bound.by == Scope.REQUEST
    assert bound.most == (depth if enabled else 0)


@given(OVERRIDES, BOUNDS)
def test_the_order_of_wishes_does_not_matter(overrides, bounds):
    unique = list({override.scope: override for override in overrides}.values())
    assert effective(unique, bounds) == effective(unique[::-1], bounds)


def test_what_a_scope_leaves_open_is_taken_from_the_next():
    session = Override(Scope.SESSION, most=3)
    assert effective([Override(Scope.REQUEST), session], OperatorBounds()) == effective([session], OperatorBounds())
    assert effective([session], OperatorBounds(most=2)).cut
    assert (
        effective([Override(Scope.SESSION, enabled=False), Override(Scope.REQUEST, depth=4)], OperatorBounds()).most
        == 4
    )
    assert effective([], OperatorBounds(most=9)) == (9, False, Scope.DEFAULT, False)
    assert effective([], OperatorBounds(most=9, fixed=True)) == (9, True, Scope.DEFAULT, False)
    assert effective([Override(Scope.REQUEST, most=1)], OperatorBounds(least=2)).most == 2
    for off in (
        Override(Scope.REQUEST, depth=0),
        Override(Scope.REQUEST, most=0),
        Override(Scope.REQUEST, enabled=False, most=3),
    ):
        assert effective([off], OperatorBounds(least=2)) == (0, True, Scope.REQUEST, False)


@given(st.integers(0, 5000), st.data())
def test_there_is_no_warning_without_evidence(drafted, data):
    accepted = data.draw(st.integers(0, drafted))
    due = warning(Sample(DraftCounts(drafted, accepted), 50.0))
    if drafted < LEAST_DRAFTED or accepted / drafted >= THRESHOLD:
        assert due is None
    if due is not None:
        assert accepted / drafted <= due.upper < THRESHOLD
    if drafted >= 1000 and accepted < 0.1 * drafted:
        assert due is not None


@given(st.integers(1, 5000), st.data())
def test_more_evidence_narrows_the_interval(drafted, data):
    accepted = data.draw(st.integers(0, drafted))
    rate = accepted / drafted
    assert rate <= upper_rate(DraftCounts(drafted, accepted)) + 1e-12 <= 1.0 + 1e-9
    assert upper_rate(DraftCounts(10 * drafted, 10 * accepted)) <= upper_rate(DraftCounts(drafted, accepted)) + 1e-12


@pytest.mark.parametrize(
    ("sample", "cause"),
    [
        (Sample(DraftCounts(1000, 0), 400.0), Cause.NOTHING_ACCEPTED),
        (Sample(DraftCounts(1000, 60), 70.0, greedy=DraftCounts(50, 20), sampled=DraftCounts(950, 40)), Cause.SAMPLING),
        (Sample(DraftCounts(1000, 60), 70.0, others=DraftCounts(1000, 500)), Cause.ONE_CLASS),
        (Sample(DraftCounts(1000, 0), 400.0, others=DraftCounts(1000, 500)), Cause.ONE_CLASS),
        (Sample(DraftCounts(300, 0), promised=2.0), Cause.HARD_TEXT),
        (Sample(DraftCounts(1000, 0), 400.0, others=DraftCounts(1000, 100)), Cause.NOTHING_ACCEPTED),
        (Sample(DraftCounts(1000, 60), 70.0, positions=(DraftCounts(200, 50), DraftCounts(50, 3))), Cause.TOO_DEEP),
        (
            Sample(DraftCounts(1000, 10), 90.0, positions=(DraftCounts(200, 10), DraftCounts(10, 0))),
            Cause.OVERCONFIDENT,
        ),
        (Sample(DraftCounts(1000, 60), promised=500.0), Cause.OVERCONFIDENT),
        (Sample(DraftCounts(1000, 60), promised=70.0), Cause.HARD_TEXT),
    ],
)
def test_the_likely_cause(sample, cause):
    due = warning(sample)
    assert due is not None
    assert due.cause == cause
