"""Ranks that a plan chooses: GPUs of one host that are alike, over which each layer of the target is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.model_digests import digest_at_hand
from device_profiles.cost import StepCost
from device_profiles.device_load import DeviceLoad
from device_profiles.known_devices import load_known_devices
from device_profiles.measured import SPLIT, Hardware
from device_profiles.store import ProfileStore
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sketch import parse_sketch
from orchestrator.daemon.bootstrap.planning import PlanMaking, build_start_plan
from orchestrator.daemon.control.loops.plan_obstacles import find_places
from orchestrator.launch.ray_places import list_gpus
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.applied import apply_plan, build_option_filter
from orchestrator.planning.basis import basis, list_members
from orchestrator.planning.correction import key_of
from orchestrator.planning.estimates import Stated
from orchestrator.planning.models import PlannedModel, list_splits
from orchestrator.planning.neighbours import leave_taken, list_plan_places
from orchestrator.planning.proposal import PlanProposal, build_proposal, propose_here, propose_sketch
from orchestrator.planning.ranks import add_rank_groups
from orchestrator.planning.wanted import (
    PlanError,
    PlanRequest,
    build_plan_goal,
    build_request_from_config,
    build_request_from_sketch,
)
from policies.planning.merit import ALIKE, sum_merits
from policies.planning.placement import plan_placement
from policies.planning.plan import Device, EndBytes, Host, Inventory, NoPlan, Option, Plan, PlanGoal, Role
from tests.support import tiny_models
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

MIB = 1 << 20
TWIN = Hardware("cuda", "twin", 8 * GIB, driver="1.0", isa=("sm_90",))
SHEET = Stated(load_known_devices()["nvidia-h100-sxm"])
SKETCH = """
hosts: [{{name: box, memory: 256 GiB, cores: 32, devices: [{{device: {device}, count: {count}}}]}}]
target:
  name: big
  shape: {{layers: {layers}, hidden: 8192, heads: 64, kv_heads: 8, head_dim: 128, mlp: 28672, vocabulary: 128256}}
replicas: {replicas}
placement: {{concurrency: {concurrency}, sharding: {sharding}, prompt_tokens: 64, output_tokens: 64}}
"""


def write() -> ClusterConfig:
    text = "model: {source: 'simulated:toy', name: toy, adapter: auto, device: auto}\ndrafts: []\n"
    return parse_config(text, Path("c.yaml"))


def sketch(
    device: str = "nvidia-h100-sxm",
    count: int = 2,
    layers: int = 80,
    replicas: int = 1,
    concurrency: int = 1,
    sharding: str = "when_needed",
) -> PlanProposal:
    values = {"device": device, "count": count, "layers": layers, "replicas": replicas, "concurrency": concurrency}
    made = parse_sketch(SKETCH.format(**values, sharding=sharding), Path("sketch.yaml"))
    return propose_sketch(made, build_request_from_sketch(made, None, Path()))


def list_taken(plan: Plan) -> list[str]:
    """The devices of all parts, one entry for each part on it; a draft in its target's process is no part."""
    return [name for replica in plan.replicas for shard in replica.shards for name in shard.devices]


def find_merit(plan: Plan, goal: PlanGoal) -> float:
    return sum_merits(goal.objective, [replica.prediction for replica in plan.replicas])[0]


def plan_or_none(cluster: Inventory, goal: PlanGoal) -> Plan | None:
    try:
        return plan_placement(cluster, goal)
    except NoPlan:
        return None


@st.composite
def requests(draw: st.DrawFn) -> tuple[Inventory, PlanRequest]:
    """One or two hosts with GPUs that are alike but for what is free and what others take, and what to plan for."""
    layers, profile = draw(st.sampled_from((4, 32))), "gpu"
    hosts = [Host(name, cores=16) for name in draw(st.sampled_from((("a",), ("a", "b"))))]
    devices = [
        Device(
            f"{host.name}/CUDA:{number}",
            host.name,
            "cuda",
            profile,
            draw(st.integers(100, 4000)) * MIB,
            utilisation=draw(st.sampled_from((0.0, 0.0, 0.5))),
            health=draw(st.sampled_from((1.0, 1.0, 1.0, 0.0))),
            health_why="as it is",
            names=(("torch_device", f"CUDA:{number}"),),
        )
        for host in hosts
        for number in draw(st.sampled_from(((0, 1), (0,), (0, 1, 2, 3), (0, 2, 3), (0, 2))))
    ]
    first = draw(st.floats(0.2, 80.0))
    option = Option(
        profile,
        Role.TARGET,
        "target",
        "torch_device",
        "bf16",
        StepCost((1.0, 4.0, 16.0), (first, 1.2 * first, 3.0 * first)),
        layer_bytes=draw(st.integers(10, 2000)) * MIB / layers,
        kv_bytes_per_token=draw(st.sampled_from((0.0, 0.1 * MIB))),
        ends=EndBytes(20 * MIB, 20 * MIB, 40 * MIB, 10 * MIB),
        fixed_bytes=draw(st.integers(0, 200)) * MIB,
        workspace_bytes=10 * MIB,
    )
    request = build_request_from_config(write(), Path())
    shape = replace(request.target.shape, layers=layers)
    placement = request.placement.model_copy(
        update={
            "concurrency": draw(st.sampled_from((1, 4, 16))),
            "objective": draw(st.sampled_from(("throughput", "latency"))),
            "prompt_tokens": 64,
            "output_tokens": 64,
        }
    )
    target = PlannedModel("target", shape, splits=(2, 4))
    most = draw(st.sampled_from((1, 2, 4)))
    return Inventory(tuple(hosts), tuple(devices), (option,)), replace(
        request, target=target, placement=placement, replicas=most
    )


@settings(max_examples=150, deadline=None)
@given(requests())
def test_ranks_are_taken_where_they_are_better_or_nothing_else_fits_and_no_gpu_is_taken_twice(
    made: tuple[Inventory, PlanRequest],
) -> None:
    cluster, request = made
    goal = build_plan_goal(request, [])
    grouped, behind = add_rank_groups(cluster, {"gpu": SHEET}, request)
    each = [
        plan
        for device in grouped.devices
        if (plan := plan_or_none(replace(grouped, devices=(replace(device, ranks=()),)), goal)) is not None
    ]
    try:
        plan = build_proposal(grouped, request, behind).plan
    except PlanError:
        assert not each, "no device and no group has room"
        return
    taken = list_taken(plan)
    assert len(taken) == len(set(taken))
    free = {device.id: device for device in cluster.devices}
    for shard in plan.shards:
        mine = [free[name] for name in shard.devices]
        assert len({device.host for device in mine}) == 1
        numbers = [int(device.id[-1]) for device in mine]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "as ranks take them"
        assert all(device.health for device in mine)
        room = min(device.memory_bytes for device in mine) * (1.0 - goal.constraints.keep_free)
        assert shard.memory.total / len(mine) <= room + 1
    ranks = any(shard.ranks for shard in plan.shards)
    alone = plan_or_none(cluster, goal)
    merit = find_merit(plan, goal)
    assert merit >= max((find_merit(other, goal) for other in each), default=0.0) * (1.0 - ALIKE)
    if alone is None:
        assert ranks
    elif ranks:
        assert merit > find_merit(alone, goal)
    else:
        assert merit == find_merit(alone, goal)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.sampled_from((2, 3)))
def test_groups_are_of_gpus_whose_numbers_follow_each_other(numbers: list[int], count: int) -> None:
    devices = tuple(
        Device(f"a/CUDA:{number}", "a", "cuda", "gpu", GIB, names=(("torch_device", f"CUDA:{number}"),))
        for number in numbers
    )
    option = Option("gpu", Role.TARGET, "target", "torch_device", "bf16", StepCost((1.0,), (9.0,)), MIB, 0.0)
    request = build_request_from_config(write(), Path())
    request = replace(request, target=replace(request.target, splits=(count,)))
    grouped, _ = add_rank_groups(Inventory((Host("a"),), devices, (option,)), {"gpu": SHEET}, request)
    groups = {device.ranks for device in grouped.devices if device.ranks}
    runs = (range(first, first + count) for first in numbers)
    assert groups == {tuple(f"a/CUDA:{each}" for each in run) for run in runs if set(run) <= set(numbers)}


def test_runtimes_that_cannot_split_and_processors_have_no_groups() -> None:
    request = build_request_from_config(write(), Path())
    request = replace(request, target=replace(request.target, splits=(2,)))
    for kind, runtime in (("cuda", "llama_cpp"), ("cpu", "torch_device"), ("cuda", "not_here")):
        devices = tuple(Device(f"a/CUDA:{number}", "a", kind, "gpu", GIB) for number in range(2))
        option = Option("gpu", Role.TARGET, "target", runtime, "bf16", StepCost((1.0,), (9.0,)), MIB, 0.0)
        cluster = Inventory((Host("a"),), devices, (option,))
        assert add_rank_groups(cluster, {"gpu": SHEET}, request)[0] == cluster


def test_key_heads_decide_over_how_many_ranks_layers_may_be_split() -> None:
    assert [list_splits(heads) for heads in (1, 3, 8, 12)] == [(), (3,), (2, 4, 8), (2, 3, 4, 6, 12)]


def test_a_sketched_model_that_fits_on_no_gpu_is_split_over_as_many_as_serve_it_soonest() -> None:
    planned = sketch(count=4)
    (shard,) = planned.plan.replicas[0].shards
    assert shard.ranks == tuple(f"box/nvidia-h100-sxm-{number}" for number in range(4))
    lost = {each.what.partition(":")[0]: each for each in planned.plan.rejected}
    assert lost["layers split over 2 ranks"].goodput_tokens_per_s < planned.plan.goodput_tokens_per_s
    assert "no layer split" in lost, "shards, or why there are none"
    (line,) = [figure for part in basis(planned) for figure in part.figures if "ranks" in figure]
    assert "assumed" in line
    with pytest.raises(PlanError, match="there is no plan"):
        sketch(sharding="never")


def test_many_requests_are_served_by_whole_replicas_and_one_by_ranks() -> None:
    """Of 9e9 parameters, which fit on one GPU: once arithmetic bounds a forward, adding parts is what replicas save."""
    one = sketch(device="nvidia-rtx-4090", layers=8, replicas=2)
    many = sketch(device="nvidia-rtx-4090", layers=8, replicas=2, concurrency=256)
    assert [len(shard.ranks) for shard in one.plan.shards] == [2]
    assert [len(shard.ranks) for shard in many.plan.shards] == [0, 0]
    whole = next(each for each in one.plan.rejected if each.what.startswith("no layer split"))
    assert 1.2 * whole.goodput_tokens_per_s < one.plan.goodput_tokens_per_s < 2.0 * whole.goodput_tokens_per_s


@dataclass(frozen=True)
class Twins:
    """A made-up pair of GPUs of 8 GiB, a tiny model, and what was measured of it on one of them."""

    directory: Path
    digest: str

    def store(self, ms: float = 60.0, **more: Any) -> ProfileStore:
        known = {"hardware": TWIN, "adapter": "torch_device", "digest": self.digest, "layers": 4}
        return store_simulated_profiles(self.directory / "profiles", {"CUDA:0": ms}, "tiny", **{**known, **more})

    def propose(self, config: ClusterConfig, store: ProfileStore, count: int = 2) -> PlanProposal:
        request = build_request_from_config(config, self.directory)
        seen = [SeenDevice("torch_device", f"CUDA:{number}", TWIN) for number in range(count)]
        free = {f"CUDA:{number}": 8 * GIB for number in range(count)}
        return propose_here(request, store, free, build_option_filter(config, request), seen)

    def write(self, more: str = "", model: str = "device: auto") -> ClusterConfig:
        return parse_config(
            f"model: {{source: tiny, name: tiny, adapter: torch_device, {model}}}\ndrafts: []\n{more}\n"
            f"store: {{directory: '{self.directory}/store'}}\nlimits: {{kv_cache: 64 MiB}}\n",
            self.directory / "c.yaml",
        )


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    return Twins(tmp_path, digest_at_hand("tiny", tmp_path, tmp_path / "store"))


def test_what_is_planned_is_what_is_started_and_counted(twins: Twins) -> None:
    config = twins.write()
    planned = twins.propose(config, twins.store())
    (shard,) = planned.plan.shards
    assert (shard.device, shard.devices) == ("here/CUDA:0+CUDA:1", ("here/CUDA:0", "here/CUDA:1"))
    placed = apply_plan(config, planned, 0).model
    assert (placed.device, placed.tensor_parallel) == ("CUDA:0", 2)
    (spec,) = build_start_plan(config, twins.directory, planned).targets
    assert (spec.device, spec.further_devices) == ("CUDA:0", ["CUDA:1"])
    assert list_gpus(spec) == [0, 1]
    assert find_places(planned, spec) == {("here/CUDA:0+CUDA:1", "torch_device")}, "one GPU alone may serve yet"
    (member,) = list_members(planned.plan)
    assert set(member.parts) >= {"device here/CUDA:0", "device here/CUDA:1"}
    left = leave_taken(planned.cluster, list_plan_places("tiny", planned.plan, first=True))
    before = {device.id: device.memory_bytes for device in planned.cluster.devices}
    after = {device.id: device.memory_bytes for device in left.devices}
    each = {before[name] - after[name] for name in shard.devices}
    assert each == {shard.memory.total // 2}


def test_a_model_too_large_for_either_is_split_and_for_both_is_refused(twins: Twins) -> None:
    fits = twins.propose(twins.write(), twins.store(weights_bytes=12 * GIB))
    assert fits.plan.shards[0].ranks
    assert fits.plan.shards[0].memory.weights == 12 * GIB
    with pytest.raises(PlanError):
        twins.propose(twins.write("placement: {sharding: when_needed}"), twins.store(weights_bytes=17 * GIB))


def test_a_busy_or_lost_gpu_counts_for_its_ranks(twins: Twins) -> None:
    config = twins.write()
    first = twins.propose(config, twins.store(), count=3)
    making = PlanMaking(config, twins.directory)

    def plan_again(
        health: Mapping[str, tuple[float, str]] | None = None, loads: Mapping[str, DeviceLoad] | None = None
    ) -> tuple[str, ...]:
        planned = making.again(first, {}, (), health or {}, loads or {}).proposal.plan
        return planned.shards[0].devices

    assert plan_again() == ("here/CUDA:0", "here/CUDA:1")
    assert plan_again({"here/CUDA:0": (0.0, "lost")}) == ("here/CUDA:1", "here/CUDA:2")
    assert plan_again({"here/CUDA:1": (0.0, "lost")}) in [("here/CUDA:0",), ("here/CUDA:2",)]
    busy = DeviceLoad(0.9, 0.9, memory_total_bytes=8 * GIB, memory_free_bytes=7 * GIB)
    assert plan_again(loads={"here/CUDA:1": busy}) in [("here/CUDA:0",), ("here/CUDA:2",)]
    full = DeviceLoad(0.0, 0.0, memory_total_bytes=8 * GIB, memory_free_bytes=8 * MIB)
    assert plan_again(loads={"here/CUDA:0": full}) == ("here/CUDA:1", "here/CUDA:2")


def test_costs_of_ranks_are_corrected_by_their_rounds_alone(twins: Twins) -> None:
    config = twins.write()
    first = twins.propose(config, twins.store())
    key = key_of(first.plan.shards[0])
    making = PlanMaking(config, twins.directory)
    slower = making.again(first, {key: 3.0}, (), {}, {}).proposal.plan
    assert [shard.ranks for shard in slower.shards] == [()]
    (whole,) = slower.replicas
    assert whole.prediction.round_ms == pytest.approx(60.2, rel=0.1), "what one takes was not measured anew"


def test_measured_ranks_count_as_measured(twins: Twins) -> None:
    store = twins.store()
    (whole,) = store.models()
    cost = StepCost((1.0, 8.0), (31.5, 33.0))
    store.save(replace(whole, formats=f"auto auto auto {SPLIT}2", cost=cost, measured_at="2026-01-02"))
    planned = twins.propose(twins.write(), ProfileStore(store.directory))
    (shard,) = planned.plan.shards
    assert (shard.source, len(shard.ranks)) == ("measured", 2)
    assert planned.plan.replicas[0].prediction.verify_ms == pytest.approx(31.7, rel=0.05)
    slow = replace(whole, formats=f"auto auto auto {SPLIT}2", cost=StepCost((1.0,), (90.0,)), measured_at="2026-01-03")
    store.save(slow)
    assert not twins.propose(twins.write(), ProfileStore(store.directory)).plan.shards[0].ranks


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("device: 'CUDA:1', adapter: auto", ""),
        ("device: auto", "placement: {sharding: never}"),
        ("device: auto, static_shapes: 'on'", ""),
        ("device: auto", "placement: {pin_target: [here/CUDA:1]}"),
        ("device: auto", "placement: {exclude: [here/CUDA:0]}"),
    ],
)
def test_what_is_written_keeps_a_target_whole(twins: Twins, model: str, more: str) -> None:
    text = model if "adapter:" in model else f"{model}, adapter: torch_device"
    config = parse_config(
        f"model: {{source: tiny, name: tiny, {text}}}\ndrafts: []\n{more}\nlimits: {{kv_cache: 64 MiB}}\n"
        f"store: {{directory: '{twins.directory}/store'}}\n",
        twins.directory / "c.yaml",
    )
    assert not twins.propose(config, twins.store()).plan.shards[0].ranks


def test_pins_may_name_all_devices_of_ranks(twins: Twins) -> None:
    config = twins.write("placement: {pin_target: [here/cuda:2, 'here/CUDA:1']}")
    assert twins.propose(config, twins.store(), count=3).plan.shards[0].devices == ("here/CUDA:1", "here/CUDA:2")
