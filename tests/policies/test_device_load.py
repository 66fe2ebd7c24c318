"""Loads of devices as values: their moving mean, when they count, and what they make of work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_load import COUNTS_FROM, CoreLoad, DeviceLoad, find_device_load
from policies.serving.device_load import (
    GONE_BELOW,
    HOT_STRETCH,
    LEAST_SHARE,
    counts,
    describe_heat,
    find_usable_share,
    predict_stretch,
    smooth_load,
    weigh_shortage,
)

shares = st.floats(0.0, 1.0)


@given(shares, shares, st.floats(0.05, 1.0), st.floats(0.1, 9.0))
def test_the_mean_is_between_and_nearer_the_later_the_sample(
    before: float, now: float, smoothing: float, after_s: float
) -> None:
    first = DeviceLoad(before, before, {0: CoreLoad(0.0, before)}, sampled_s=1.0)
    second = DeviceLoad(now, now, {0: CoreLoad(0.0, now)}, sampled_s=1.0 + after_s)
    load = smooth_load(first, second, smoothing)
    later = smooth_load(first, replace(second, sampled_s=2.0 + after_s), smoothing)
    assert load.others is not None
    assert min(before, now) - 1e-9 <= load.others <= max(before, now) + 1e-9
    assert load.cores[0].others == pytest.approx(load.others)
    assert abs((later.others or 0.0) - now) <= abs(load.others - now) + 1e-9


def test_a_second_later_the_newest_sample_has_its_weight() -> None:
    load = smooth_load(DeviceLoad(others=0.0, utilisation=0.0), DeviceLoad(1.0, 1.0, sampled_s=1.0), 0.3)
    assert load.others == pytest.approx(0.3)
    assert smooth_load(DeviceLoad(), DeviceLoad(0.5, 0.5, sampled_s=1.0), 0.3).others == 0.5, "the first is all"


def test_half_of_a_device_is_seen_in_five_samples() -> None:
    mean, after = DeviceLoad(0.5, 0.0), 0
    while not counts(mean.others or 0.0, counted=False):
        after += 1
        mean = smooth_load(mean, DeviceLoad(1.0, 0.5, sampled_s=mean.sampled_s + 1.0), 0.3)
    assert after <= 2
    while counts(mean.others or 0.0, counted=True):
        after += 1
        mean = smooth_load(mean, DeviceLoad(0.5, 0.0, sampled_s=mean.sampled_s + 1.0), 0.3)
    assert after <= 7


@given(st.lists(st.floats(GONE_BELOW, COUNTS_FROM - 1e-6)))
def test_between_the_bounds_nothing_changes(swings: list[float]) -> None:
    for known in (True, False):
        assert all(counts(one, counted=known) is known for one in swings)


@given(shares, shares)
def test_work_gets_what_is_left_or_a_fair_half(ours: float, others: float) -> None:
    usable = find_usable_share(CoreLoad(ours, others))
    assert LEAST_SHARE <= usable <= 1.0
    assert usable >= 1.0 - others
    assert find_usable_share(CoreLoad(ours, min(1.0, others + 0.1))) <= usable


@given(shares, st.floats(0.0, 40.0), st.floats(0.0, 8.0))
def test_resting_work_would_get_its_part_beside_those_that_want_a_core(
    others: float, rivals: float, more: float
) -> None:
    usable = find_usable_share(CoreLoad(0.0, others, rivals))
    assert usable == max(1.0 - others, LEAST_SHARE, min(0.5, 1.0 / (1.0 + rivals)))
    assert find_usable_share(CoreLoad(0.0, others, rivals + more)) <= usable
    assert usable <= find_usable_share(CoreLoad(0.0, others)), "one is assumed where nobody counts"


def test_what_our_work_was_seen_to_get_is_believed() -> None:
    assert find_usable_share(CoreLoad(0.0, 1.0)) == 0.5
    assert find_usable_share(CoreLoad(0.25, 0.75)) == 0.25
    assert find_usable_share(CoreLoad(0.0, 0.3)) == pytest.approx(0.7)


@given(shares, shares, st.booleans())
def test_load_and_heat_only_ever_make_work_longer(ours: float, others: float, hot: bool) -> None:
    stretch = predict_stretch(CoreLoad(ours, others), "91 of 90 °C" if hot else "")
    assert stretch.factor >= (HOT_STRETCH if hot else 1.0)
    assert bool(stretch.why) == (stretch.factor > 1.0)


def test_heat_counts_at_the_limit_until_it_is_well_below() -> None:
    load = DeviceLoad(temperature_c=89.0, temperature_limit_c=90.0, power_w=295.0, power_limit_w=300.0)
    assert describe_heat(load, hot=False) == "295 of 300 W"
    cool = replace(load, power_w=280.0)
    assert describe_heat(cool, hot=False) == ""
    assert describe_heat(cool, hot=True) == "89 of 90 °C"
    assert describe_heat(DeviceLoad(temperature_c=120.0), hot=False) == "", "its limit is not known"


def test_shares_are_of_the_cores_that_are_asked_for() -> None:
    counted = DeviceLoad(0.6, 0.5, {0: CoreLoad(0.2, 0.0, 0.0), 1: CoreLoad(0.0, 1.0, 3.0)}, rivals=1.5)
    assert counted.find_share([0, 1]) == CoreLoad(0.1, 0.5, 1.5)
    found = counted.find_share()
    assert found is not None
    assert found.rivals == 1.5
    load = DeviceLoad(0.6, 0.5, {0: CoreLoad(0.2, 0.0), 1: CoreLoad(0.0, 1.0)})
    assert load.find_share([0]) == CoreLoad(0.2, 0.0)
    assert load.find_share([0, 1]) == CoreLoad(0.1, 0.5)
    whole = load.find_share()
    assert load.find_share([7]) == whole
    assert whole is not None
    assert whole.ours == pytest.approx(0.1)
    assert whole.others == 0.5
    assert DeviceLoad().find_share() is None


def test_a_device_is_found_by_its_runtimes_names() -> None:
    loads = {"here/CPU": DeviceLoad(0.1), "far/CUDA:0": DeviceLoad(0.2)}
    assert find_device_load(loads, "far/CUDA") is loads["far/CUDA:0"]
    assert find_device_load(loads, "here/CUDA") is None


@given(shares)
def test_a_shortage_is_none_while_there_is_enough(free: float) -> None:
    assert (weigh_shortage(free) == 0.0) == (free >= 0.05)
