"""`replicas: auto` over hosts: from stored profiles to the workers that are started, each as the plan has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_profiles.link import LinkProfile
from device_profiles.measured import Hardware
from device_profiles.store import ProfileStore
from orchestrator.config.load import load_config
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.bootstrap.planning import build_start_plan
from orchestrator.errors import ConfigError
from orchestrator.planning.applied import build_option_filter
from orchestrator.planning.here import PresentHost, PresentLinks
from orchestrator.planning.proposal import PlanProposal, propose_hosts
from orchestrator.planning.wanted import build_request_from_config
from policies.speculation.state import COLD_DEPTH
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

BOX, EDGE, OLD = (Hardware("simulated", name, GIB) for name in ("box", "edge", "old"))
HOSTS = [
    PresentHost(THIS_NODE, frozenset({BOX}), name="box"),
    PresentHost("10.0.0.2", frozenset({EDGE}), name="edge"),
    PresentHost("10.0.0.3", frozenset({OLD}), name="old"),
]
FAR = PresentLinks((LinkProfile(THIS_NODE, "10.0.0.2", 400.0, 1e8), LinkProfile(THIS_NODE, "10.0.0.3", 400.0, 1e8)))


def store_profiles(directory: Path) -> ProfileStore:
    """Three devices: a fast one, one half as fast in another runtime and format, which drafts well, and a slow one."""
    for name, runtime, weights, ms, version in (
        ("box", "simulated", "fp32", 10.0, ""),
        ("edge", "openvino_rt", "int8", 20.0, "openvino_rt 1.0"),
        ("old", "onnx_rt", "as_file", 200.0, "onnx_rt 1.0"),
    ):
        store_simulated_profiles(
            directory,
            {"SIM": ms},
            hardware_name=name,
            adapter=runtime,
            weights=weights,
            more_row_ms=0.5 * ms,
            version=version,
        )
    return store_simulated_profiles(
        directory,
        {"SIM": 0.5},
        "simulated-toy",
        "draft",
        hardware_name="edge",
        adapter="openvino_rt",
        version="openvino_rt 1.0",
    )


def propose(directory: Path, requests: int, replicas: str = "auto") -> tuple[ClusterConfig, PlanProposal]:
    config = parse_config(
        f"model: {{source: 'simulated:toy', name: toy, adapter: auto, device: auto, replicas: {replicas}}}\n"
        "drafts: [{method: model, source: 'simulated:toy', adapter: auto, device: auto}]\n"
        "cluster: {address: 'a:1'}\n"
        f"placement: {{concurrency: {requests}, prompt_tokens: 8, output_tokens: 64, draft_acceptance: 0.9}}\n",
        Path("c.yaml"),
    )
    wanted = build_request_from_config(config, directory)
    store = store_profiles(directory)
    return config, propose_hosts(wanted, store, HOSTS, FAR, build_option_filter(config, wanted))


def test_each_replica_of_a_planned_pool_starts_in_its_own_runtime_with_its_own_draft_and_depth(tmp_path: Path) -> None:
    config, proposal = propose(tmp_path, 4)
    plan = proposal.plan
    places = [
        (replica.shards[0].host, replica.shards[0].runtime, replica.shards[0].weights) for replica in plan.replicas
    ]
    assert sorted(places) == [("10.0.0.2", "openvino_rt", "int8"), (THIS_NODE, "simulated", "fp32")]
    started = build_start_plan(config, tmp_path, proposal, {THIS_NODE: [[0], [1]]})
    for replica, spec in zip(plan.replicas, started.targets, strict=True):
        (shard,) = replica.shards
        assert (spec.node, spec.options["model"]["adapter"]) == (shard.host, shard.runtime)
        assert spec.options["model"]["weights"] == "auto", "what its runtime made of it was measured"
        assert [draft["model"]["adapter"] for draft in spec.options["drafters"]] == [shard.runtime] * bool(
            replica.draft
        )
        assert spec.options["starting_depth"] == (replica.depth or COLD_DEPTH)
    depths = {replica.shards[0].host: replica.depth for replica in plan.replicas}
    assert depths[THIS_NODE] == 0
    assert depths["10.0.0.2"] > 0


def test_a_plan_of_as_many_as_are_worth_it_says_of_the_others_why_they_are_left_out(tmp_path: Path) -> None:
    _, proposal = propose(tmp_path, 4)
    (why,) = [rejection.why for rejection in proposal.plan.rejected if rejection.what == "10.0.0.3/SIM"]
    assert why.startswith("left out: none of 4 requests would go to it")
    assert len(propose(tmp_path, 64)[1].plan.replicas) == 3
    assert len(propose(tmp_path, 1)[1].plan.replicas) == 1


def test_replicas_auto_goes_with_a_plan(tmp_path: Path) -> None:
    text = "model: {source: 'simulated:toy', adapter: simulated, device: CPU, replicas: auto}\n"
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.replicas: goes with a plan; set model\.adapter or device to auto"):
        load_config(tmp_path / "cluster.yaml")
