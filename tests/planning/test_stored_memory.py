"""What a plan counts for a measured model is no less than what measuring it took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.profile import Exactness
from device_profiles.workload import DecoderShape
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.stored import load_measured_hardware
from tests.support.profiles import store_simulated_profiles

sizes = st.integers(0, 1 << 36)
small = st.integers(0, 1 << 20)
parts_of_a_plan = st.fixed_dictionaries(dict.fromkeys(("process", "weights", "kv_cache", "workspace"), small))


@given(sizes, sizes, st.just({}) | parts_of_a_plan)
@settings(deadline=None, max_examples=30)
def test_a_measured_peak_is_never_planned_under(
    tmp_path_factory: pytest.TempPathFactory, weights: int, peak: int, parts: dict[str, int]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    (found,) = load_measured_hardware(
        store_simulated_profiles(directory, {"SIM": 1.0}, weights_bytes=weights, peak_bytes=peak)
    )
    measured = replace(found.models[0], planned_parts=parts)
    model = PlannedModel("toy", DecoderShape.dense(1, 8, 1, 1, 8, 8, 8), digest=measured.model_digest)
    (option,) = replace(found, models=(measured,)).options(model, (), Exactness.BIT, 0)
    total = option.fixed_bytes + option.layer_bytes + option.workspace_bytes + parts.get("kv_cache", 0)
    assert total >= peak
    assert total >= sum(parts.values())
