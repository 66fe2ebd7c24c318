"""What gives way when an objective is at risk, and how many share a round."""

from hypothesis import given
from hypothesis import strategies as st

from policies.slo import Lever, Objective, Seen, answer, goodput, group_size, stress, waits_for_more

MS = st.none() | st.floats(1.0, 5000.0)
OBJECTIVES = st.builds(Objective, MS)
SEEN = st.builds(Seen, MS, MS, st.integers(0, 50), st.integers(0, 32), st.floats(0.5, 3.0), st.floats(0.5, 3.0))
COUNTS = st.integers(1, 32)


@given(SEEN, OBJECTIVES, OBJECTIVES, COUNTS)
def test_an_answer_is_always_possible(seen, ttft, tpot, max_running):
    found = answer(seen, ttft, tpot, max_running=max_running)
    assert found.row_price > 0.0
    assert 0.0 < found.prefill_share <= 2.0
    assert 1 <= found.running <= max_running
    assert found.levers


@given(SEEN, COUNTS)
def test_without_objectives_nothing_is_moved(seen, max_running):
    found = answer(seen, Objective(), Objective(), max_running=max_running)
    assert found == (1.0, 1.0, max_running, (Lever.NOTHING,))


@given(SEEN, st.floats(1.0, 1000.0), COUNTS)
def test_late_tokens_ask_for_drafts_only_where_these_bring_them_sooner(seen, tpot_ms, max_running):
    late = seen._replace(ttft_ms=None, tpot_ms=2.0 * tpot_ms)
    found = answer(late, Objective(1000.0), Objective(tpot_ms), max_running=max_running)
    assert (found.row_price < 1.0) == (seen.sequence_gain > 1.0)
    assert found.running <= max(1, seen.running)
    assert found.prefill_share < 1.0  # TTFT has slack


@given(SEEN, st.floats(1.0, 1000.0), COUNTS)
def test_late_first_tokens_never_make_fewer_run(seen, ttft_ms, max_running):
    late = seen._replace(ttft_ms=1.5 * ttft_ms, tpot_ms=None)
    found = answer(late, Objective(ttft_ms), Objective(50.0), max_running=max_running)
    assert found.running == max_running
    full = seen.waiting > 0 and seen.running >= max_running
    assert (Lever.DRAFTS_GAIN in found.levers) == (full and seen.gain > 1.0)
    assert (found.row_price > 1.0) == (Lever.DRAFTS_GIVE_WAY in found.levers)


@given(st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_both_late_says_that_nothing_more_helps(ttft_ms, tpot_ms):
    seen = Seen(2 * ttft_ms, 2 * tpot_ms, 3, 8, gain=0.9)
    found = answer(seen, Objective(ttft_ms), Objective(tpot_ms), max_running=8)
    assert found.levers == (Lever.DRAFTS_GIVE_WAY, Lever.NOTHING_HELPS)


@given(MS, OBJECTIVES)
def test_stress_is_a_share(seen_ms, objective):
    assert 0.0 <= stress(seen_ms, objective) <= 2.0


@given(st.integers(1, 64), st.floats(0.1, 10.0), st.floats(1.0, 300.0))
def test_groups_fit_the_bound_unless_they_are_small_already(ready, each_ms, bound_ms):
    def round_ms(sequences):
        return 5.0 + each_ms * sequences

    size = group_size(round_ms, ready, bound_ms=bound_ms)
    assert min(ready, 8) <= size <= min(ready, 16)
    if size > 8:
        assert round_ms(size) <= bound_ms
    if size < min(ready, 16):
        assert round_ms(size + 1) > bound_ms


@given(st.integers(0, 16), st.integers(0, 16), st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_a_round_waits_no_longer_than_waiting_saves(ready, running, waited_ms, budget_ms, saved_ms):
    if waits_for_more(ready, running, waited_ms=waited_ms, budget_ms=budget_ms, saved_ms=saved_ms):
        assert ready < running
        assert waited_ms < budget_ms
        assert waited_ms < saved_ms


def test_goodput_is_requests_that_met_their_objectives_a_second():
    assert goodput(30, 10.0) == 3.0
    assert goodput(3, 0.0) == 0.0
