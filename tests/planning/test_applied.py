"""A plan as the configuration that runs it, and plans from stored profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from device_profiles.measured import Hardware
from device_profiles.store import ProfileStore
from device_profiles.units import MIB
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sketch import load_sketch
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.applied import apply_plan, build_option_filter, list_unplaced_drafts
from orchestrator.planning.basis import basis
from orchestrator.planning.basis import plain as plain_data
from orchestrator.planning.proposal import PlanProposal, propose_here, propose_sketch
from orchestrator.planning.wanted import PlanError, build_request_from_config, build_request_from_sketch
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

HEAD = "model: {{source: 'simulated:toy', name: toy, adapter: {adapter}, device: {device}}}\n"
DRAFTS = "drafts: [{method: suffix}, {method: model, source: 'simulated:toy', adapter: auto, device: auto}]\n"


def whole_targets(request):
    """What is asked for without layer shards."""
    return replace(request, placement=request.placement.model_copy(update={"sharding": "never"}))


def propose_plan(directory: Path, text: str):
    config = parse_config(text, Path("c.yaml"))
    asked = whole_targets(build_request_from_config(config, directory))
    store = store_simulated_profiles(directory, {"SIM": 20.0, "SIM.1": 50.0})
    store_simulated_profiles(directory, {"SIM": 5.0, "SIM.1": 0.1}, model="simulated-toy", role="draft")
    return config, propose_here(asked, store, {}, build_option_filter(config, asked))


def plan_of(found: PlanProposal) -> str:
    return found.plan.replicas[0].shards[0].device


@pytest.mark.parametrize(
    ("adapter", "device", "where"), [("auto", "auto", "SIM"), ("simulated", "auto", "SIM"), ("auto", "SIM.1", "SIM.1")]
)
def test_what_is_auto_is_chosen_and_what_is_written_stays(tmp_path, adapter, device, where):
    config, found = propose_plan(tmp_path, HEAD.format(adapter=adapter, device=device))
    assert config.planned
    assert plan_of(found) == f"here/{where}"
    effective = apply_plan(config, found, 0)
    assert (effective.model.adapter, effective.model.device) == ("simulated", where)
    assert not effective.planned
    assert effective.limits == config.limits


def test_a_draft_runs_where_the_plan_puts_it_or_not_at_all(tmp_path):
    good = HEAD.format(adapter="auto", device="auto") + DRAFTS + "placement: {draft_acceptance: 0.95}\n"
    config, found = propose_plan(tmp_path, good)
    suffix, draft = apply_plan(config, found, 0).drafts
    assert suffix.method == "suffix"
    assert isinstance(draft, ModelDraft)
    assert (draft.adapter, draft.device, draft.process) == ("simulated", "SIM.1", "own")
    assert any("accepted with 0.95" in line for line in found.assumed)
    poor = HEAD.format(adapter="auto", device="auto") + DRAFTS + "placement: {draft_acceptance: 0.01}\n"
    config, found = propose_plan(tmp_path, poor)
    assert [draft.method for draft in apply_plan(config, found, 0).drafts] == ["suffix"]


def canary_of(directory: Path, text: str) -> tuple[list[str], list[str], list[str]]:
    """What everybody and what only the canary drafts with where the plan decides, and what is left out for it."""
    canary = "canary: {share: 0.5, speculation: {method: fixed, num_speculative_tokens: 3}}\n"
    config, found = propose_plan(directory, HEAD.format(adapter="auto", device="auto") + text + canary)
    effective = apply_plan(config, found, 0)
    usual, own = ([str(draft.method) for draft in drafts] for drafts in (effective.drafts, effective.canary_drafts))
    return usual, own, list_unplaced_drafts(config, found)


def test_a_canary_keeps_its_drafts_where_the_plan_leaves_the_others_without(tmp_path):
    draft = "{method: model, source: 'simulated:toy', adapter: %s, device: %s}"
    named, planned = draft % ("simulated", "SIM.1"), draft % ("auto", "auto")
    poor = "placement: {draft_acceptance: 0.01}\n"
    assert canary_of(tmp_path, "") == (["suffix"], [], []), "the same as everybody"
    assert canary_of(tmp_path, "speculation: {method: off}\n") == ([], ["suffix"], [])
    assert canary_of(tmp_path, f"drafts: [{named}]\n{poor}") == ([], ["model"], [])
    assert canary_of(tmp_path, f"drafts: [{planned}]\n{poor}") == ([], [], ["drafts[0]"])


def test_what_the_canary_loads_is_left_for_it(tmp_path):
    head = HEAD.format(adapter="auto", device="auto")
    draft = "{method: model, source: 'simulated:toy', adapter: simulated, device: SIM, kv_cache: %s MiB}"
    canary = f"canary: {{share: 0.1, drafts: [{draft}]}}\n"
    plain = propose_plan(tmp_path, head)[1]
    config, small = propose_plan(tmp_path, head + canary % 512)
    before, after = (next(one for one in found.cluster.devices if one.id == "here/SIM") for found in (plain, small))
    assert 512 << 20 <= before.memory_bytes - after.memory_bytes < 513 << 20
    assert plan_of(small) == "here/SIM"
    (line,) = plain_data(small)["beside"]
    assert line.startswith("the canary's simulated-toy: 512")
    _, large = propose_plan(tmp_path, head + canary % 1020)
    assert plan_of(large) == "here/SIM.1", "there is no room beside it"
    none = config.model_copy(update={"canary": config.canary.model_copy(update={"share": 0.0})})
    assert build_request_from_config(none, tmp_path).beside == ()


def test_where_everything_is_written_nothing_is_planned(tmp_path):
    config = parse_config(HEAD.format(adapter="simulated", device="CPU"), Path("c.yaml"))
    assert not config.planned


def test_a_sketch_may_name_what_was_measured(tmp_path):
    sketch_file = tmp_path / "sketch.yaml"
    sketch_file.write_text(
        "hosts:\n  - name: far\n    memory: 8 GiB\n    devices:\n"
        "      - {device: simulated device SIM.1, count: 2}\n      - {device: nvidia-l4}\n"
    )
    sketch = load_sketch(sketch_file)
    config = parse_config(HEAD.format(adapter="simulated", device="CPU"), Path("c.yaml"))
    asked = build_request_from_sketch(sketch, config, tmp_path)
    store = store_simulated_profiles(tmp_path, {"SIM": 20.0, "SIM.1": 50.0})
    found = propose_sketch(sketch, asked, store)
    sources = {option.profile: option.source for option in found.cluster.options}
    assert sources == {"simulated device SIM.1": "measured", "nvidia-l4": "datasheet"}
    assert {one.source for one in basis(found)} <= {"measured", "datasheet"}


def test_without_a_profile_the_error_says_what_to_do(tmp_path):
    config = parse_config(HEAD.format(adapter="auto", device="auto"), Path("c.yaml"))
    asked = build_request_from_config(config, tmp_path)
    way_out = r"run `outrider profile`, or pass --profiles DIR"
    with pytest.raises(PlanError, match=rf"no profile of toy .* {way_out}"):
        propose_here(asked, ProfileStore(tmp_path / "none"), {})
    store = store_simulated_profiles(tmp_path, {"SIM": 20.0}, script="base_ms=9")
    with pytest.raises(
        PlanError, match=rf"no profile of toy .*simulated-\w+ has this name, and other files.*{way_out}"
    ):
        propose_here(asked, store, {})
    renamed = store_simulated_profiles(tmp_path, {"SIM.1": 50.0}, model="as it was called before")
    assert plan_of(propose_here(asked, renamed, {})) == "here/SIM.1", "what has other files is not believed"


def test_of_a_store_with_other_machines_profiles_a_plan_takes_what_is_here(tmp_path):
    """Profiles of other hosts, or from before a memory upgrade: what is not there is left out, and the plan says so."""
    config = parse_config(HEAD.format(adapter="auto", device="auto"), Path("c.yaml"))
    asked = build_request_from_config(config, tmp_path)
    store = store_simulated_profiles(tmp_path, {"SIM": 20.0})
    store_simulated_profiles(tmp_path, {"SIM": 5.0}, memory_bytes=2 * GIB, measured_at="2026-02-01")
    here = Hardware("simulated", "simulated device SIM", GIB)
    found = propose_here(asked, store, {}, seen={SeenDevice("simulated", "SIM", here)})
    assert [one.memory_bytes for one in found.cluster.devices] == [GIB]
    assert any("left out, it is another machine's, or its memory" in line for line in found.assumed)
    newest = propose_here(asked, store, {})
    assert [one.memory_bytes for one in newest.cluster.devices] == [2 * GIB]
    assert any("was measured anew since" in line for line in newest.assumed)


def test_on_ray_what_was_planned_for_this_host_is_bound_to_it(tmp_path):
    ray = "cluster: {runtime: ray, address: '10.0.0.1:6379', auth: none}\n"
    config, found = propose_plan(tmp_path, HEAD.format(adapter="auto", device="auto") + DRAFTS + ray)
    effective = apply_plan(config, found, 0)
    assert [one.host for one in effective.model.placements] == ["here"]
    config, found = propose_plan(tmp_path / "local", HEAD.format(adapter="auto", device="auto"))
    assert [one.host for one in apply_plan(config, found, 0).model.placements] == [""]


BESIDE = "drafts: [{method: suffix}, {method: model, source: 'simulated:toy', adapter: auto, device: auto%s}]\n"
GROUPS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def place_beside(
    directory: Path, target: str = "", draft: str = "", more: str = ""
) -> tuple[ClusterConfig, PlanProposal]:
    """A plan of one processor with four cores, where the target has two threads and its draft one beside it."""
    head = f"model: {{source: 'simulated:toy', name: toy, adapter: auto, device: auto{target}}}\n"
    text = f"{head}{BESIDE % draft}placement: {{draft_acceptance: 0.95}}\n{more}"
    config = parse_config(text, Path("c.yaml"))
    asked = whole_targets(build_request_from_config(config, directory))
    store = store_simulated_profiles(directory, {"SIM": 20.0}, threads=2, cores=4)
    store_simulated_profiles(directory, {"SIM": 2.0}, model="simulated-toy", role="draft", threads=1, cores=4)
    return config, propose_here(asked, store, {}, build_option_filter(config, asked))


def cores_of(
    config: ClusterConfig, found: PlanProposal, groups: list[list[int]]
) -> tuple[list[int], int, list[int], int]:
    """The cores and threads of the target's worker and of the draft's, as they are started."""
    effective = apply_plan(config, found, 0, {"here": groups})
    (target,), (draft,) = build_start_specs(effective, Path())
    return target.cores, target.options["model"]["threads"], draft.cores, draft.options["draft"]["model"]["threads"]


def test_target_and_draft_beside_it_get_cores_of_their_own(tmp_path):
    config, found = place_beside(tmp_path)
    assert cores_of(config, found, GROUPS) == ([0, 1, 4, 5], 2, [2, 6], 1)
    assert cores_of(config, found, [[3], [5], [9]]) == ([3, 5], 2, [9], 1)
    assert cores_of(config, found, [[0, 4], [1, 5]]) == ([0, 4], 2, [1], 1)  # too few for whole cores
    assert cores_of(config, found, [[0], [1]]) == ([], 2, [], 1)  # too few at all


def test_cores_that_are_written_stay_and_the_rest_is_split(tmp_path):
    config, found = place_beside(tmp_path, target=", replicas: [{cores: [2, 3]}]")
    assert cores_of(config, found, GROUPS) == ([2, 3], 2, [0, 4], 1)
    config, found = place_beside(tmp_path, draft=", process: own, cores: [0]")
    assert cores_of(config, found, GROUPS) == ([1, 2, 5, 6], 2, [0], 1)
    config, found = place_beside(tmp_path, more="devices: {cores: [1]}\n")
    assert cores_of(config, found, GROUPS) == ([1], 1, [0, 4], 1)


def test_a_target_alone_on_its_processor_runs_on_any_core(tmp_path):
    config = parse_config(HEAD.format(adapter="auto", device="auto"), Path("c.yaml"))
    asked = whole_targets(build_request_from_config(config, tmp_path))
    store = store_simulated_profiles(tmp_path, {"SIM": 20.0}, threads=2, cores=4)
    found = propose_here(asked, store, {}, build_option_filter(config, asked))
    (target,), _ = build_start_specs(apply_plan(config, found, 0, {"here": GROUPS}), Path())
    assert (target.cores, target.options["model"]["threads"]) == ([], 2)


@pytest.mark.parametrize(("configured_mib", "loaded_mib"), [(64, 64), (4096, 256)])
def test_a_target_in_shards_is_loaded_with_the_kv_cache_that_was_planned(tmp_path, configured_mib, loaded_mib):
    source = "simulated:toy?layers=4"
    text = f"model: {{source: '{source}', name: toy, adapter: simulated, device: auto}}\ndrafts: []\n"
    config = parse_config(f"{text}limits: {{kv_cache: {configured_mib} MiB}}\n", Path("c.yaml"))
    weights, peak = int(1.2 * GIB), int(1.3 * GIB)
    store = store_simulated_profiles(
        *(tmp_path, {"SIM": 3.0, "SIM.1": 3.0}, "toy"),
        script=source.partition("?")[2],
        layers=4,
        weights_bytes=weights,
        peak_bytes=peak,
    )
    asked = build_request_from_config(config, tmp_path)
    proposal = propose_here(asked, store, {}, build_option_filter(config, asked))
    assert [shard.memory.kv_cache for shard in proposal.plan.replicas[0].shards] == [loaded_mib * MIB // 2] * 2
    effective = apply_plan(config, proposal, 0)
    assert (effective.limits.kv_cache, effective.limits.max_running) == (loaded_mib * MIB, config.limits.max_running)
    told = [reason for reason in proposal.plan.reasons if reason.startswith("a KV cache of ")]
    assert told == (
        [] if loaded_mib == configured_mib else ["a KV cache of 256.0 MiB has room, and 4.0 GiB are configured"]
    )
