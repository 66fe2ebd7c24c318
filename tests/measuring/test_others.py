"""What other programs take of a device while something is measured on it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_load import DeviceLoad
from device_profiles.measured import MeasuredModel
from device_profiles.store import ProfileStore
from orchestrator.worker.measuring.measuring_worker import OthersMeter, find_taken, name_measured
from tests.support.profiles import store_simulated_profiles
from tests.support.simulated_time import SimulatedClock

shares = st.floats(0.0, 1.0)


@given(shares, st.integers(0, 64), st.integers(0, 64))
def test_what_others_take_of_cores_that_are_not_used_disturbs_nobody(others: float, threads: int, cores: int) -> None:
    taken = find_taken(others, threads, cores)
    assert 0.0 <= taken <= 1.0
    if not 0 < threads < cores:
        assert taken == others
    else:
        assert taken <= min(1.0, others * cores / threads)
        assert find_taken((cores - threads) / cores * 0.999, threads, cores) == 0.0
        assert find_taken(1.0, threads, cores) == 1.0


@given(st.lists(st.tuples(shares, st.floats(0.1, 60.0)), min_size=1, max_size=20), shares)
def test_the_share_is_the_mean_over_the_time_since_it_was_begun(
    spans: list[tuple[float, float]], before: float
) -> None:
    clock = SimulatedClock()
    told: Iterator[float] = iter([before, before, *(share for share, _ in spans)])
    meter = OthersMeter(lambda: {"CPU": DeviceLoad(1.0, next(told))}, clock, "CPU")
    meter.look_when_due()
    clock.now_s += 5.0
    meter.begin()
    for number, (_, seconds) in enumerate(spans, 1):
        clock.now_s += seconds
        if number < len(spans):
            clock.now_s += 1.0
            meter.look_when_due()
    whole_s = sum(seconds + (number < len(spans)) for number, (_, seconds) in enumerate(spans, 1))
    mean = sum(share * (seconds + (number < len(spans))) for number, (share, seconds) in enumerate(spans, 1)) / whole_s
    assert meter.read() == pytest.approx(mean, abs=1e-3)


def test_nobody_knows_what_others_take_of_a_device_without_counters():
    clock = SimulatedClock()
    meter = OthersMeter(lambda: {"CPU": DeviceLoad(1.0, 0.5)}, clock, name_measured("gpu", "GPU.0"))
    meter.begin()
    clock.now_s += 9.0
    assert meter.read() is None


def profile_beside(directory, others: float | None) -> MeasuredModel:
    (found,) = store_simulated_profiles(directory, {"SIM": 2.0}, others=others).models()
    return found


@given(shares)
def test_the_interval_is_wider_by_what_others_took(tmp_path_factory, others: float) -> None:
    alone, beside = (profile_beside(tmp_path_factory.mktemp("store"), one) for one in (None, others))
    assert alone.error == max(alone.cost.error, alone.decode_error)
    assert not alone.disturbed
    assert beside.error == pytest.approx(alone.error + (others if beside.disturbed else 0.0))
    assert bool(beside.doubt) == bool(beside.disturbed) == (others >= 0.15)


def test_a_profile_that_was_stored_before_says_nothing_of_others(tmp_path):
    store_simulated_profiles(tmp_path, {"SIM": 2.0})
    (path,) = (tmp_path / "models").iterdir()
    stored = json.loads(path.read_text())
    del stored["others"]
    path.write_text(json.dumps(stored))
    (found,) = ProfileStore(tmp_path).models()
    assert (found.others, found.disturbed) == (None, "")
