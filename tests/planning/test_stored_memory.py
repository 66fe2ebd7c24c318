"""What a plan counts for a measured model is no less than what measuring it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.measured import fingerprint
from device_profiles.memory import MeasuredMemory
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


def test_a_target_is_planned_by_what_its_last_worker_held(tmp_path: Path) -> None:
    store = store_simulated_profiles(tmp_path, {"CPU": 1.0}, cores=4, threads=2, weights_bytes=100, peak_bytes=5000)
    (before,) = load_measured_hardware(store)
    profile, device = before.models[0], before.devices[0]
    target = PlannedModel("toy", DecoderShape.dense(1, 8, 1, 1, 8, 8, 8), digest=profile.model_digest)
    last = MeasuredMemory(
        fingerprint=fingerprint(replace(device.hardware, physical_cores=0), device.runtime_version),
        adapter=profile.adapter,
        device=profile.device,
        model="toy",
        model_digest=profile.model_digest,
        weights="recipe",
        wanted="auto",
        slots=4,
        format=profile.weights,
        held_bytes=2400,
        announced_bytes=3000,
        whole={"process": 1000, "weights": 2000, "kv_cache": 900, "workspace": 500},
    )
    store.save(last)
    store.save(replace(last, model_digest="of another model", held_bytes=9000))
    layers = replace(last, weights="recipe, layers 0 to 0", slots=16, layers=1, held_bytes=3070)
    store.save(layers)
    (hardware,) = load_measured_hardware(store)
    (option,) = hardware.options(target, (), Exactness.BIT, 4)
    total = option.fixed_bytes + option.layer_bytes + option.workspace_bytes
    assert total == 1000 + 2000 + 500 - 600, "without its KV cache, and less what it held less than announced"
    few = replace(option, source="few layers", fixed_bytes=500)
    assert hardware.correct_memory(few, target).fixed_bytes == 570, "by what layers held more"
