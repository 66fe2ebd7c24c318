"""The PID controller alone, against a text whose acceptance it does not know."""

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.pid import DEFAULTS, DepthLimits, PidSettings, start_pid, step_pid

RATES = st.floats(0.0, 1.0)
LIMITS = st.tuples(st.integers(0, 6), st.integers(0, 20)).map(lambda ends: DepthLimits(min(ends), max(ends)))
ROUNDS = st.lists(st.tuples(RATES, st.floats(0.05, 5.0)), max_size=60)


def rate_at(depth, chance):
    """The acceptance rate of text whose tokens are accepted with this chance, each if all before it are."""
    return sum(chance**place for place in range(1, depth + 1)) / depth


def drive_pid(chance, *, start=1, most=16, rounds=60, controller=None):
    """The depths of so many rounds in which every rate is as expected."""
    limits = DepthLimits(1, most)
    controller = controller or start_pid(start, limits)
    depths = []
    for _ in range(rounds):
        controller, depth = step_pid(controller, rate_at(controller.depth, chance), 1.0, limits)
        depths.append(depth)
    return controller, depths


def deepest_at_set_point(chance, most=16):
    return max((depth for depth in range(1, most + 1) if rate_at(depth, chance) >= DEFAULTS.set_point), default=1)


@given(LIMITS, ROUNDS, st.floats(-5.0, 30.0))
def test_it_stays_within_its_limits(limits, rounds, start):
    controller = start_pid(start, limits)
    for rate, dt in rounds:
        controller, depth = step_pid(controller, rate, dt, limits)
        assert limits.least <= depth <= limits.most
        assert depth == controller.depth
        assert limits.least <= controller.integral <= limits.most


@given(st.integers(1, 12), st.integers(1, 200))
def test_it_leaves_a_limit_as_soon_as_the_error_turns(most, rounds):
    limits = DepthLimits(0, most)
    controller = start_pid(most, limits)
    for _ in range(rounds):  # however long it was held
        controller, depth = step_pid(controller, 1.0, 1.0, limits)
    assert depth == most
    before = controller.integral
    controller, _ = step_pid(controller, 0.3, 1.0, limits, PidSettings(set_point=0.7))
    assert controller.integral < before
    for _ in range(3 * most):
        controller, depth = step_pid(controller, 0.0, 1.0, limits)
    assert depth == 0
    for _ in range(rounds):
        controller, _ = step_pid(controller, 0.0, 1.0, limits)
    controller, _ = step_pid(controller, 1.0, 1.0, limits)
    assert controller.integral > 0.0


@given(st.floats(0.05, 0.97), st.integers(1, 16))
def test_it_settles_where_the_rate_is_at_its_set_point_and_does_not_swing(chance, start):
    _, depths = drive_pid(chance, start=start)
    steady = depths[-25:]
    assert max(steady) - min(steady) <= 1
    assert abs(steady[-1] - deepest_at_set_point(chance)) <= 1


@given(st.floats(0.0, 0.2), st.floats(0.85, 0.99), st.integers(1, 80))
def test_it_recovers_within_ten_rounds_when_the_text_turns(bad, good, before):
    controller, depths = drive_pid(bad, start=6, rounds=before + 10, most=8)
    assert depths[-1] == 1
    _, depths = drive_pid(good, controller=controller, rounds=10, most=8)
    assert abs(depths[-1] - deepest_at_set_point(good, most=8)) <= 1


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), ROUNDS, LIMITS)
def test_a_better_verdict_never_makes_it_shallower(rate, other, rounds, limits):
    controller = start_pid(4, limits)
    for past, dt in rounds:
        controller, _ = step_pid(controller, past, dt, limits)
    low, _ = step_pid(controller, min(rate, other), 1.0, limits)
    high, _ = step_pid(controller, max(rate, other), 1.0, limits)
    assert high.integral >= low.integral


@given(st.floats(0.1, 0.9), RATES)
def test_a_new_set_point_does_not_kick_the_derivative(set_point, rate):
    controller = start_pid(4, DepthLimits(0, 12))
    controller, _ = step_pid(controller, rate, 1.0, DepthLimits(0, 12))
    moved, _ = step_pid(controller, rate, 1.0, DepthLimits(0, 12), promised=set_point)
    assert moved.slope == controller.slope == 0.0
