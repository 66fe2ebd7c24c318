"""A target that does not fit into memory: halved where a part of its KV cache fits, else refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from adapters.contract import ModelRefused, OutOfMemory, silent
from adapters.device_memory import DeviceMemory, HostMemory
from device_profiles.memory import MemoryPlan
from device_profiles.units import GIB, MIB
from orchestrator.config.load import load_config
from orchestrator.fitting.room import check_room, refuse_for_room
from orchestrator.fitting.worker_options import engine_options
from orchestrator.worker.loading.models import load_target
from tests.support.control_groups import memory_group, run_in_group
from tests.support.daemon import configuration

LOAD = """
import json, sys
import msgspec
from orchestrator.worker.loading.models import load_target
from orchestrator.protocol.load_options import EngineOptions
options = msgspec.convert(json.loads(sys.argv[1]), EngineOptions)
target = load_target(options, lambda stage, fraction: None)
print(json.dumps({"blocks": target.model.capabilities.total_blocks, "failed": target.failed}))
"""


def test_a_refusal_says_what_is_needed_what_is_there_and_the_way_out_once() -> None:
    there = DeviceMemory(4 * GIB, 3 * GIB)
    now = refuse_for_room("toy on CPU", there, other_bytes=GIB, kv_cache_bytes=8 * GIB)
    assert isinstance(now, OutOfMemory)
    assert str(now) == (
        "toy on CPU: 1.0 GiB and a KV cache of 8.0 GiB are needed, and 3.0 GiB of 4.0 GiB is free. "
        "Lower limits.kv_cache (or the model's own kv_cache) to 2.0 GiB or less, or free memory, "
        "take a smaller model or smaller weights, or choose another device"
    )
    never = refuse_for_room("toy on CPU", there, other_bytes=GIB, kv_cache_bytes=100 * GIB)
    assert isinstance(never, ModelRefused), "no try can help"
    assert "4.0 GiB is all that may be used. Lower limits.kv_cache" in str(never)
    larger = refuse_for_room("toy on CPU", there, other_bytes=5 * GIB, kv_cache_bytes=GIB)
    assert "limits.kv_cache" not in str(larger), "no KV cache helps"


def test_what_may_be_held_has_to_be_free() -> None:
    plan = MemoryPlan(process=50 * GIB, weights=GIB, kv_cache=2 * GIB, workspace=GIB)
    check_room("toy", plan, HostMemory(8 * GIB, 4 * GIB))
    with pytest.raises(OutOfMemory, match=r"2\.0 GiB and a KV cache of 2\.0 GiB"):
        check_room("toy", plan, HostMemory(8 * GIB, 4 * GIB - 1))


def test_a_target_begins_with_the_part_that_it_is_told_and_says_why(tmp_path: Path) -> None:
    path = configuration(tmp_path, extra="limits: {kv_cache: 64 MiB, max_batch_rows: 512}")
    options = msgspec.structs.replace(engine_options(load_config(path), tmp_path), memory_share=4)
    found = load_target(options, silent)
    try:
        assert found.model.capabilities.max_batch_rows == 128
        assert [line.rpartition(": ")[2] for line in found.failed] == [
            "the kernel killed the worker for want of memory"
        ] * 2
        assert found.failed[0].startswith("loading with 64.0 MiB of KV cache and 512 rows a forward")
    finally:
        found.model.close()


@pytest.mark.model
@pytest.mark.parametrize(("kv_cache_mib", "part"), [(1100, 2), (8000, 0)])
def test_a_real_control_group_halves_a_kv_cache_or_refuses_it(
    first_layers_path: Path, shared_store: Path, tmp_path: Path, kv_cache_mib: int, part: int
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{source: {first_layers_path}}}\nstore: {{directory: {shared_store}}}\n", encoding="utf-8")
    options = engine_options(load_config(path), tmp_path)
    load_target(options.with_model(kv_cache_bytes=64 * MIB), silent).model.close()  # prepared from here on
    wanted = options.with_model(kv_cache_bytes=kv_cache_mib * MIB)
    with memory_group(1500 * MIB) as group:
        done = run_in_group(group, "-c", LOAD, json.dumps(msgspec.to_builtins(wanted)))
    if not part:
        assert "ModelRefused" in done.stderr
        assert "Lower limits.kv_cache" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["failed"]) == part - 1
    assert "Lower limits.kv_cache" in found["failed"][0]
