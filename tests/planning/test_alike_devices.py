"""GPUs of one host that are alike: each is a device of its own for plans, by what was measured of any of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_load import DeviceLoad
from device_profiles.measured import DeviceRates, Hardware, MatmulRate, MeasuredDevice
from device_profiles.profile import Exactness, Precision
from device_profiles.store import ProfileStore
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.bootstrap.plan_board import measure_fixed
from orchestrator.daemon.bootstrap.planning import build_start_plan
from orchestrator.launch.ray_places import list_gpus
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.applied import apply_plan, build_option_filter
from orchestrator.planning.correction import apply_health, apply_loads
from orchestrator.planning.estimates import EstimableDevice
from orchestrator.planning.here import PresentHost, PresentLinks, cluster_present
from orchestrator.planning.neighbours import TakenPlace, leave_taken
from orchestrator.planning.proposal import PlanProposal, propose_here, propose_hosts
from orchestrator.planning.stored import load_measured_hardware
from orchestrator.planning.wanted import build_request_from_config
from policies.planning.plan import Inventory
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

MIB = 1 << 20
TWIN, OTHER = (Hardware("cuda", name, 8 * GIB, driver="1.0", isa=("sm_90",)) for name in ("twin", "other"))
NAMES = {"torch_device": "CUDA:{}", "llama_cpp": "CUDA{}"}
"""How runtimes spell the number of a GPU."""


def see(numbers: Iterable[int], hardware: Hardware = TWIN) -> frozenset[SeenDevice]:
    """What each runtime sees of GPUs with these numbers."""
    return frozenset(SeenDevice(name, spelt.format(one), hardware) for one in numbers for name, spelt in NAMES.items())


def store_twin(directory: Path, device: str = "CUDA:0", ms: float = 20.0, **more: object) -> ProfileStore:
    """A store in which one of the GPUs was measured."""
    return store_simulated_profiles(directory, {device: ms}, hardware=TWIN, adapter="torch_device", **more)  # type: ignore[arg-type]


def write(model: str = "", more: str = "drafts: []\n") -> ClusterConfig:
    head = f"model: {{source: 'simulated:toy', name: toy, adapter: auto, device: auto{model}}}\n"
    return parse_config(f"{head}limits: {{kv_cache: 64 MiB}}\n{more}", Path("c.yaml"))


def propose(config: ClusterConfig, store: ProfileStore, count: int = 2) -> PlanProposal:
    request = build_request_from_config(config, Path())
    return propose_here(request, store, {}, build_option_filter(config, request), see(range(count)))


def present(directory: Path, host: PresentHost) -> Inventory:
    target = build_request_from_config(write(), Path()).target
    measured = load_measured_hardware(store_twin(directory))
    return cluster_present([host], measured, target, (), Exactness.BIT, links=PresentLinks())[0]


@given(
    free=st.lists(st.integers(100, 8000), min_size=2, max_size=4),
    stated=st.integers(100, 8000),
    taken=st.integers(0, 90),
    ours=st.integers(0, 500),
    data=st.data(),
)
def test_memory_time_and_health_of_each_are_counted_apart(
    tmp_path_factory: pytest.TempPathFactory, free: list[int], stated: int, taken: int, ours: int, data: st.DataObject
) -> None:
    one = data.draw(st.integers(0, len(free) - 1))
    other = data.draw(st.integers(0, len(free) - 1).filter(lambda number: number != one))
    spelt = data.draw(st.sampled_from(sorted(NAMES.values())))
    free_bytes = {spelt.format(number): mib * MIB for number, mib in enumerate(free)}
    bound = {f"cuda:{one}": stated * MIB}
    host = PresentHost("h", frozenset({TWIN}), free_bytes, seen=see(range(len(free))), stated_bytes=bound)
    cluster = present(tmp_path_factory.mktemp("store"), host)
    expected = [stated if number == one else mib for number, mib in enumerate(free)]
    assert [device.memory_bytes // MIB for device in cluster.devices] == expected
    assert [device.memory_stated for device in cluster.devices] == [number == one for number in range(len(free))]
    assert len({device.profile for device in cluster.devices}) == 1, "one profile stands for all"

    names = [dict(device.names) for device in cluster.devices]
    left = leave_taken(cluster, [TakenPlace("another", cluster.devices[other].id, taken * MIB)])
    gone = [(taken if number == other else 0) * MIB for number in range(len(free))]
    assert [device.memory_bytes + less for device, less in zip(left.devices, gone, strict=True)] == [
        device.memory_bytes for device in cluster.devices
    ]

    load = DeviceLoad(0.9, 0.5, memory_total_bytes=8 * GIB, memory_free_bytes=MIB, memory_ours_bytes=ours * MIB)
    place = f"h/{names[other][data.draw(st.sampled_from(sorted(NAMES)))]}"
    loaded = apply_loads(cluster, {f"h/CUDA:{other}": load}).devices
    judged = apply_health(cluster, {place: (0.25, "it failed")}).devices
    for number, device in enumerate(cluster.devices):
        busy = number == other
        assert loaded[number].utilisation == (0.5 if busy else 0.0)
        assert loaded[number].memory_bytes == ((ours + 1) * MIB if busy else device.memory_bytes)
        assert judged[number].health == (0.25 if busy else 1.0)


@given(free=st.lists(st.integers(300, 8000), min_size=2, max_size=4))
def test_a_pool_has_a_replica_on_each_and_takes_no_more_than_is_free_there(
    tmp_path_factory: pytest.TempPathFactory, free: list[int]
) -> None:
    store = store_twin(tmp_path_factory.mktemp("store"))
    free_bytes = {f"CUDA:{number}": mib * MIB for number, mib in enumerate(free)}
    config = write(", replicas: auto", "drafts: []\nplacement: {concurrency: 32, keep_free: 0.0}\n")
    host = PresentHost(THIS_NODE, frozenset({TWIN}), free_bytes, seen=see(range(len(free))))
    plan = propose_hosts(build_request_from_config(config, Path()), store, [host], PresentLinks()).plan
    shards = [shard for replica in plan.replicas for shard in replica.shards]
    assert sorted(shard.device for shard in shards) == [f"here/CUDA{number}" for number in range(len(free))]
    assert all(shard.memory.total <= free_bytes[f"CUDA:{shard.device[-1]}"] for shard in shards)


@pytest.mark.parametrize("number", [0, 1])
def test_a_first_plan_by_an_estimate_is_of_the_gpu_that_is_named(tmp_path: Path, number: int) -> None:
    store = store_simulated_profiles(tmp_path / "other", {}, "toy")
    config = write().model_copy(update={"model": write().model.model_copy(update={"device": f"CUDA:{number}"})})
    request = build_request_from_config(config, tmp_path)
    rates = DeviceRates((MatmulRate(Precision.FP32, 1e12),), 1e11)
    estimable = [EstimableDevice(MeasuredDevice("", "torch_device", "CUDA:0", "1", TWIN, 0, rates))]
    allowed = build_option_filter(config, request)
    found = propose_here(request, store, {}, allowed, see(range(2)), estimable=estimable)
    assert [shard.device for shard in found.plan.shards] == [f"here/CUDA{number}"]
    assert apply_plan(config, found, 0).model.device == f"CUDA:{number}"


def test_ranks_of_a_target_that_no_plan_places_are_taken_off_each_gpu(tmp_path: Path) -> None:
    config = write().model_copy(
        update={
            "model": write().model.model_copy(
                update={"adapter": "torch_device", "device": "CUDA:0", "tensor_parallel": 2}
            )
        }
    )
    cluster = present(tmp_path, PresentHost(THIS_NODE, frozenset({TWIN}), seen=see(range(3))))
    left = leave_taken(cluster, list(measure_fixed(config, tmp_path)))
    first, second, third = (
        device.memory_bytes - less.memory_bytes for device, less in zip(cluster.devices, left.devices, strict=True)
    )
    assert first == second > 0 == third
    whole = config.model_copy(update={"model": config.model.model_copy(update={"tensor_parallel": 1})})
    (place,) = measure_fixed(whole, tmp_path)
    assert place.count_bytes(cluster.devices[0]) == pytest.approx(2 * first, abs=2)


def test_layers_of_a_target_that_no_plan_places_are_taken_off_the_gpu_that_has_them(tmp_path: Path) -> None:
    shards = ", shards: [{layers: 3, device: 'CUDA:1'}, {layers: 1, device: 'CUDA:2'}]"
    config = write(shards).model_copy(
        update={"model": write(shards).model.model_copy(update={"adapter": "torch_device"})}
    )
    cluster = present(tmp_path, PresentHost(THIS_NODE, frozenset({TWIN}), seen=see(range(3))))
    left = leave_taken(cluster, list(measure_fixed(config, tmp_path)))
    first, second, third = (
        device.memory_bytes - less.memory_bytes for device, less in zip(cluster.devices, left.devices, strict=True)
    )
    assert first == 0 < third
    assert second == pytest.approx(3 * third, abs=4)


def test_two_replicas_are_started_on_a_gpu_each_and_ray_keeps_it_for_them(tmp_path: Path) -> None:
    ray = "drafts: []\ncluster: {runtime: ray, address: '10.0.0.1:6379', auth: none}\nplacement: {concurrency: 16}\n"
    for more in ("drafts: []\nplacement: {concurrency: 16}\n", ray):
        config = write(", replicas: auto", more)
        started = build_start_plan(config, tmp_path, propose(config, store_twin(tmp_path)))
        assert [spec.device for spec in started.targets] == ["CUDA:0", "CUDA:1"]
        assert [list_gpus(spec) for spec in started.targets] == [[0], [1]]


def test_a_draft_may_have_the_gpu_beside_its_target(tmp_path: Path) -> None:
    draft = "drafts: [{method: model, source: 'simulated:toy', adapter: auto, device: auto}]\n"
    config = write(
        more=f"{draft}placement: {{draft_acceptance: 0.95, pin_target: [here/CUDA:1], pin_draft: [here/CUDA:0]}}\n"
    )
    store_twin(tmp_path, ms=2.0, model="simulated-toy", role="draft")
    found = propose(config, store_twin(tmp_path))
    placed = apply_plan(config, found, 0)
    (drafter,) = placed.drafts
    assert isinstance(drafter, ModelDraft)
    assert (placed.model.device, drafter.device, drafter.process) == ("CUDA:1", "CUDA:0", "own")


def test_the_gpu_that_is_written_is_the_only_one_that_is_used(tmp_path: Path) -> None:
    config = parse_config(
        "model: {source: 'simulated:toy', name: toy, adapter: auto, device: 'cuda1', replicas: auto}\ndrafts: []\n"
        "placement: {concurrency: 16}\nlimits: {kv_cache: 64 MiB}\n",
        Path("c.yaml"),
    )
    found = propose(config, store_twin(tmp_path))
    assert [shard.device for shard in found.plan.shards] == ["here/CUDA1"]
    assert apply_plan(config, found, 0).model.device == "CUDA:1"


def test_what_both_were_measured_with_counts_once_and_the_newest_of_it(tmp_path: Path) -> None:
    store_twin(tmp_path, ms=20.0)
    found = propose(write(), store_twin(tmp_path, "CUDA:1", 30.0, measured_at="2026-02-01"))
    assert [option.cost.row_ms[0] for option in found.cluster.options] == [30.0]
    assert [device.id for device in found.cluster.devices] == ["here/CUDA0", "here/CUDA1"]
    elsewhere = propose_here(build_request_from_config(write(), Path()), ProfileStore(tmp_path), {})
    assert [device.id for device in elsewhere.cluster.devices] == ["here/CUDA:0", "here/CUDA:1"], (
        "as they were measured"
    )


def test_a_gpu_is_named_as_its_host_numbers_it(tmp_path: Path) -> None:
    """On one host it is the second, beside an unlike one; on the other the only one."""
    first = PresentHost(THIS_NODE, frozenset({TWIN, OTHER}), seen=see([1]) | see([0], OTHER))
    second = PresentHost("10.0.0.2", frozenset({TWIN}), seen=see([0]))
    config = write(", replicas: 2", "drafts: []\ncluster: {address: 'a:1'}\nplacement: {concurrency: 16}\n")
    found = propose_hosts(
        build_request_from_config(config, Path()), store_twin(tmp_path), [first, second], PresentLinks()
    )
    placed = [apply_plan(config, found, number).model for number in range(2)]
    assert {(one.placements[0].host, one.device) for one in placed} == {(THIS_NODE, "CUDA:1"), ("10.0.0.2", "CUDA:0")}


def test_a_model_that_fits_on_no_single_one_is_cut_over_both(tmp_path: Path) -> None:
    source = "simulated:toy?layers=4"
    config = parse_config(
        f"model: {{source: '{source}', name: toy, adapter: auto, device: auto}}\ndrafts: []\n", Path("c.yaml")
    )
    store = store_twin(tmp_path, script="layers=4", layers=4, weights_bytes=12 * GIB)
    request = build_request_from_config(config, Path())
    found = propose_here(request, store, {}, build_option_filter(config, request), see(range(2)))
    placed = apply_plan(config, found, 0).model
    assert sorted((shard.device, shard.layers) for shard in placed.shards) == [("CUDA:0", 2), ("CUDA:1", 2)]
