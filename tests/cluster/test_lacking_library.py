"""Two hosts, of which one lacks a runtime's library: real agents say so, and what is planned keeps to it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from adapters.contract import silent
from adapters.hardware import processor, runtime_version
from adapters.model_digests import digest_at_hand
from orchestrator.clock import SystemClock
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.fleet import FleetPlanning
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.launch.local import LocalCluster
from orchestrator.launch.local_worker import LocalWorker
from orchestrator.planning.proposal import PlanProposal
from orchestrator.protocol.contract import NODE_ADDRESS, WorkerSpec
from tests.support.config import parse_config
from tests.support.profiles import store_simulated_profiles

NEAR, FAR = "10.0.0.1", "10.0.0.2"
LACKING = """
import os, sys


class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ.get("TEST_LACKS", "").split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Lacking())
"""


class TwoHosts(LocalCluster):
    """Starts real worker processes; those of the far host find no openvino."""

    own_node = NEAR

    async def nodes(self) -> list[str]:
        return [NEAR, FAR]

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        far = spec.node == FAR
        told = {NODE_ADDRESS: spec.node, **({"TEST_LACKS": "openvino"} if far else {})}
        return await super().start(msgspec.structs.replace(spec, environment={**spec.environment, **told}))


def test_a_runtime_is_planned_only_where_its_library_is(tmp_path, first_layers_path, monkeypatch):
    """Both have one processor, which was measured with the runtime that is the faster one; the host that lacks it is
    the cheaper one."""
    site, store = tmp_path / "site", tmp_path / "store"
    site.mkdir()
    (site / "sitecustomize.py").write_text(LACKING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    for adapter, row_ms in (("openvino_rt", 1.0), ("onnx_rt", 9.0)):
        store_simulated_profiles(
            store / "profiles",
            {"CPU": row_ms},
            "first",
            adapter=adapter,
            digest=digest_at_hand(str(first_layers_path), tmp_path, store),
            hardware=processor(),
            version=runtime_version(adapter),
            layers=2,
        )
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{first_layers_path}', adapter: auto, device: auto, name: first}}\n"
        f"cluster: {{address: '{NEAR}:6379'}}\nstore: {{directory: '{store}'}}\n"
        "placement: {objective: cost, profile: never}\ndrafts: []\n"
        f"hosts: [{{name: near, address: here, price_per_hour: 9}}, {{name: far, address: {FAR}, price_per_hour: 1}}]\n"
    )
    found = asyncio.run(propose(parse_config(path.read_text(), path), path))
    (shard,) = found.plan.replicas[0].shards
    assert (shard.runtime, shard.device) == ("onnx_rt", f"{FAR}/CPU")
    (told,) = (one for one in found.assumed if "openvino_rt" in one)
    assert told.startswith(f"{FAR}/CPU: openvino_rt is left out there: ")
    assert "not installed" in told


async def propose(config: ClusterConfig, path: Path) -> PlanProposal:
    cluster = TwoHosts()
    fleet = FleetPlanning(
        config,
        path,
        cluster,
        silent,
        TargetControl(cluster, (), ControlLimits(1, 1, 0), SystemClock()),
    )
    try:
        return await fleet.propose()
    finally:
        await fleet.close()
        await cluster.close()
