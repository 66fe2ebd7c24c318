"""How many draft workers there are, and who drafts for whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.draft_pool import (
    PoolSize,
    PoolTrend,
    PoolWorker,
    choose_leaver,
    follow_pool,
)
from policies.serving.draft_sharing import assign_drafts
from policies.serving.scaling import ADD_AFTER_S

HOSTS = st.sampled_from(["", "a", "b", "c"])
SHARES = st.floats(0.0, 1.0)


@st.composite
def workers(draw: st.DrawFn, least: int = 0, most: int = 6) -> list[PoolWorker]:
    numbers = draw(st.lists(st.integers(0, 9), unique=True, min_size=least, max_size=most))
    return [
        PoolWorker(
            number,
            draw(HOSTS),
            draw(st.booleans()),
            draw(st.integers(0, 4)),
            draw(SHARES),
            draw(SHARES),
            draw(st.sampled_from([0.0, 1.0, 1.1, 1.5, 2.0])),
        )
        for number in numbers
    ]


REPLICAS = st.dictionaries(st.sampled_from([f"target-{number}" for number in range(12)]), HOSTS)
ASSIGNED = st.dictionaries(st.sampled_from([f"target-{number}" for number in range(12)]), st.integers(0, 9))


@given(REPLICAS, workers(), ASSIGNED)
def test_every_replica_has_one_worker_that_drafts_where_any_does(replicas, found, before):
    assigned = assign_drafts(replicas, found, before)
    assert set(assigned) == (set(replicas) if found else set())
    usable = {worker.number for worker in found if worker.serving} or {worker.number for worker in found}
    assert set(assigned.values()) <= usable


@given(REPLICAS, workers(), ASSIGNED)
def test_what_is_assigned_stays_until_something_changes(replicas, found, before):
    assigned = assign_drafts(replicas, found, before)
    assert assign_drafts(replicas, found, assigned) == assigned


@given(REPLICAS, workers(least=1), ASSIGNED)
def test_on_one_host_no_worker_has_two_more_than_another(replicas, found, before):
    here = dict.fromkeys(replicas, "a")
    worker = [PoolWorker(worker.number, "a", worker.serving) for worker in found]
    counts = Counter(assign_drafts(here, worker, before).values())
    usable = [worker.number for worker in worker if worker.serving] or [worker.number for worker in worker]
    assert max(counts[name] for name in usable) - min(counts[name] for name in usable) <= 1


@given(REPLICAS, workers(), ASSIGNED)
def test_no_replica_would_have_less_company_with_another_worker(replicas, found, before):
    assigned = assign_drafts(replicas, found, before)
    usable = [worker for worker in found if worker.serving] or found
    counts = Counter(assigned.values())
    for name, number in assigned.items():
        price = {
            one.number: counts[one.number] - (one.number == number) + 0.5 * (len({replicas[name], one.host} - {""}) > 1)
            for one in usable
        }
        assert price[number] == min(price.values())


@given(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"]))
def test_the_same_host_comes_first_and_company_counts_more(mine, other):
    near, far = PoolWorker(0, other), PoolWorker(1, mine)
    assert assign_drafts({"t": mine}, [near, far], {})["t"] == (0 if mine == other else 1)
    two = assign_drafts({"t": mine, "u": mine}, [near, far], {})
    assert set(two.values()) == {0, 1}


@given(REPLICAS, workers(least=1), st.data())
def test_one_worker_more_moves_nobody_but_to_itself(replicas, found, data):
    serving = [PoolWorker(worker.number, "a") for worker in found]
    here = dict.fromkeys(replicas, "a")
    before = assign_drafts(here, serving, {})
    number = data.draw(st.integers(10, 12))
    after = assign_drafts(here, [*serving, PoolWorker(number, "a")], before)
    assert all(after[name] in (before[name], number) for name in replicas)


SIZES = st.tuples(st.integers(1, 4), st.integers(0, 4), st.floats(1.0, 100.0)).map(
    lambda drawn: PoolSize(drawn[0], drawn[0] + drawn[1], drawn[2])
)
TRENDS = st.builds(
    PoolTrend, st.one_of(st.none(), st.floats(0.0, 1000.0)), st.one_of(st.none(), st.floats(0.0, 1000.0))
)


@given(TRENDS, SIZES, workers(), st.integers(0, 12), st.floats(0.0, 2000.0))
def test_there_are_never_fewer_than_the_least_nor_more_than_the_most(trend, size, found, replicas, now_s):
    change = follow_pool(trend, size, found, replicas, now_s)
    count = len(found) + change.more
    if change.more:
        assert min(len(found), size.least) <= count <= max(len(found), size.most)
    if change.more > 0 and len(found) >= size.least:
        assert len(found) < replicas, "one for each replica is enough"
    if change.more < 0:
        assert count >= size.least
        assert not any(worker.is_crowded for worker in found)
    assert change.look_s is None or change.look_s > 0.0


CROWDED = PoolWorker(0, "", True, 2, 0.9, 0.5, 1.6)


def test_a_worker_is_added_once_it_was_crowded_for_long_enough_and_not_for_a_moment():
    size = PoolSize(1, 2)
    change = follow_pool(PoolTrend(), size, [CROWDED], 2, 10.0)
    assert (change.more, change.look_s) == (0, ADD_AFTER_S)
    calm = follow_pool(change.trend, size, [PoolWorker(0, "", True, 2, 0.2)], 2, 11.0)
    assert calm.trend.crowded_since_s is None
    assert follow_pool(calm.trend, size, [CROWDED], 2, 10.0 + ADD_AFTER_S).more == 0
    assert follow_pool(change.trend, size, [CROWDED], 2, 10.0 + ADD_AFTER_S).more == 1


@given(
    st.sampled_from(
        [
            PoolWorker(0, "", True, 1, 1.0, 1.0, 2.0),  # a replica alone is as fast as it can be
            PoolWorker(0, "", True, 2, 1.0, 1.0, 1.05),  # sharing costs nothing
            PoolWorker(0, "", True, 2, 1.0, 0.1, 2.0),  # hardly any draft is cut
            PoolWorker(0, "", False, 2, 1.0, 1.0, 2.0),  # it does not draft
        ]
    )
)
def test_another_worker_that_would_not_help_is_not_added(worker):
    assert follow_pool(PoolTrend(0.0, None), PoolSize(1, 4), [worker], 4, 1000.0).more == 0


def test_nobody_is_added_while_one_is_being_started():
    coming = PoolWorker(1, serving=False)
    assert follow_pool(PoolTrend(0.0), PoolSize(1, 4), [CROWDED, coming], 4, 1000.0).more == 0


@given(st.floats(0.0, 0.49))
def test_one_that_is_spare_for_long_enough_is_ended_and_what_is_left_is_not_crowded_by_it(busy):
    size = PoolSize(1, 2, 30.0)
    two = [PoolWorker(0, "", True, 1, busy / 2), PoolWorker(1, "", True, 1, busy / 2)]
    first = follow_pool(PoolTrend(), size, two, 2, 5.0)
    assert (first.more, first.look_s) == (0, 30.0)
    assert follow_pool(first.trend, size, two, 2, 34.9).more == 0
    assert follow_pool(first.trend, size, two, 2, 35.0).more == -1
    used = [PoolWorker(0, "", True, 1, 0.3), PoolWorker(1, "", True, 1, 0.3)]
    assert follow_pool(first.trend, size, used, 2, 35.0).trend.spare_since_s is None


def test_who_drafts_for_nobody_leaves_first_and_the_newest_of_equals():
    three = [PoolWorker(0), PoolWorker(1), PoolWorker(2)]
    assert choose_leaver(three, {"a": 0, "b": 1, "c": 2}) == 2
    assert choose_leaver(three, {"a": 0, "b": 2, "c": 2}) == 1
    assert choose_leaver([PoolWorker(0, serving=False), *three[1:]], {"a": 1}) == 0
