"""Cores for the workers of one host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.planning.core_split import CoreNeed, split_cores

GROUPS = st.lists(st.integers(1, 3), max_size=6).map(
    lambda sizes: [list(range(sum(sizes[:index]), sum(sizes[: index + 1]))) for index in range(len(sizes))]
)
NEEDS = st.lists(st.integers(1, 4).map(CoreNeed), max_size=5)


@given(NEEDS, GROUPS)
def test_cores_are_disjoint_usable_and_enough_or_nobody_has_any(needs, groups):
    parts = split_cores(needs, groups)
    usable = {core for group in groups for core in group}
    given_out = [core for cores in parts for core in cores]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= usable
    enough = sum(need.threads for need in needs) <= len(usable)
    assert all(len(cores) >= need.threads for need, cores in zip(needs, parts, strict=True)) == (enough or not needs)
    assert enough or not given_out


@given(NEEDS, GROUPS)
def test_a_physical_core_is_one_workers_where_there_are_enough(needs, groups):
    if sum(need.threads for need in needs) > len(groups):
        return
    parts = split_cores(needs, groups)
    for group in groups:
        assert sum(bool(set(cores) & set(group)) for cores in parts) <= 1


@given(NEEDS, GROUPS, st.sets(st.integers(0, 10), min_size=1))
def test_what_is_fixed_stays_and_is_nobody_elses(needs, groups, fixed):
    parts = split_cores([*needs, CoreNeed(1, tuple(sorted(fixed)))], groups)
    assert set(parts[-1]) == fixed
    assert not fixed & {core for cores in parts[:-1] for core in cores}
