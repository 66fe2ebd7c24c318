"""What gives way when an objective is at risk, and how many share a round."""

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.slo import (
    LEAST_GROUP,
    Objective,
    Objectives,
    SloAction,
    SloObservation,
    answer,
    at_rest,
    decide_slo_actions,
    group_size,
    predict_ttft_ms,
    retry_s,
    round_bound_ms,
    rows_that_fit,
    stress,
)

MS = st.none() | st.floats(1.0, 5000.0)
OBJECTIVES = st.builds(Objective, MS)
SEEN = st.builds(
    SloObservation,
    *(MS, MS, st.integers(0, 50), st.integers(0, 32), st.floats(0.5, 3.0), st.floats(0.5, 3.0), st.floats(0.0, 1.0)),
)
COUNTS = st.integers(1, 32)


@given(SEEN, OBJECTIVES, OBJECTIVES, COUNTS)
def test_an_answer_is_always_possible(seen, ttft, tpot, max_running):
    decision = answer(seen, ttft, tpot, max_running=max_running)
    assert decision.row_price > 0.0
    assert 0.0 < decision.prefill_share <= 2.0
    assert 1 <= decision.running <= max_running
    assert decision.levers


@given(SEEN, COUNTS)
def test_without_objectives_nothing_is_moved(seen, max_running):
    decision = answer(seen, Objective(), Objective(), max_running=max_running)
    assert decision == at_rest(max_running)
    assert (decision.row_price, decision.prefill_share, decision.running) == (1.0, 1.0, max_running)


@given(SEEN, st.floats(1.0, 1000.0), COUNTS)
def test_late_tokens_ask_for_drafts_only_where_these_bring_them_sooner(seen, tpot_ms, max_running):
    late = seen._replace(ttft_ms=None, tpot_ms=2.0 * tpot_ms)
    decision = answer(late, Objective(1000.0), Objective(tpot_ms), max_running=max_running)
    assert (decision.row_price > 1.0) == (seen.sequence_gain <= 1.0)
    assert (decision.row_price < 1.0) == (SloAction.DRAFTS_GAIN in decision.levers)
    assert (decision.row_price < 1.0) == (seen.sequence_gain > 1.0 and 1.0 - seen.prefill_time < 1.0)
    assert decision.running <= max(1, seen.running)
    assert decision.prefill_share < 1.0  # TTFT has slack


@given(SEEN, st.floats(1.0, 1000.0), COUNTS)
def test_late_first_tokens_never_make_fewer_run(seen, ttft_ms, max_running):
    late = seen._replace(ttft_ms=1.5 * ttft_ms, tpot_ms=None)
    decision = answer(late, Objective(ttft_ms), Objective(50.0), max_running=max_running)
    assert decision.running == max_running
    full = seen.waiting > 0 and seen.running >= max_running
    assert (SloAction.DRAFTS_GAIN in decision.levers) == (full and seen.gain > 1.0)
    assert (decision.row_price > 1.0) == (SloAction.DRAFTS_GIVE_WAY in decision.levers) == decision.beside_prompts


@given(st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_both_late_says_that_nothing_more_helps(ttft_ms, tpot_ms):
    seen = SloObservation(2 * ttft_ms, 2 * tpot_ms, 3, 8, gain=0.9)
    decision = answer(seen, Objective(ttft_ms), Objective(tpot_ms), max_running=8)
    assert decision.levers == (SloAction.DRAFTS_GIVE_WAY, SloAction.NOTHING_HELPS)


@given(MS, OBJECTIVES)
def test_stress_is_a_share(seen_ms, objective):
    assert 0.0 <= stress(seen_ms, objective) <= 2.0


@given(SEEN, st.lists(SEEN, max_size=30), OBJECTIVES, OBJECTIVES, COUNTS)
def test_steps_stay_possible_and_all_that_was_moved_comes_back(last, course, ttft, tpot, max_running):
    objectives, found = Objectives(ttft, tpot), at_rest(max_running)
    for seen in course:
        before, found = found, decide_slo_actions(found, seen, objectives, max_running=max_running)
        assert 1 <= found.running <= max_running
        assert found.running >= before.running // 2
        assert (SloAction.ADMISSION_GIVES_WAY in found.levers) == (found.running < max_running)
        assert (SloAction.PREFILL_GAINS in found.levers) == (found.prefill_share > 1.0)
        assert (SloAction.PREFILL_GIVES_WAY in found.levers) == (found.prefill_share < 1.0)
        assert found.explained
    for _ in range(40):
        found = decide_slo_actions(
            found, last._replace(ttft_ms=None, tpot_ms=None), objectives, max_running=max_running
        )
    assert found == at_rest(max_running)


def test_what_keeps_an_objective_is_not_given_up_as_soon_as_it_does():
    objectives = Objectives(tpot=Objective(100.0))
    late = SloObservation(None, 150.0, 4, 12, sequence_gain=0.9)
    decision = decide_slo_actions(at_rest(16), late, objectives, max_running=16)
    assert decision.running == 8
    assert decision.row_price > 1.0
    for tpot_ms in (95.0, 85.0):
        decision = decide_slo_actions(decision, late._replace(tpot_ms=tpot_ms, running=8), objectives, max_running=16)
        assert decision.running == 8
        assert decision.row_price > 1.0
    decision = decide_slo_actions(decision, late._replace(tpot_ms=75.0, running=8), objectives, max_running=16)
    assert (decision.running, decision.row_price) == (8, 1.0)
    decision = decide_slo_actions(decision, late._replace(tpot_ms=60.0, running=8), objectives, max_running=16)
    assert decision.running == 10


def test_without_a_drafter_none_is_said_to_give_way():
    late = SloObservation(150.0, 50.0, 4, 12)
    decision = decide_slo_actions(
        at_rest(16), late, Objectives(Objective(100.0), Objective(100.0)), max_running=16, drafts=False
    )
    assert (decision.row_price, decision.levers) == (1.0, (SloAction.PREFILL_GAINS,))
    decision = decide_slo_actions(
        at_rest(16), late, Objectives(Objective(100.0), Objective(60.0)), max_running=16, drafts=False
    )
    assert (decision.row_price, decision.levers) == (1.0, (SloAction.NOTHING_HELPS,))


def test_fewer_run_no_longer_where_first_tokens_are_late_too():
    objectives = Objectives(Objective(100.0), Objective(100.0))
    fewer = at_rest(16)._replace(running=4)
    decision = decide_slo_actions(fewer, SloObservation(150.0, 150.0, 4, 4), objectives, max_running=16)
    assert decision.running == 5


@given(st.integers(1, 200), st.floats(0.0, 50.0), st.floats(0.1, 10.0), st.floats(1.0, 300.0), st.floats(1.0, 3000.0))
def test_groups_fit_the_bound_unless_they_are_small_or_their_turns_take_too_long(
    ready, base_ms, each_ms, bound_ms, turns_ms
):
    def round_ms(sequences):
        return base_ms + each_ms * sequences

    size = group_size(round_ms, ready, bound_ms=bound_ms, turns_ms=turns_ms)
    assert min(ready, LEAST_GROUP) <= size <= ready
    if size < ready:
        turns = -(-ready // size)
        assert round_ms(ready) > bound_ms
        assert round_ms(size) <= bound_ms or size == LEAST_GROUP
        assert turns * round_ms(size) <= turns_ms


@given(st.integers(0, 64), st.integers(0, 64), st.floats(0.1, 10.0), st.floats(1.0, 300.0))
def test_rows_of_drafts_fit_the_bound(base_rows, most, each_ms, bound_ms):
    def round_ms(rows):
        return 5.0 + each_ms * rows

    rows = rows_that_fit(round_ms, base_rows, most, bound_ms=bound_ms)
    assert 0 <= rows <= most
    assert rows == 0 or round_ms(base_rows + rows) <= bound_ms
    assert rows == most or round_ms(base_rows + rows + 1) > bound_ms


def test_a_round_is_as_long_as_tpot_allows_only_where_that_is_at_risk_and_can_be_kept():
    objectives = Objectives(tpot=Objective(50.0), max_round_ms=80.0)
    assert round_bound_ms(None, objectives, 20.0) == 80.0
    assert round_bound_ms(30.0, objectives, 20.0) == 80.0
    assert round_bound_ms(48.0, objectives, 20.0) == 50.0
    assert round_bound_ms(48.0, objectives, 60.0) == 80.0
    assert round_bound_ms(48.0, Objectives(), 20.0) == float("inf")


def test_a_request_is_told_to_come_back_when_it_can_be_in_time():
    assert predict_ttft_ms(-3, 500.0, 40.0) == 40.0
    assert predict_ttft_ms(6, 500.0, 40.0) == 3040.0
    assert retry_s(3040.0, Objective(1000.0)) == 3
    assert retry_s(900.0, Objective(1000.0)) == 0
    assert retry_s(9000.0, Objective()) == 0
