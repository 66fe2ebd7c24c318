"""How many replicas there are, by load alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.scaling import (
    ADD_AFTER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ScaleBounds,
    ScaledReplica,
    ScaleLoad,
    ScaleTrend,
    choose_leaver,
    follow_load,
)

IDLE_S = 20.0


@dataclass
class Fleet:
    """Replicas that come and go at once as they are told, each with so many places, and what was decided."""

    bounds: ScaleBounds
    places: list[int]
    room: int = 1 << 16
    trend: ScaleTrend = field(default_factory=ScaleTrend)
    now_s: float = 0.0
    count: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.count or self.bounds.least

    def load(self, requests: int, late: str = "") -> ScaleLoad:
        mine = [self.places[number % len(self.places)] for number in range(self.count)]
        seen = [ScaledReplica(f"target-{number}", places=places) for number, places in enumerate(mine)]
        left = requests
        for number, sample in enumerate(seen):
            taken = min(left, sample.places)
            seen[number], left = replace(sample, streams=taken), left - taken
        return ScaleLoad(tuple(seen), left, late, self.room, "no cores")

    def look(self, load: ScaleLoad) -> int:
        change = follow_load(self.trend, self.bounds, load, self.now_s)
        self.trend = change.trend
        if change.more:
            self.count += change.more
            self.steps.append((self.now_s, change.more))
        self.now_s += 1.0
        return change.more

    def run(
        self, seconds: int, requests: Callable[[float], int], late: Callable[[int], str] = lambda count: ""
    ) -> None:
        for _ in range(seconds):
            self.look(self.load(requests(self.now_s), late(self.count)))


BOUNDS = st.builds(
    lambda least, more, idle_s: ScaleBounds(least, least + more, idle_s),
    st.integers(1, 4),
    st.integers(0, 6),
    st.sampled_from([5.0, IDLE_S, 60.0]),
)
PLACES = st.lists(st.integers(1, 32), min_size=1, max_size=4)


@given(BOUNDS, PLACES, st.lists(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 12))
def test_bounds_hold_whatever_the_load_does(bounds, places, loads, room):
    fleet = Fleet(bounds, places, max(room, bounds.least))
    for requests in loads:
        fleet.look(fleet.load(requests))
        assert bounds.least <= fleet.count <= min(bounds.most, fleet.room)


@given(BOUNDS, PLACES, st.integers(0, 300), st.integers(1, 11))
def test_a_steady_load_never_asks_for_one_more_and_one_less(bounds, places, requests, begun):
    fleet = Fleet(bounds, places, count=max(bounds.least, min(begun, bounds.most)))
    fleet.run(400, lambda now_s: requests)
    assert len({more for _, more in fleet.steps}) <= 1


@given(BOUNDS, PLACES, st.integers(0, 300), st.integers(2, 8))
def test_an_objective_that_one_replica_more_keeps_does_not_make_it_go_again(bounds, places, requests, enough):
    fleet = Fleet(bounds, places)
    fleet.run(400, lambda now_s: requests, lambda count: "TTFT is late" if count < enough else "")
    assert not any(more < 0 for _, more in fleet.steps)


@given(BOUNDS, PLACES, st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=20))
def test_one_ends_only_where_it_was_not_needed_for_idle_s_and_comes_only_where_it_was_for_seconds(
    bounds, places, phases
):
    fleet = Fleet(bounds, places)
    seen: list[tuple[float, int, int]] = []
    for requests, seconds in phases:
        for _ in range(seconds):
            load = fleet.load(requests)
            seen.append((fleet.now_s, requests, load.places - max(one.places for one in load.replicas)))
            more = fleet.look(load)
            last_s = max((at_s for at_s, _ in fleet.steps[:-1]), default=-1e9) if more else 0.0
            if more < 0:
                assert fleet.now_s - 1.0 - last_s >= bounds.idle_s
                late = [sample for sample in seen if sample[0] >= fleet.now_s - 1.0 - bounds.idle_s]
                assert all(requests <= left / 2 for _, requests, left in late)
            if more > 0:
                assert fleet.now_s - 1.0 - last_s >= ADD_AFTER_S


def test_a_burst_takes_it_to_the_most_and_silence_takes_it_back():
    fleet = Fleet(ScaleBounds(1, 3, IDLE_S), [2])
    fleet.run(30, lambda now_s: 9)
    assert [more for _, more in fleet.steps] == [1, 1]
    fleet.run(100, lambda now_s: 0)
    assert [more for _, more in fleet.steps] == [1, 1, -1, -1]
    (_, _, first, second) = [at_s for at_s, _ in fleet.steps]
    assert second - first >= IDLE_S


def test_one_late_stream_alone_asks_for_nothing():
    fleet = Fleet(ScaleBounds(1, 3, IDLE_S), [8])
    fleet.run(60, lambda now_s: 1, lambda count: "TPOT is late")
    assert fleet.steps == []
    fleet.run(10, lambda now_s: 2, lambda count: "TPOT is late")
    assert fleet.count == 2


@pytest.mark.parametrize("state", ["starting", "lost"])
def test_nothing_is_added_or_ended_while_one_is_started(state):
    """A crash looks like load: the places that are left are taken."""
    bounds = ScaleBounds(1, 4, 1.0)
    serving = ScaledReplica("target-0", streams=8, places=8)
    coming = ScaledReplica("target-1", serving=False, places=8 if state == "lost" else 1)
    trend = ScaleTrend()
    for now_s in range(100):
        change = follow_load(trend, bounds, ScaleLoad((serving, coming), held=9), float(now_s))
        trend = change.trend
        assert change.more == 0


def test_one_that_is_gone_is_replaced_and_ends_first():
    bounds = ScaleBounds(2, 3, IDLE_S)
    gone = ScaledReplica("target-0", serving=False, gone=True)
    load = ScaleLoad((gone, ScaledReplica("target-1")))
    change = follow_load(ScaleTrend(), bounds, load, 0.0)
    assert (change.more, change.wanted) == (1, 2)
    assert choose_leaver(load.replicas) == "target-0"
    assert choose_leaver((ScaledReplica("target-0"), ScaledReplica("target-1"))) == "target-1"
    nowhere = follow_load(ScaleTrend(), bounds, replace(load, room=1, no_room="one host is left"), 0.0)
    assert nowhere.more == 0
    assert "one host is left" in nowhere.why


def test_where_there_is_no_place_load_still_says_that_it_wants_one():
    fleet = Fleet(ScaleBounds(1, 3, IDLE_S), [2], room=1)
    fleet.run(20, lambda now_s: 9)
    change = follow_load(fleet.trend, fleet.bounds, fleet.load(9), fleet.now_s)
    assert (fleet.count, change.more, change.wanted) == (1, 0, 2)
    assert "no cores" in change.why
    fleet.room = 2
    assert fleet.look(fleet.load(9)) == 1, "at once: it has been crowded for long"


@given(st.integers(1, 40))
def test_what_could_not_be_had_is_asked_for_ever_later_and_at_once_where_things_have_changed(failures):
    trend, now_s, pauses = ScaleTrend(), 100.0, []
    for _ in range(failures):
        trend = trend.observe_failure(now_s)
        pauses.append(trend.again_s - now_s)
        now_s = trend.again_s
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE_S
    bounds, load = ScaleBounds(1, 2, IDLE_S), ScaleLoad((ScaledReplica("target-0", streams=1),))
    waits = replace(trend, crowded_since_s=0.0)
    assert follow_load(waits, bounds, load, trend.again_s - 0.1).more == 0
    assert follow_load(waits, bounds, load, trend.again_s).more == 1
    assert follow_load(waits.forget_failures(), bounds, load, trend.again_s - 0.1).more == 1
