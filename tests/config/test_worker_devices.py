"""Which devices a worker computes on, in the spelling of the runtime that drives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.fitting.worker_options import engine_options, worker_specs
from orchestrator.protocol.contract import WorkerSpec
from tests.support.config import parse_config


def build_specs(text: str) -> list[WorkerSpec]:
    config = parse_config(f"cluster: {{address: 'a:1'}}\n{text}", Path("c.yaml"))
    return worker_specs(engine_options(config, Path()), config)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("model: {source: 'simulated:toy', adapter: torch_device, device: cuda1}", ["CUDA:1"]),
        (
            "model: {source: 'simulated:toy', adapter: torch_device, device: cuda, tensor_parallel: 3}",
            ["CUDA:0", "CUDA:1", "CUDA:2"],
        ),
        (
            "model: {source: 'simulated:toy', adapter: torch_device, device: 'cuda:2', "
            "shards: [{layers: 1, device: cuda2}, {layers: 1, device: cuda.3}, {layers: 1, device: cpu}]}",
            ["CUDA:2", "CUDA:3", "CPU"],
        ),
        (
            "model: {source: 'simulated:toy', adapter: torch_device, device: 'cuda:0'}\n"
            "drafts: [{method: model, source: 'simulated:toy', adapter: torch_device, device: cuda1}]",
            ["CUDA:0", "CUDA:1"],
        ),
        (
            "model: {source: 'simulated:toy', adapter: torch_device, device: 'cuda:0'}\n"
            "drafts: [{method: model, source: 'simulated:toy', adapter: torch_device, device: cuda1, process: own}]",
            ["CUDA:0"],
        ),
    ],
)
def test_a_worker_names_every_device_that_it_computes_on(text: str, devices: list[str]) -> None:
    (spec,) = build_specs(text)
    assert [spec.device, *spec.further_devices] == devices


def test_what_a_replica_inherits_is_spelt_by_its_own_runtime() -> None:
    first, second, third = build_specs(
        "model: {source: 'simulated:toy', adapter: torch_device, device: cuda1,\n"
        "  replicas: [{}, {adapter: llama_cpp}, {device: cuda2}]}"
    )
    assert [first.device, second.device, third.device] == ["CUDA:1", "CUDA1", "CUDA:2"]
