"""Which of very many replicas are priced: the least loaded of each kind, and never more than a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.narrowing import IDLE_KINDS, KINDS, PER_KIND, STEP, Kind, Narrowing, step_of
from policies.serving.replica_load import PaceSum, ReplicaPace, add_paces

changes = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 5), st.integers(0, 9), st.sampled_from(["put", "load", "drop"])),
    max_size=300,
)


def kind(number: int, *, takes: bool = True) -> Kind:
    return Kind(number, takes, hopes=True, tokens="bits", token_ms=1.0 + number, places=4)


@given(changes)
def test_of_each_kind_those_with_the_fewest_streams_are_taken(told: list[tuple[int, int, int, str]]) -> None:
    narrowing: Narrowing[str] = Narrowing()
    there: dict[str, tuple[int, int]] = {}
    for number, of, load, what in told:
        name = f"r{number:02}"
        if what == "put":
            narrowing.put(name, name, kind(of), load)
            there[name] = (of, load)
        elif what == "load" and name in there:
            narrowing.set_load(name, name, load)
            there[name] = (there[name][0], load)
        elif what == "drop":
            narrowing.drop(name)
            there.pop(name, None)
        for more in (0, 2):
            wanted: list[str] = []
            for each in {of for of, _ in there.values()}:
                mine = sorted((load, name) for name, (of, load) in there.items() if of == each)
                wanted += [name for _, name in mine[: PER_KIND + more]]
            assert sorted(narrowing.choose(more_per_kind=more)) == sorted(wanted)
    assert len(narrowing) == len(there)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 3))
def test_however_many_kinds_there_are_few_are_taken(takers: int, others: int, more: int) -> None:
    narrowing: Narrowing[str] = Narrowing()
    for number in range(takers + others):
        for each in range(4):
            name = f"r{number:03}-{each}"
            narrowing.put(name, name, kind(number, takes=number < takers), each)
    members = narrowing.choose(more_per_kind=more)
    assert len(members) <= (PER_KIND + more) * KINDS + IDLE_KINDS * (PER_KIND + more if more else 1)
    assert len(set(members)) == len(members)
    assert "r000-0" in members, "the kind that promises most"


@given(st.integers(0, 3), st.booleans())
def test_where_nobody_takes_requests_one_that_is_ruled_out_hides_no_other(more: int, someone_takes: bool) -> None:
    narrowing: Narrowing[str] = Narrowing()
    for each in range(4):
        narrowing.put(f"refused-{each}", f"refused-{each}", kind(0, takes=False), each)
    if someone_takes:
        narrowing.put("taker", "taker", kind(1), 0)
    refused = [name for name in narrowing.choose(more_per_kind=more) if name != "taker"]
    assert len(refused) == (1 if someone_takes and not more else min(4, PER_KIND + more))


def test_whose_tokens_must_be_the_same_is_looked_for_first() -> None:
    narrowing: Narrowing[str] = Narrowing()
    for number in range(40):
        tokens = "mine" if number == 39 else "others"
        narrowing.put(f"r{number}", f"r{number}", Kind(number, True, True, tokens, 1.0 + number, 1), 0)
    assert narrowing.choose("mine") == ["r39"]
    assert len(narrowing.choose("nobody's")) == KINDS


@given(st.floats(0.01, 1e6), st.floats(1.0, 2.0))
def test_figures_of_one_step_differ_by_less_than_a_step(figure: float, factor: float) -> None:
    if step_of(figure) == step_of(figure * factor):
        assert factor <= STEP * (1.0 + 1e-9)
    assert step_of(0.0) < step_of(figure)


paces = st.builds(  # sums of times are numbers
    ReplicaPace,
    st.floats(0.5, 50.0),
    st.floats(1.0, 100.0),
    st.floats(1.0, 400.0),
    st.floats(1.0, 500.0),
    st.floats(1.0, 50_000.0),
    st.floats(0.0, 500.0),
    st.floats(1.0, 400.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 100.0),
)


@given(st.lists(st.tuples(st.integers(0, 40), st.none() | paces), max_size=200))
def test_sums_that_are_kept_are_those_of_all_paces(told: list[tuple[int, ReplicaPace | None]]) -> None:
    kept, known = PaceSum(), dict[int, ReplicaPace]()
    for number, pace in told:
        kept.set_pace(number, pace)
        known.pop(number, None)
        if pace is not None:
            known[number] = pace
        assert kept.find_sum()[:-1] == pytest.approx(add_paces(list(known.values()))[:-1])
