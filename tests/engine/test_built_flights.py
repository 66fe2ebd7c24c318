"""What decides how many flights a worker has: its shards' devices and cores."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.protocol.load_options import ShardOptions
from orchestrator.worker.loading.engine import count_parallel_stages


def shard(device: str, adapter: str = "openvino_rt", **fields: Any) -> ShardOptions:
    return ShardOptions(adapter, device, 2, **fields)


@pytest.mark.parametrize(
    ("shards", "stages"),
    [
        ([shard("CPU"), shard("CPU", "torch_device")], 1),
        ([shard("CPU"), shard("GPU.0")], 2),
        ([shard("CPU"), shard("GPU.0"), shard("CPU")], 2),
        ([shard("CPU"), shard("CPU", own=True, cores=[2, 3])], 2),
        ([shard("CPU", own=True, host="a"), shard("CPU", own=True, host="b"), shard("CPU", own=True, host="a")], 2),
        ([shard("SIM", "simulated"), shard("SIM.1", "simulated")], 2),
        ([shard("CPU", "simulated"), shard("", "simulated")], 1),
    ],
)
def test_stages_that_share_a_device_or_its_cores_are_one(shards, stages):
    assert count_parallel_stages(shards) == stages
