"""A simulated fleet with faults, little memory and shared beginnings: control's decisions, and no token lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_lab.simulation.faults import Fault, FaultSchedule, RandomFaults, list_faults, load_faults
from outrider_lab.simulation.trace import TracedRequest
from outrider_lab.simulation.world import World

from device_profiles.cost import StepCost
from orchestrator.errors import ConfigError
from policies.serving.failover.standby import Readiness
from policies.serving.replay_budget import REPLAY_SHARE
from tools.lab.tests.simulation.fleets import LIMITS, add_draft, make_fleet, make_kind, play

TWO = make_fleet(add_draft(make_kind()), add_draft(make_kind(speed=0.5)))
REQUESTS = [TracedRequest(0.3 * n, 40 + n, 120 + 7 * n) for n in range(40)]


def count_tokens(requests):
    return sorted(one.output_tokens for one in requests)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(at_s=4, kind="kill_worker", name="target-1"),
        Fault(at_s=4, kind="lose_device", name="target-2"),
        Fault(at_s=4, kind="freeze_worker", name="target-1", seconds=1),
        Fault(at_s=4, kind="freeze_worker", name="target-1"),
        Fault(at_s=4, kind="kill_host", name="host-1", seconds=20),
        Fault(at_s=4, kind="cut_link", name="host-2", seconds=5),
        Fault(at_s=4, kind="kill_host", name="host-2"),
        Fault(at_s=4, kind="kill_draft", name="target-1"),
        Fault(at_s=4, kind="kill_host", name="drafts", seconds=6),
        Fault(at_s=4, kind="slow_device", name="target-1", factor=3),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.name}-{fault.seconds:g}",
)
def test_no_request_and_no_token_is_lost(fault):
    world = play(TWO, REQUESTS, [fault])
    outcomes = world.outcomes
    assert not outcomes.errors
    assert sorted(outcomes.tokens) == count_tokens(REQUESTS)
    if fault.name not in ("target-2", "host-2"):  # the slow replica has little to do: requests that try its draft
        spared = fault.name == "drafts" or fault.kind in ("kill_draft", "slow_device")
        assert bool(outcomes.pauses_ms) == (not spared)


KINDS = ["kill_worker", "freeze_worker", "lose_device", "kill_draft", "slow_device"]
FAULTS = st.builds(
    Fault,
    at_s=st.floats(0, 20),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["target-1", "target-2", "target-3", "target-4"]),
    seconds=st.sampled_from([0.0, 0.7, 5.0]),
)
MIXED = [add_draft(make_kind(group="a")), *(make_kind(speed=s, group=g) for s, g in ((0.5, "a"), (0.7, "b"), (2, "c")))]
FLEETS = st.lists(st.sampled_from(MIXED), min_size=2, max_size=4)
OTHER_BITS = st.sampled_from(["never", "new_requests", "streams", "streams"])
SIZES = st.lists(st.tuples(st.floats(0, 15), st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=25)


@settings(deadline=None, max_examples=40)
@given(FLEETS, SIZES, st.lists(FAULTS, max_size=3), OTHER_BITS)
def test_whatever_goes_wrong_every_output_is_whole_and_every_change_of_bits_is_told(kinds, sizes, faults, other_bits):
    requests = [TracedRequest(*one) for one in sorted(sizes)]
    outcomes = play(make_fleet(*kinds), requests, faults, other_bits).outcomes
    assert sorted(outcomes.tokens) == count_tokens(requests)
    assert not outcomes.errors
    assert outcomes.misplaced_tokens == outcomes.unmarked_changes == 0
    if other_bits != "streams" or len({kind.group for kind in kinds}) == 1:
        assert outcomes.changed_group == 0


@settings(deadline=None, max_examples=20)
@given(FLEETS, SIZES, st.lists(FAULTS, max_size=3))
def test_streams_stay_in_a_group_that_has_a_member_left(kinds, sizes, faults):
    spared = [kind for kind in kinds for _ in range(2)]  # of each group a member that nothing happens to
    moved = [fault.model_copy(update={"name": f"target-{2 * int(fault.name[-1]) - 1}"}) for fault in faults]
    outcomes = play(make_fleet(*spared), [TracedRequest(*one) for one in sorted(sizes)], moved).outcomes
    assert len(outcomes.tokens) == len(sizes)
    assert outcomes.changed_group == outcomes.misplaced_tokens == 0


@pytest.mark.parametrize("other_bits", ["new_requests", "streams"])
def test_a_group_that_never_comes_back_hands_its_streams_on_where_it_may(other_bits):
    fleet = make_fleet(*MIXED[1:3])
    gone = [Fault(at_s=4, kind="kill_host", name="host-2")]
    outcomes = play(fleet, REQUESTS, gone, other_bits).outcomes
    left = len(REQUESTS) - len(outcomes.tokens)
    assert (outcomes.changed_group > 0, left > 0) == ((True, False) if other_bits == "streams" else (False, True))
    assert outcomes.unmarked_changes == outcomes.misplaced_tokens == 0


def test_a_fleet_that_never_comes_back_ends_the_simulation():
    fleet = make_fleet(make_kind())
    world = play(fleet, REQUESTS[:5], [Fault(at_s=0.2, kind="kill_host", name="host-1")])
    summary = world.outcomes.summarise({"ttft_ms": 1.0}, 2.0)
    assert summary["completed"] == 0
    assert summary["unfinished"] + summary["failed"] == 5
    assert summary["slo_attainment"] == 0.0
    assert summary["cost_per_million_tokens"] is None


def test_a_slow_device_is_slow_for_whoever_is_on_it():
    fleet = make_fleet(make_kind())
    slow = Fault(at_s=0, kind="slow_device", name="target-1", factor=4)
    kill = Fault(at_s=1, kind="kill_worker", name="target-1")
    usual, slowed = play(fleet, REQUESTS[20:21]), play(fleet, REQUESTS[20:21], [slow, kill])
    took = [one.outcomes.ends_s[0] - one.outcomes.firsts_s[0] for one in (usual, slowed)]
    assert took[1] > 3 * took[0]


def test_a_hot_standby_shortens_the_pause():
    pauses = []
    for readiness in (None, Readiness.WARM, Readiness.HOT):
        fleet = make_fleet(make_kind(), make_kind())
        spare = replace(fleet.replicas[1], standby=readiness)
        fleet = replace(fleet, replicas=fleet.replicas[:1] if readiness is None else (fleet.replicas[0], spare))
        pauses.append(play(fleet, REQUESTS, [Fault(at_s=4, kind="kill_worker", name="target-1")]).outcomes.pauses_ms)
    none, _, hot = [max(one) for one in pauses]
    assert hot < 0.2 * none


def test_where_memory_is_short_sequences_give_way_and_end_all_the_same():
    requests = [TracedRequest(0.0, 100, 300) for _ in range(8)]
    roomy, tight = (play(make_fleet(make_kind(kv_tokens=size)), requests) for size in (100_000, 1000))
    assert list(tight.outcomes.tokens) == [300] * 8
    assert max(tight.outcomes.ends_s) > 1.3 * max(roomy.outcomes.ends_s)


def test_a_shared_beginning_is_read_once():
    alone = [TracedRequest(2.0 * n, 3000, 20) for n in range(6)]
    alike = [replace_prefix(one) for one in alone]
    first, second = (play(make_fleet(make_kind()), requests) for requests in (alone, alike))
    waits = [
        [f - a for f, a in zip(one.outcomes.firsts_s, one.outcomes.arrivals_s, strict=True)] for one in (first, second)
    ]
    assert waits[1][0] == pytest.approx(waits[0][0])
    assert max(waits[1][1:]) < 0.5 * min(waits[0][1:])


def replace_prefix(one):
    return TracedRequest(one.arrival_s, one.prompt_tokens, one.output_tokens, prefix="system", prefix_tokens=2800)


def test_a_shared_draft_worker_takes_longer_for_more():
    def time_round(count):
        fleet = make_fleet(*[add_draft(make_kind(), 2.0, drafts_ahead=False) for _ in range(count)])
        requests = [TracedRequest(0.0, 20, 200) for _ in range(4 * count)]
        from policies.serving.draft_pool import PoolSize

        world = play(replace(fleet, draft_pools={"draft": PoolSize(1, 1)}), requests)
        use = world.uses["kind-1"]
        return use.busy_s / use.rounds

    assert time_round(8) > 1.05 * time_round(1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(at_s=1, kind="kill_worker", name="target-9"), "there is target-1, target-2"),
        (Fault(at_s=1, kind="kill_host", name="target-1"), "there is drafts, host-1, host-2"),
        (Fault(at_s=1, kind="kill_draft", name="host-1"), "there is target-1, target-2"),
    ],
)
def test_a_fault_of_what_is_not_there_names_what_is(fault, said):
    with pytest.raises(ConfigError, match=said):
        list_faults(FaultSchedule(faults=(fault,)), TWO, 100.0)


def test_a_lost_draft_of_a_replica_without_one_is_refused():
    fault = FaultSchedule(faults=(Fault(at_s=1, kind="kill_draft", name="target-1"),))
    with pytest.raises(ConfigError, match="no replica has a draft worker"):
        list_faults(fault, make_fleet(make_kind()), 100.0)


def test_a_schedule_says_where_it_is_wrong(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text("faults:\n  - {at_s: 3, kind: kill_worker, name: a}\n  - {at_s: -1, kind: kill_worker, name: a}\n")
    with pytest.raises(ConfigError, match=r"faults.yaml:3"):
        load_faults(path)


def test_drawn_faults_are_the_seeds():
    rules = FaultSchedule(random=(RandomFaults(kind="kill_worker", every_hours=0.1),), seed=4)
    drawn = list_faults(rules, TWO, 36_000.0)
    assert drawn == list_faults(rules, TWO, 36_000.0)
    assert {one.name for one in drawn} == {"target-1", "target-2"}
    assert 120 < len(drawn) < 290  # 200 on the mean


def test_faults_behind_the_end_do_not_happen():
    world = World(make_fleet(make_kind()), LIMITS)
    world.open()
    world.start(3600.0)
    world.play(REQUESTS[:2], [Fault(at_s=10_000, kind="kill_worker", name="target-1")])
    assert world.now_s < 1000


def test_a_prompt_in_parts_pays_for_the_rows_of_each_part():
    kind = replace(make_kind(), max_itl_ms=60.0)  # fewer than 200 rows beside a sequence that decodes
    waits = []
    for tokens in (180, 210, 300):
        requests = [TracedRequest(0.0, 8, 200), TracedRequest(1.0, tokens, 8)]
        outcomes = play(make_fleet(kind), requests).outcomes
        first = max(range(2), key=lambda number: outcomes.arrivals_s[number])
        waits.append(outcomes.firsts_s[first] - outcomes.arrivals_s[first])
    assert waits[0] < waits[1] < 0.9 * waits[2]


def test_a_forward_of_other_rows_than_the_one_before_takes_longer():
    kind = make_kind(speculates=False)
    changing = replace(kind, costs=replace(kind.costs, change_ms=10.0))
    requests = [TracedRequest(10.0 * n, 40, 20) for n in range(3)]
    steady, longer = (play(make_fleet(one), requests).outcomes for one in (kind, changing))
    for more_s, before, after in ((0.01, steady.firsts_s, longer.firsts_s), (0.02, steady.ends_s, longer.ends_s)):
        assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([more_s] * 3)


def test_lost_streams_are_read_again_in_half_of_the_time_beside_streams_that_run():
    kind = make_kind(speculates=False)
    row_ms = 1.0
    dear = replace(kind, costs=replace(kind.costs, forward=StepCost((1.0, 512.0), (20.0, 20.0 + 511.0 * row_ms))))
    requests = [TracedRequest(0.1 * n, 100, 400) for n in range(4)]
    outcomes = play(make_fleet(dear, dear), requests, [Fault(at_s=5, kind="kill_worker", name="target-2")]).outcomes
    assert len(outcomes.pauses_ms) == 2
    read_ms = 250 * row_ms  # each was told more tokens than that, its prompt included
    assert min(outcomes.pauses_ms) > read_ms + read_ms / REPLAY_SHARE
