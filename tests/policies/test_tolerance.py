"""Tolerance accepts what its delta says, is lossless while it learns delta, and finds the one that was asked for."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sampling import (
    Sampling,
    ToleranceGoal,
    ToleranceState,
    calibrate_tolerance,
    distribution,
    noise,
    propose,
    verify_draft,
    watch_tolerance,
)
from policies.sampling.verify import judge

VOCABULARY = 6
GOAL = ToleranceGoal(acceptance_rate=0.8, warmup_tokens=50, max_delta=3.0)


def rows_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, VOCABULARY)).astype(np.float32)


def tolerance(temperature: float = 1.0, **more) -> Sampling:
    return Sampling(temperature, acceptance="tolerance", **more)


@given(st.integers(0, 2**32), st.integers(0, 500), st.floats(0.0, 5.0), st.sampled_from([1.0, 0.6]))
@settings(max_examples=200)
def test_what_rejection_accepts_is_accepted_and_what_is_within_delta(table, position, delta, top_p):
    target, drafter = rows_of(table, 2)
    sampling = tolerance(top_p=top_p, seed=table)
    draft, proposal = propose(drafter, sampling, position, position)
    judged = judge(target, draft, proposal, sampling, position, delta=delta)
    ids, p = distribution(target, sampling, position)
    q = proposal.probabilities(VOCABULARY)
    assert q is not None
    p_draft, q_draft = p[ids == draft].sum(), q[proposal.tokens == draft].sum()
    if p_draft == 0.0:
        assert judged.gap == math.inf
        assert not judged.accepted
    else:
        assert judged.gap == pytest.approx(math.log(q_draft / p_draft))
        chance = noise.single(sampling.seed, position, noise.Purpose.ACCEPT) < p_draft / q_draft
        assert judged.accepted == (judged.gap <= delta or chance)
    assert judged.token in ids
    assert (judged.token == draft) == judged.accepted


@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(1, 4))
@settings(max_examples=100)
def test_until_delta_is_known_nothing_is_lost(table, position, depth):
    targets, drafters = rows_of(table, depth + 1), rows_of(table + 1, depth)
    drafted = [propose(row, tolerance(), position + index, position) for index, row in enumerate(drafters)]
    draft, proposals = [token for token, _ in drafted], [proposal for _, proposal in drafted]
    learning = verify_draft(targets, draft, tolerance(), position, proposals=proposals)
    lossless = verify_draft(targets, draft, Sampling(1.0, acceptance="rejection"), position, proposals=proposals)
    assert learning.tokens == lossless.tokens
    assert len(learning.gaps) == min(learning.accepted + 1, depth)


@given(st.integers(0, 2**32), st.integers(0, VOCABULARY - 1), st.floats(0.0, 5.0))
def test_greedily_the_logit_may_be_delta_below_the_best(table, draft, delta):
    rows = rows_of(table, 2)
    judged = verify_draft(rows, [draft], tolerance(0.0), 0, delta=delta)
    assert bool(judged.accepted) == (rows[0].max() - rows[0, draft] <= delta)
    assert judged.tokens[judged.accepted] == rows[judged.accepted].argmax()
    assert verify_draft(rows, [draft], tolerance(0.0), 0).tokens == verify_draft(rows, [draft], Sampling(0.0), 0).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_never_comes_out(temperature):
    rows = rows_of(1, 2)
    forbidden = int(rows[0].argmax())
    judged = verify_draft(
        *(rows, [forbidden], tolerance(temperature), 0),
        shape=lambda row, taken: np.where(np.arange(VOCABULARY) == forbidden, np.float32(-np.inf), row),
        delta=math.inf,
    )
    assert judged.accepted == 0
    assert judged.tokens[0] != forbidden
    assert judged.gaps == (math.inf,)


def share(gaps: list[float], delta: float, *, greedy: bool) -> float:
    """The expected share of drafts with these gaps that is accepted."""
    return float(np.mean([1.0 if gap <= delta else 0.0 if greedy else math.exp(-gap) for gap in gaps]))


@given(
    st.lists(st.floats(-3.0, 6.0), min_size=50, max_size=80),
    st.floats(0.05, 0.99),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.booleans(),
)
def test_delta_is_the_least_that_accepts_the_wanted_share_of_the_warm_up(gaps, rate, steps, greedy):
    """Whatever the portions that the gaps come in."""
    gaps = [max(0.0, gap) for gap in gaps] if greedy else gaps
    goal = ToleranceGoal(rate, 50, 100.0)
    state, fed = ToleranceState(), 0
    while state.delta is None:
        portion = gaps[fed : fed + steps[fed % len(steps)]]
        fed += len(portion)
        state = calibrate_tolerance(state, portion, goal, greedy=greedy)
    seen = gaps[:fed]
    assert 50 <= fed < 57
    assert share(seen, state.delta, greedy=greedy) >= rate - 1e-6
    if state.delta > 0.0:
        less = max([0.0, *(gap for gap in seen if gap < state.delta)])
        assert share(seen, less, greedy=greedy) < rate
    assert calibrate_tolerance(state, [9.0] * 100, goal, greedy=greedy) == state


def test_where_rejection_accepts_as_much_already_nothing_is_lost():
    assert calibrate_tolerance(ToleranceState(), [0.1] * 50, GOAL, greedy=False).delta == 0.0
    assert calibrate_tolerance(ToleranceState(), [0.1] * 50, GOAL, greedy=True).delta == pytest.approx(0.1)


@given(st.integers(0, 2**32), st.integers(0, 500))
def test_with_delta_0_the_rule_is_rejection(table, position):
    target, drafter = rows_of(table, 2)
    draft, proposal = propose(drafter, tolerance(), position, position)
    lossy = judge(target, draft, proposal, tolerance(), position, delta=0.0)
    assert lossy == judge(target, draft, proposal, Sampling(1.0, acceptance="rejection"), position)


@given(st.integers(0, 2**32), st.integers(0, 500), st.sampled_from([0.0, 0.9]))
def test_tolerated_is_what_the_rule_that_loses_nothing_would_not_have_said(table, position, temperature):
    target, drafter = rows_of(table, 2)
    draft, proposal = propose(drafter, tolerance(), position, position)
    sampling = Sampling(temperature, acceptance="tolerance")
    lossy = judge(target, draft, proposal, sampling, position, delta=1.0)
    lossless = judge(target, draft, proposal, Sampling(temperature, acceptance="rejection"), position)
    assert lossy.tolerated == (lossy.token != lossless.token)


def test_delta_keeps_to_its_bounds():
    assert calibrate_tolerance(ToleranceState(), [-1.0] * 50, GOAL, greedy=False).delta == 0.0
    assert calibrate_tolerance(ToleranceState(), [math.inf] * 50, GOAL, greedy=False).delta == 3.0
    assert calibrate_tolerance(ToleranceState(), [0.1] * 49, GOAL, greedy=False) == ToleranceState((0.1,) * 49)
    exact = calibrate_tolerance(
        ToleranceState(), [float(i) for i in range(10)], ToleranceGoal(0.7, 10, 100.0), greedy=True
    )
    assert exact.delta == 6.0


def test_the_wanted_acceptance_rate_is_reached():
    """On drafts that it has not learned from, of rows that agree a little."""
    sampling, state = tolerance(seed=5), ToleranceState()
    rng = np.random.default_rng(9)
    accepted = judged = 0
    for position in range(3000):
        target = rng.normal(0, 2, VOCABULARY).astype(np.float32)
        drafter = (target + rng.normal(0, 1.5, VOCABULARY)).astype(np.float32)
        draft, proposal = propose(drafter, sampling, position, position)
        rows = np.stack([target, target])
        verified = verify_draft(rows, [draft], sampling, position, proposals=[proposal], delta=state.delta)
        if state.delta is not None:
            accepted, judged = accepted + verified.accepted, judged + 1
        state = calibrate_tolerance(state, verified.gaps, ToleranceGoal(0.9, 500, 10.0), greedy=False)
    assert accepted / judged == pytest.approx(0.9, abs=0.03)


def gaps_of(seed: int, count: int, scale: float) -> list[float]:
    """Gaps of drafts that agree with the target the less, the larger the scale."""
    return [float(gap) for gap in np.abs(np.random.default_rng(seed).normal(0, scale, count))]


def learn_from(scale: float, goal: ToleranceGoal, *, greedy: bool) -> ToleranceState:
    state = calibrate_tolerance(ToleranceState(), gaps_of(0, goal.warmup_tokens, scale), goal, greedy=greedy)
    assert state.delta is not None
    return state


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1.0, 3.0), (3.0, 1.0)], ids=["worse", "better"])
def test_a_text_that_drifts_is_followed_and_the_wanted_rate_is_reached_again(greedy, before, after):
    goal = ToleranceGoal(0.8, 500, 20.0)
    state = learn_from(before, goal, greedy=greedy)
    old = state.delta
    fed = gaps_of(1, 3000, after)
    for start in range(0, len(fed), 7):
        state = watch_tolerance(state, fed[start : start + 7], goal, greedy=greedy)
    assert state.delta is not None
    assert old is not None
    assert state.recalibrations == 1
    assert (state.delta > old) == (after > before)
    assert share(gaps_of(2, 3000, after), state.delta, greedy=greedy) == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_text_that_stays_as_it_was_keeps_its_tolerance(greedy):
    goal = ToleranceGoal(0.8, 500, 20.0)
    state = learn_from(1.0, goal, greedy=greedy)
    followed = state
    for seed in range(1, 21):
        followed = watch_tolerance(followed, gaps_of(seed, 500, 1.0), goal, greedy=greedy)
    assert (followed.delta, followed.recalibrations) == (state.delta, 0)


def test_one_block_that_differs_is_no_drift():
    goal = ToleranceGoal(0.8, 500, 20.0)
    state = learn_from(1.0, goal, greedy=True)
    followed = state
    for seed in range(1, 9):
        followed = watch_tolerance(followed, gaps_of(seed, 500, 4.0 if seed % 2 else 1.0), goal, greedy=True)
    assert (followed.delta, followed.recalibrations) == (state.delta, 0)


def test_where_a_tolerance_cannot_follow_it_stays():
    goal = ToleranceGoal(0.8, 100, 0.5)
    widest = learn_from(5.0, goal, greedy=True)
    assert widest.delta == 0.5
    least = ToleranceState((), 0.0)
    for seed in range(6):
        widest = watch_tolerance(widest, gaps_of(seed, 100, 9.0), goal, greedy=True)
        least = watch_tolerance(least, [0.0] * 100, goal, greedy=True)
    assert (widest.delta, widest.recalibrations) == (0.5, 0)
    assert (least.delta, least.recalibrations) == (0.0, 0)


def test_without_a_tolerance_there_is_nothing_to_watch():
    warming = ToleranceState((0.5,) * 9)
    assert watch_tolerance(warming, [9.0] * 5000, GOAL, greedy=False) == warming
