"""Plans over hosts that are there: by their hardware, roles, names and links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from device_profiles.device_names import is_same_device
from device_profiles.link import LinkProfile
from device_profiles.measured import Hardware
from device_profiles.profile import Exactness
from device_profiles.store import ProfileStore
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.planning.applied import apply_plan
from orchestrator.planning.here import PresentHost, PresentLinks, cluster_present
from orchestrator.planning.proposal import PlanProposal, propose_hosts
from orchestrator.planning.stored import MeasuredHardware
from orchestrator.planning.wanted import PlanError, build_request_from_config
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

FAST, SLOW = (Hardware("simulated", name, GIB) for name in ("fast", "slow"))


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    for name, ms in (("fast", 2.0), ("slow", 8.0)):
        found = store_simulated_profiles(tmp_path, {"SIM": ms}, hardware_name=name, more_row_ms=ms)
    return found


def propose(store: ProfileStore, hosts: Sequence[PresentHost], text: str = "", links: PresentLinks | None = None):
    config = parse_config(
        "model: {source: 'simulated:toy', adapter: simulated, device: auto, name: toy, replicas: 2}\n"
        f"cluster: {{address: 'a:1'}}\n{text}",
        Path("c.yaml"),
    )
    return config, propose_hosts(build_request_from_config(config, Path()), store, hosts, links or PresentLinks())


def hosts_of(proposal: PlanProposal) -> list[str]:
    return [replica.shards[0].host for replica in proposal.plan.replicas]


def test_the_faster_host_has_the_first_replica_and_each_runs_where_it_was_planned(store: ProfileStore):
    hosts = [PresentHost(THIS_NODE, frozenset({SLOW})), PresentHost("10.0.0.2", frozenset({FAST}))]
    config, proposal = propose(store, hosts, "placement: {concurrency: 16}\n")
    assert hosts_of(proposal) == ["10.0.0.2", THIS_NODE]
    for number, host in enumerate(hosts_of(proposal)):
        assert {one.host for one in apply_plan(config, proposal, number).model.placements} == {host}


def test_a_role_and_a_name_of_cluster_yaml_are_kept(store: ProfileStore):
    hosts = [
        PresentHost(THIS_NODE, frozenset({SLOW}), name="front"),
        PresentHost("10.0.0.2", frozenset({FAST}), name="big", roles=("draft",)),
    ]
    assert hosts_of(propose(store, hosts)[1]) == [THIS_NODE]
    both = [hosts[0], PresentHost("10.0.0.2", frozenset({FAST}), name="big")]
    assert hosts_of(propose(store, both, "placement: {exclude: [front]}\n")[1]) == ["10.0.0.2"]
    assert hosts_of(propose(store, both, "placement: {pin_target: [front/SIM]}\n")[1]) == [THIS_NODE]
    with pytest.raises(PlanError, match=r"no host that `placement\.pin_target` allows has the role `target`"):
        propose(store, hosts, "placement: {pin_target: [big]}\n")


def test_a_device_that_is_not_allowed_is_not_used_and_a_host_without_a_profile_is_named(store: ProfileStore):
    unknown = PresentHost("10.0.0.3", frozenset({Hardware("simulated", "unknown", GIB)}))
    hosts = [
        PresentHost(THIS_NODE, frozenset({FAST}), devices=("cuda:0",)),
        PresentHost("b", frozenset({SLOW})),
        unknown,
    ]
    _, proposal = propose(store, hosts)
    assert hosts_of(proposal) == ["b"]
    assert "10.0.0.3 is left out: no device of it has a profile" in proposal.assumed


def test_devices_of_a_host_are_named_in_any_case_and_what_is_stated_of_them_holds(store: ProfileStore):
    free, prices = {"SIM": GIB, "sim": GIB // 2}, {"Sim:0": 3.0}
    host = PresentHost(THIS_NODE, frozenset({FAST}), free, devices=("sim",), device_prices=prices)
    _, proposal = propose(store, [host])
    (device,) = proposal.cluster.devices
    assert device.price_per_hour == 3.0
    assert 0 < device.memory_bytes <= GIB // 2


SPELT = [
    {"openvino_rt": "CPU", "torch_device": "CPU", "onnx_rt": "CPU", "llama_cpp": "CPU"},
    {"openvino_rt": "GPU", "llama_cpp": "SYCL0"},
    {"torch_device": "CUDA:0", "onnx_rt": "CUDA", "llama_cpp": "CUDA0"},
    {"torch_device": "CUDA:1", "llama_cpp": "CUDA1"},
]
"""What the devices of a host are called by the runtimes that were measured there."""


def list_documented_devices() -> list[str]:
    """Return the devices of hosts that are there, as docs/configuration.md names them in examples and in its table."""
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"(?ms)^```yaml\n(.*?)^```", text))
    hosts = [host for block in blocks for host in (block or {}).get("hosts", []) if "address" in host]
    (meaning, example), *_ = re.findall(
        r"(?m)^\| `hosts\[\]\.devices\[\]\.device` \|.*?\((.*?)\).*\| `(\w+)` \|$", text
    )
    (listed,) = re.findall(r"(?m)^\| `hosts\[\]\.devices` \|.*\| `(.*)` \|$", text)
    entries = [entry for host in hosts for entry in host.get("devices", [])] + yaml.safe_load(listed)
    return sorted({*(entry["device"] for entry in entries), *re.findall("`(.*?)`", meaning), example})


@pytest.mark.parametrize("device", [*list_documented_devices(), "cpu", "gpu", "cuda0", "Cuda:1", "SYCL:0"])
def test_the_device_that_a_page_names_of_a_host_is_the_one_that_is_used(tmp_path: Path, device: str) -> None:
    measured = []
    for number, names in enumerate(SPELT):
        hardware = Hardware("gpu" if number else "cpu", f"device {number}", GIB)
        for adapter, name in names.items():
            stored = store_simulated_profiles(
                tmp_path, {name: 1.0}, adapter=adapter, hardware=hardware, version=adapter
            )
        seen = tuple(known for known in stored.devices() if known.hardware == hardware)
        measured.append(MeasuredHardware(hardware, seen, ()))
    everything = frozenset(hardware.hardware for hardware in measured)
    config = parse_config("model: {source: 'simulated:toy', name: toy}\n", Path("c.yaml"))
    target = build_request_from_config(config, Path()).target
    host = PresentHost("h", everything, devices=(device,), stated_bytes={device: 7}, device_prices={device: 3.0})
    inventory, behind = cluster_present([host], measured, target, (), Exactness.BIT, links=PresentLinks())
    (used,) = inventory.devices
    spelt = {known.device for known in behind[used.profile].devices}
    assert any(is_same_device(name, device) for name in spelt)
    assert (used.memory_bytes, used.price_per_hour) == (7, 3.0)


def test_equal_hosts_share_a_profile_and_links_are_those_between_nodes(store: ProfileStore):
    hosts = [PresentHost(THIS_NODE, frozenset({FAST})), PresentHost("b", frozenset({FAST}))]
    far = LinkProfile(THIS_NODE, "b", 30.0, 1e8)
    _, proposal = propose(store, hosts, "placement: {concurrency: 4}\n", PresentLinks((far,)))
    assert {device.profile for device in proposal.cluster.devices} == {"fast SIM"}
    assert proposal.cluster.links == (far,)
    assert hosts_of(proposal) == [THIS_NODE, "b"] or hosts_of(proposal) == ["b", THIS_NODE]


@pytest.mark.parametrize(("adapter", "cut"), [("simulated", True), ("llama_cpp", False)])
def test_only_runtimes_that_load_ranges_of_layers_are_planned_to_run_shards(tmp_path: Path, adapter: str, cut: bool):
    """Neither host holds the model, and both together do."""
    found = store_simulated_profiles(
        tmp_path,
        {"SIM": 2.0},
        script="layers=4",
        hardware_name="fast",
        adapter=adapter,
        layers=4,
        weights_bytes=3 * GIB // 2,
    )
    config = parse_config(
        "model: {source: 'simulated:toy?layers=4', adapter: simulated, device: auto, name: toy}\n"
        "cluster: {address: 'a:1'}\ndrafts: []\n",
        Path("c.yaml"),
    )
    hosts = [PresentHost(node, frozenset({FAST})) for node in (THIS_NODE, "b")]
    asked = build_request_from_config(config, Path())
    if cut:
        assert len(propose_hosts(asked, found, hosts, PresentLinks()).plan.replicas[0].shards) == 2
        return
    with pytest.raises(PlanError, match="there is no plan"):
        propose_hosts(asked, found, hosts, PresentLinks())


def test_prices_of_hosts_turn_a_plan_and_a_discovered_host_without_one_is_left_out(store: ProfileStore):
    """The slow host takes four times as long, and costs a tenth."""
    own = PresentHost(THIS_NODE, frozenset({FAST}), price_per_hour=5.0)
    cheap = PresentHost("b", frozenset({SLOW}), name="cheap", price_per_hour=0.2, device_prices={"SIM": 0.3})
    found = PresentHost("c", frozenset({FAST}))
    for objective, host in (("throughput", THIS_NODE), ("cost", "b")):
        text = f"placement: {{objective: {objective}, exclude: [c]}}\n"
        _, proposal = propose(store, [own, cheap, found], text)
        assert hosts_of(proposal)[0] == host
    assert proposal.plan.price_per_hour == pytest.approx(0.5)
    _, proposal = propose(store, [own, cheap, found], "placement: {objective: cost}\n")
    assert hosts_of(proposal) == ["b"]
    assert any("c/SIM is left out: its price is not known" in one for one in proposal.assumed)
    unpriced = PresentHost("b", frozenset({SLOW}), name="cheap")
    with pytest.raises(PlanError, match="the price of 'b/SIM' is not known"):
        propose(store, [own, unpriced], "placement: {objective: cost}\n")
