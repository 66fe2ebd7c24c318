"""What follows from losses: restarts, suspicion and proof, hangs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.failover.blame import (
    LOSS_KINDS,
    Death,
    LossKind,
    convicts,
    is_suspect,
    probation_tokens,
    weigh_suspicion,
)
from policies.serving.failover.restarts import (
    FIRST_BACKOFF_S,
    HOST_BACKOFF_S,
    MAX_BACKOFF_S,
    SPENT_BACKOFF_S,
    USEFUL_S,
    WINDOW_S,
    RestartBudget,
)
from policies.serving.failover.watchdog import (
    FLOOR_S,
    HUNG_AFTER,
    LOAD_IDLE_S,
    LOAD_SILENCE_S,
    LOAD_STAGE_S,
    Pulse,
    bound_round_s,
    judge_pulse,
    judge_silence,
)

KINDS = st.sampled_from(LOSS_KINDS)
DEATHS = st.lists(st.builds(Death, st.integers(0, 99), KINDS, st.booleans(), st.booleans()), max_size=8)


@given(st.integers(0, 9), st.lists(st.tuples(KINDS, st.floats(0.0, 300.0)), min_size=1, max_size=40))
def test_there_is_always_another_restart_and_no_kind_spends_what_is_another_s(
    limit: int, losses: list[tuple[LossKind, float]]
) -> None:
    budget, now_s = RestartBudget(limit), 0.0
    for number, (kind, gap_s) in enumerate(losses):
        now_s += gap_s
        before = {other: budget.observe_loss(-1, other, "", now_s).count(other) - 1 for other in LOSS_KINDS}
        budget = budget.observe_loss(number, kind, f"cause {number}", now_s)
        assert all(budget.count(other) == before[other] + (other == kind) for other in LOSS_KINDS)
        assert 0.0 < budget.delay_s(kind) <= SPENT_BACKOFF_S
        assert (budget.delay_s(kind) == SPENT_BACKOFF_S) == budget.is_spent(kind)
        assert budget.describe(kind)
    later = budget.observe_loss(-1, "crashed", "", now_s + WINDOW_S + 1.0)
    assert len(later.made) == 1, "what is long ago is forgotten"


def test_restarts_come_later_the_more_there_were() -> None:
    budget = RestartBudget(limit=8)
    delays = []
    for number in range(10):
        budget = budget.observe_loss(number, "crashed", "out of memory" if not number else "device busy", number * 1.0)
        delays.append(budget.delay_s("crashed"))
    assert delays[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert delays[7] == MAX_BACKOFF_S
    assert delays[8:] == [SPENT_BACKOFF_S] * 2
    assert budget.describe("crashed").endswith("now started once a minute; the first time: out of memory")
    for number in range(30):
        budget = budget.observe_loss(number, "host", "no route", 10.0)
    assert budget.delay_s("host") == HOST_BACKOFF_S
    useful = budget.observe_loss(99, "killed", "the operator", 11.0, served_s=USEFUL_S)
    assert useful.delay_s("killed") == FIRST_BACKOFF_S, "a worker that served is started again at once"
    assert useful.count("crashed") == 0
    assert not budget.forgive(frozenset(range(40))).made


@given(DEATHS, st.builds(Death, st.integers(0, 99), KINDS, st.booleans(), st.booleans()))
def test_a_further_death_never_makes_less_suspicious_and_only_deaths_alone_are_proof(
    deaths: list[Death], further: Death
) -> None:
    assert weigh_suspicion([*deaths, further]) >= weigh_suspicion(deaths)
    assert probation_tokens([*deaths, further]) >= probation_tokens(deaths)
    assert not convicts([death for death in deaths if not death.alone], others_progress=True)
    if convicts(deaths, others_progress=False):
        assert convicts(deaths, others_progress=True)
        assert convicts([*deaths, further], others_progress=False)


@given(st.lists(st.builds(Death, st.integers(0, 99), st.just("host"), st.booleans(), st.booleans()), max_size=50))
def test_a_host_that_goes_away_is_nobody_s_fault(deaths: list[Death]) -> None:
    assert not is_suspect(deaths)
    assert not convicts(deaths, others_progress=True)


@given(st.floats(0.0, 60_000.0), st.floats(0.0, 1e6), st.floats(0.0, 1.0), st.integers(1, 64))
def test_a_round_within_its_bound_is_no_hang_and_one_without_processor_time_beyond_it_is(
    expected_ms: float, quiet_ms: float, share: float, cores: int
) -> None:
    bound_ms = 1000.0 * bound_round_s(expected_ms)
    idle = Pulse(expected_ms, quiet_ms, 0.0, cores)
    assert bool(judge_pulse(idle)) == (quiet_ms > bound_ms)
    starved = Pulse(expected_ms, quiet_ms, quiet_ms * share, cores)
    if quiet_ms <= bound_ms:
        assert not judge_pulse(starved)
    if quiet_ms > 20.5 * bound_ms:
        assert judge_pulse(starved), "nothing is starved for ever"


def test_a_busy_machine_is_no_hang_and_a_loop_without_end_is() -> None:
    competing = Pulse(expected_ms=200.0, quiet_ms=3000.0, cpu_ms=1200.0, cores=2)
    assert not judge_pulse(competing)
    crowded = Pulse(expected_ms=5000.0, quiet_ms=121_200.0, cpu_ms=66_000.0, cores=2)
    assert not judge_pulse(crowded)
    endless = Pulse(expected_ms=200.0, quiet_ms=4000.0, cpu_ms=7600.0, cores=2)
    assert judge_pulse(endless)


@given(st.floats(0.0, 1e8), st.floats(0.0, 1e8), st.floats(0.0, 1e8), st.integers(1, 64))
def test_a_load_hangs_where_nothing_is_done_for_it_and_where_it_computes_without_end(
    quiet_ms: float, cpu_ms: float, idle_ms: float, cores: int
) -> None:
    hangs = bool(judge_pulse(Pulse(-1.0, quiet_ms, cpu_ms, cores, idle_ms)))
    assert hangs == (idle_ms > 1000.0 * LOAD_IDLE_S or min(quiet_ms, cpu_ms) > 1000.0 * LOAD_STAGE_S)


@given(st.floats(0.0, 1e9), st.floats(0.0, 60_000.0))
def test_a_load_is_given_time_on_any_disk_and_beside_any_other_program(quiet_ms: float, stopped_ms: float) -> None:
    """It moves bytes and computes next to nothing; or nobody ran at all for a minute."""
    assert not judge_pulse(Pulse(-1.0, quiet_ms, min(quiet_ms * 0.001, 1e6), 1, 0.0))
    assert not judge_silence(stopped_ms / 1000.0, expected_ms=-1.0, loading=True)
    assert not judge_pulse(Pulse(-1.0, stopped_ms, 0.0, 1, stopped_ms))


@given(st.floats(0.0, 10_000.0), st.floats(0.0, 600.0))
def test_silence_is_bounded_by_the_predicted_round(expected_ms: float, silent_s: float) -> None:
    verdict = judge_silence(silent_s, expected_ms=expected_ms, loading=False)
    assert bool(verdict) == (silent_s > HUNG_AFTER * expected_ms / 1000.0 + FLOOR_S)
    assert bool(judge_silence(silent_s, expected_ms=expected_ms, loading=True)) == (silent_s > LOAD_SILENCE_S)


@pytest.mark.parametrize(("kind", "deaths"), [("crashed", 1), ("hung", 2), ("memory", 3), ("killed", 6), ("device", 3)])
def test_the_less_a_death_says_of_a_request_the_more_of_them_are_proof(kind: LossKind, deaths: int) -> None:
    alone = [Death(number, kind, settled=False, alone=True) for number in range(deaths)]
    assert convicts(alone, others_progress=True)
    assert not convicts(alone[1:], others_progress=True)


@pytest.mark.parametrize("kind", ["memory", "killed"])
def test_a_request_that_was_getting_on_is_not_convicted_by_kills(kind: LossKind) -> None:
    alone = [Death(number, kind, settled=True, alone=True) for number in range(50)]
    assert not convicts(alone, others_progress=True)
    assert not is_suspect(alone)
