"""Which members of a pool work, where they slow each other down."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.working_set import Member, choose_working, predict_tokens_per_s

PLACES = 16


@st.composite
def list_members(draw: st.DrawFn, companies: st.SearchStrategy[float]) -> list[Member]:
    members = []
    for number in range(draw(st.integers(2, 4))):
        lone_ms, more_ms = draw(st.floats(1.0, 80.0)), draw(st.floats(0.0, 20.0))
        tpots_ms = [lone_ms + more_ms * count for count in range(draw(st.integers(1, PLACES)))]
        members.append(Member(f"m{number}", tpots_ms, draw(companies)))
    return members


@given(list_members(st.just(1.0)), st.integers(1, 40))
def test_all_work_where_nobody_slows_another_down(members: list[Member], requests: int) -> None:
    working, made, whole = choose_working(members, requests)
    assert working == {member.name for member in members}
    assert made == whole


@given(list_members(st.floats(1.0, 2.0)), st.integers(1, 40))
def test_those_that_work_make_clearly_more_than_all_and_no_less_than_any_other_set(
    members: list[Member], requests: int
) -> None:
    working, made, whole = choose_working(members, requests)
    chosen = [member for member in members if member.name in working]
    assert made == pytest.approx(predict_tokens_per_s(chosen, requests))
    assert len(chosen) == len(members) or made > 1.02 * whole
    for size in range(1, len(members)):
        for others in combinations(members, size):
            assert predict_tokens_per_s(others, requests) <= max(made, 1.02 * whole) * (1.0 + 1e-9)


@pytest.mark.parametrize(("requests", "working"), [(1, "ab"), (4, "a"), (16, "a")])
def test_what_serves_many_at_once_is_left_alone_by_what_ends_one_sooner(requests: int, working: str) -> None:
    """openvino_rt and onnx_rt, a core each, as measured (ADR 0144)."""
    many = Member("a", [10.2 + 1.15 * count for count in range(PLACES)], 1.25)
    few = Member("b", [10.8 * count for count in range(1, PLACES + 1)], 1.2)
    assert choose_working([many, few], requests)[0] == frozenset(working)


@pytest.mark.parametrize("requests", [4, 16, 64])
def test_two_that_make_most_together_both_work(requests: int) -> None:
    """llama_cpp and torch_device."""
    few = Member("a", [7.0 * count for count in range(1, PLACES + 1)], 1.12)
    many = Member("b", [25.0 + 6.0 * count for count in range(PLACES)], 1.2)
    assert choose_working([many, few], requests)[0] == {"a", "b"}
