"""Breakers and slowness, over any failures; and when standbys take over, over any states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.failover.health import (
    FIRST_OPEN_S,
    HALF_LIFE_S,
    LONGEST_OPEN_S,
    SLOW_FROM,
    Breaker,
    Health,
    Slowness,
)
from policies.serving.failover.standby import FailoverRules, Readiness, StandbyState, TargetState, plan_failover

FAILURES = st.lists(st.tuples(st.floats(0.0, 100.0), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])), max_size=30)
STANDBYS = st.lists(
    st.builds(
        StandbyState,
        st.sampled_from(Readiness),
        loaded=st.booleans(),
        refused=st.booleans(),
        lost=st.booleans(),
    ),
    max_size=4,
)


def fail(failures: list[tuple[float, float]]) -> tuple[Breaker, float]:
    """Return a part after failures: how long after the one before, and what each weighs."""
    breaker, now_s = Breaker(), 0.0
    for after_s, weight in failures:
        now_s += after_s
        breaker = breaker.observe_failure(weight, "broken", now_s)
    return breaker, now_s


@given(FAILURES)
def test_a_part_without_failures_for_long_is_healthy_or_waits_for_a_trial(failures: list[tuple[float, float]]) -> None:
    breaker, now_s = fail(failures)
    later_s = now_s + LONGEST_OPEN_S + 20 * HALF_LIFE_S
    assert breaker.judge(later_s) is (Health.HALF_OPEN if breaker.opened else Health.HEALTHY)
    assert breaker.wait_s(later_s) == 0.0


@given(FAILURES)
def test_a_trial_that_works_closes_and_one_that_fails_opens_for_longer(failures: list[tuple[float, float]]) -> None:
    breaker, now_s = fail([*failures, (0.0, 3.0)])
    assert breaker.judge(now_s) is Health.OPEN
    first_s = breaker.wait_s(now_s)
    assert 0.0 < first_s <= LONGEST_OPEN_S + 1e-6, "the difference of two times is rounded"
    assert breaker.observe_success(now_s) == breaker, "what an open part still does proves nothing"
    now_s = max(now_s + first_s, breaker.until_s)
    assert breaker.judge(now_s) is Health.HALF_OPEN
    again = breaker.observe_failure(0.5, "broken", now_s)
    assert again.wait_s(now_s) >= 0.999 * first_s
    closed = breaker.observe_success(now_s)
    assert closed.judge(now_s) is Health.SUSPECT
    assert closed.judge(now_s + 3 * HALF_LIFE_S) is Health.HEALTHY
    assert closed.observe_failure(3.0, "broken", now_s).wait_s(now_s) == pytest.approx(FIRST_OPEN_S)


@given(FAILURES, st.sampled_from([Health.DRAINING, Health.CORDONED]))
def test_what_an_operator_holds_stays_so_until_it_is_released(
    failures: list[tuple[float, float]], held: Health
) -> None:
    breaker, now_s = fail(failures)
    kept = breaker.hold(held)
    assert kept.judge(now_s + 1e6) is held
    assert kept.hold(None) == breaker


def test_failures_that_come_together_are_one_and_failures_far_apart_are_none() -> None:
    together, now_s = fail([(0.0, 3.0), (0.1, 3.0), (0.1, 3.0)])
    assert together.opened == 1
    assert together.judge(now_s) is Health.OPEN
    apart, now_s = fail([(5 * HALF_LIFE_S, 1.0)] * 20)
    assert apart.judge(now_s) is Health.SUSPECT
    assert not apart.opened


@given(FAILURES, st.lists(st.sampled_from([0.5, 1.0]), max_size=50))
def test_failures_that_prove_nothing_make_a_part_suspect_and_never_open_it(
    failures: list[tuple[float, float]], crashes: list[float]
) -> None:
    breaker, now_s = fail(failures)
    opened, until_s = breaker.opened, breaker.until_s
    for weight in crashes:
        breaker = breaker.observe_failure(weight, "a crash", now_s, proves=False)
        assert (breaker.opened, breaker.until_s) == (opened, until_s)
    alone = Breaker()
    for _ in range(10):
        alone = alone.observe_failure(0.5, "a crash", 5.0, proves=False)
    assert alone.judge(5.0) is Health.SUSPECT
    assert alone.observe_failure(1.0, "lost", 5.0).judge(5.0) is Health.OPEN, "one that is proof is enough then"


def test_an_outlier_is_told_from_a_slow_round_and_stays_one_until_rounds_are_as_predicted() -> None:
    slowness = Slowness()
    for _ in range(20):
        slowness = slowness.observe(20.0, 100.0).observe(0.0, 1e6)
    assert not slowness.outlier
    for _ in range(400):
        slowness = slowness.observe(20.0, 100.0)
    assert slowness.outlier
    assert slowness.ratio > SLOW_FROM
    for _ in range(20):
        slowness = slowness.observe(20.0, 24.0)
    assert slowness.outlier, "between both bounds it stays"
    for _ in range(200):
        slowness = slowness.observe(20.0, 24.0)
    assert not slowness.outlier


@given(STANDBYS, st.booleans(), st.booleans(), st.floats(0.0, 100.0), st.booleans(), st.data())
def test_failover_steps_are_possible_and_one_standby_serves(
    standbys: list[StandbyState], serves: bool, hopeless: bool, since_s: float, began: bool, data: st.DataObject
) -> None:
    states = []
    for one in standbys:
        ready = one.loaded and data.draw(st.booleans())
        states.append(
            StandbyState(
                one.readiness,
                loaded=one.loaded,
                ready=ready,
                active=one.loaded and data.draw(st.booleans()),
                refused=one.refused,
                lost=one.lost,
            )
        )
    rules = FailoverRules(2.0, 10.0)
    target = TargetState(serves=serves, hopeless=hopeless and not serves, since_s=since_s, began=began)
    steps = plan_failover(target, states, rules)
    assert all(not states[number].loaded and not states[number].refused for number in steps.begin)
    assert all(states[number].ready and not states[number].refused for number in steps.activate)
    assert all(states[number].active for number in steps.retire)
    assert len(steps.activate) <= 1
    stays = {number for number, standby in enumerate(states) if standby.active} - set(steps.retire)
    if serves:
        assert not steps.activate
        assert set(steps.begin) <= {n for n, standby in enumerate(states) if standby.readiness is Readiness.HOT}
        assert not stays or steps.look_s is not None, "somebody comes back to let them give back"
    else:
        assert not (stays and steps.activate)
        usable = [one for one in states if one.ready and not one.refused]
        if usable and (began or target.hopeless):
            assert stays or steps.activate, "whoever is loaded takes over at once"
        untried = [one for one in states if not one.refused and not one.lost]
        if untried and not stays and not usable and target.hopeless:
            assert steps.begin or any(standby.loaded for standby in untried), "or it is loaded now"
    if steps.look_s is not None:
        assert 0.0 < steps.look_s <= rules.back_after_s
