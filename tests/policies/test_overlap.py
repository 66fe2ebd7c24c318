"""Whether target and draft take compute from each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_names import name_compute_unit
from policies.planning.overlap import ComputePlace, shares_compute

CORES = st.frozensets(st.integers(0, 7))
PLACES = st.builds(
    ComputePlace, st.sampled_from(["h1", "h2"]), st.sampled_from(["CPU", "cpu", "GPU", "GPU.0", "GPU.1", "SIM"]), CORES
)


@given(PLACES, PLACES)
def test_it_is_the_same_seen_from_either_side(one, other):
    assert shares_compute(one, other) == shares_compute(other, one)


@given(PLACES)
def test_a_place_shares_with_itself(place):
    assert shares_compute(place, place)


@given(CORES, CORES, st.sampled_from(["CPU", "cpu"]))
def test_processors_share_where_their_cores_meet_or_are_not_known(left, right, device):
    shared = shares_compute(ComputePlace("h", "CPU", left), ComputePlace("h", device, right))
    assert shared == (not left or not right or bool(left & right))


@given(CORES, CORES)
def test_an_accelerator_and_a_processor_do_not(left, right):
    assert not shares_compute(ComputePlace("h", "CPU", left), ComputePlace("h", "GPU", right))


@given(PLACES, PLACES)
def test_two_hosts_never_do(one, other):
    if one.host != other.host:
        assert not shares_compute(one, other)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("CUDA", "cuda:0", True),
        ("GPU", "GPU.0", True),
        ("GPU.0", "GPU.1", False),
        ("NPU", "GPU", False),
        ("CPU", "cpu:1", True),
        ("CUDA:1", "CUDA1", True),
        ("CUDA", "CUDA1", False),
        ("Vulkan0", "CUDA0", False),
    ],
)
def test_runtimes_call_a_device_by_several_names(one, other, same):
    assert (name_compute_unit(one) == name_compute_unit(other)) == same
