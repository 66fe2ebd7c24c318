"""What an item of `model.replicas` has of its own: its drafts, its shards and its ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adapters.device_memory import list_nvidia_memory
from orchestrator.config.effective import list_settings
from orchestrator.config.load import load_text, parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.readiness import check_readiness
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options, replica_draft_specs, worker_specs
from tests.support import tiny_gguf, tiny_models

ENDPOINT = "endpoint: 'http://gpu-box:8000/v1'"
OTHER = "{method: model, source: 'simulated:other', adapter: simulated, process: own, max_wait_ms: 7}"
DRAFT = "{method: model, source: 'simulated:toy', adapter: simulated, process: own}"


def write(*items: str, drafts: str = f"[{DRAFT}]", model: str = "", tail: str = "") -> str:
    listed = "".join(f"    - {item}\n" for item in items)
    head = f"model:\n  source: simulated:toy\n  adapter: simulated\n{model}  replicas:\n{listed}"
    return f"{head}drafts: {drafts}\n{tail}"


def load(text: str, directory: Path) -> ClusterConfig:
    return load_text(text, directory / "cluster.yaml")


def test_each_worker_has_its_own_and_what_it_does_not_name_is_the_targets(tmp_path: Path) -> None:
    items = (
        f"{{drafts: [{{method: suffix}}, {OTHER}], max_running: 3}}",
        "{drafts: []}",
        "{shards: [{layers: 1}, {layers: 2, device: SIM.1}]}",
        "{adapter: torch_device, tensor_parallel: 2}",
        f"{{{ENDPOINT}}}",
    )
    text = write(*items, drafts=f"[{DRAFT}]").replace("simulated\n  rep", "simulated\n  tensor_parallel: 1\n  rep")
    config, _ = parse_config(text, tmp_path / "cluster.yaml")
    options = engine_options(config, tmp_path)
    specs: list[Any] = [spec.options for spec in worker_specs(options, config)]
    names = [[draft["name"] for draft in each["drafters"]] for each in specs[:4]]
    assert names == [["suffix", "replica-0-model"], [], ["model"], ["model"]]
    assert specs[0]["drafters"][1]["place"] == "model.replicas[0].drafts[1]"
    assert [len(each["model"]["shards"]) for each in specs] == [0, 0, 2, 0, 0]
    assert [each["model"]["tensor_parallel"] for each in specs] == [1, 1, 1, 2, 1]
    own, none, *shared, beside_endpoint = replica_draft_specs(options, config)
    assert [spec.name for spec in own] == ["replica-0-model"]
    assert own[0].options["slots"] == 3
    assert (none, beside_endpoint) == ([], [])
    assert [[spec.name for spec in each] for each in shared] == [["model"], ["model"]]
    assert config.model.unlike, "parts and ranks may decide bits"
    assert set(config.model_sources) == {"simulated:toy", "simulated:other"}


def test_one_way_to_split_takes_the_place_of_the_other_and_an_empty_list_of_both(tmp_path: Path) -> None:
    shards = "  shards: [{layers: 1}, {layers: 2}]\n"
    config = load(write("{}", "{shards: []}", "{shards: [{layers: 2}, {layers: 1}]}", model=shards), tmp_path)
    models = [worker.options["model"] for worker in worker_specs(engine_options(config, tmp_path), config)]
    assert [[shard["layers"] for shard in model["shards"]] for model in models] == [[1, 2], [], [2, 1]]


def test_a_draft_worker_of_one_replica_runs_on_its_host(tmp_path: Path) -> None:
    items = f"{{host: 10.0.0.3, drafts: [{DRAFT}, {DRAFT[:-1]}, host: 10.0.0.4}}]}}"
    config, _ = parse_config(write(items, tail="cluster: {address: 'a:1'}\n"), tmp_path / "cluster.yaml")
    [beside] = replica_draft_specs(engine_options(config, tmp_path), config)
    assert [(spec.name, spec.node) for spec in beside] == [
        ("replica-0-model", "10.0.0.3"),
        ("replica-0-model-2", "10.0.0.4"),
    ]


def test_an_item_that_names_a_draft_with_workers_shares_these(tmp_path: Path) -> None:
    other = f"{DRAFT[:-1]}, overlap: never}}"
    items = ("{max_running: 2}", f"{{drafts: [{DRAFT}, {other}, {DRAFT}], max_running: 3}}", "{drafts: []}")
    common = f"[{{method: suffix}}, {DRAFT[:-1]}, workers: {{min: 1}}}}]"
    config, _ = parse_config(write(*items, drafts=common), tmp_path / "cluster.yaml")
    beside = replica_draft_specs(engine_options(config, tmp_path), config)
    assert [[spec.name for spec in specs] for specs in beside] == [
        ["model"],
        ["model", "replica-1-model-2", "replica-1-model-3"],
        [],
    ]
    assert beside[0][0] is beside[1][0]
    assert beside[0][0].options["slots"] == 3 * 16, "all may be its own"
    assert beside[1][1].options["slots"] == 3
    drafters = [worker.options["drafters"] for worker in worker_specs(engine_options(config, tmp_path), config)]
    assert [drafter["name"] for drafter in drafters[1]] == ["model", "replica-1-model-2", "replica-1-model-3"]


def test_drafts_of_one_item_alone_make_no_other_bits(tmp_path: Path) -> None:
    config = load(write("{}", "{drafts: []}", model="  alike: true\n"), tmp_path)
    assert not config.model.unlike


@pytest.mark.parametrize(
    ("item", "model", "message"),
    [
        (
            f"{{{ENDPOINT}, shards: []}}",
            "",
            r":5: model\.replicas\[0\]\.shards: is of a worker that computes by itself",
        ),
        (f"{{{ENDPOINT}, tensor_parallel: 2}}", "", r"\.tensor_parallel: is of a worker that computes by itself"),
        (f"{{{ENDPOINT}, drafts: []}}", "", r"\.drafts: is of a worker that computes by itself"),
        ("{shards: [{layers: 1}]}", "", r":5: model\.replicas\[0\]\.shards: one shard is the whole target"),
        ("{shards: [{layers: 0}, {layers: 1}]}", "", r"replicas\[0\]\.shards\[0\]\.layers: must be 1 to 10000, not 0"),
        ("{shards: [{layer: 1}, {layers: 1}]}", "", r"replicas\[0\]\.shards\[0\]\.layer: unknown key; did you mean"),
        ("{shards: [{layers: 1, host: a}, {layers: 1}]}", "", r"\.shards\[0\]\.host: goes with Ray"),
        ("{shards: [{layers: 1, cores: [0, 0]}, {layers: 1}]}", "", r"\.shards\[0\]\.cores: names a core twice"),
        ("{tensor_parallel: 2}", "", r"\.tensor_parallel: simulated cannot split layers; set adapter: torch_device"),
        ("{tensor_parallel: 65}", "", r"\.tensor_parallel: must be 1 to 64, not 65"),
        ("{drafts: [{method: sufix}]}", "", r":5: model\.replicas\[0\]\.drafts\[0\]\.method: must be 'suffix'"),
        ("{drafts: [{method: suffix, max_mach: 3}]}", "", r"\.drafts\[0\]\.max_mach: unknown key; did you mean 'max_m"),
        ("{drafts: [{method: suffix, max_match: 99}]}", "", r"\.drafts\[0\]\.max_match: must be 1 to 32, not 99"),
        ("{drafts: [{method: suffix, store: disk}]}", "", r"\.drafts\[0\]\.store: a replica has no store of its own"),
        (f"{{drafts: [{DRAFT[:-1]}, device: auto}}]}}", "", r"drafts\[0\]\.device: no plan chooses for one replica's"),
        (f"{{drafts: [{DRAFT[:-1]}, workers: {{min: 2}}}}]}}", "", r"drafts\[0\]\.workers: is a key of `drafts`"),
        ("{drafts: [{method: index, path: no.drafts}]}", "", r"\.drafts\[0\]\.path: .* is no file"),
        ("{drafts: []}", "  device: auto\n", r":6: model\.replicas\[0\]\.drafts: the plan chooses how replicas"),
        (
            "{tensor_parallel: 2}",
            "  device: auto\n",
            r":6: model\.replicas\[0\]\.tensor_parallel: the plan chooses how",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_its_line_before_anything_loads(
    tmp_path: Path, item: str, model: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(item, model=model), tmp_path)


def test_parts_that_the_models_shape_does_not_allow_are_refused_at_their_item(tmp_path: Path) -> None:
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16", num_hidden_layers=4)
    head = "model:\n  source: tiny\n  replicas:\n    - {}\n    - "
    for item, message in (
        (
            "{shards: [{layers: 1}, {layers: 2}]}",
            "5: model.replicas[1].shards: tiny has 4 layers, and its shards name 3",
        ),
        ("{adapter: torch_device, tensor_parallel: 64}", "5: model.replicas[1].tensor_parallel: "),
        (
            "{adapter: torch_device, tensor_parallel: 2, shards: [{layers: 1}, {layers: 3}]}",
            "5: model.replicas[1].tensor_parallel: a target is in layer shards or its layers are split, not both",
        ),
        ("{shards: [{layers: 1, adapter: simulated}, {layers: 3}]}", "[1].shards[0].adapter: 'tiny' does not go with"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(f"{head}{item}\n", tmp_path)


def test_a_draft_of_another_vocabulary_and_ranks_without_devices_are_refused_at_their_item(tmp_path: Path) -> None:
    words = (*map(chr, range(ord("!"), ord("~"))), "xy")
    for name, spelt in (("target", words), ("draft", words[::-1])):
        tiny_gguf.write(tmp_path / f"{name}.gguf", tiny_gguf.Tiny("llama", vocabulary=len(words), words=spelt))
    head = "model:\n  source: target.gguf\n  replicas:\n    - {}\n    - "
    with pytest.raises(ConfigError, match=r":5: model\.replicas\[1\]\.drafts\[0\]\.source: .*vocabular"):
        load(f"{head}{{drafts: [{{method: model, source: draft.gguf}}]}}\n", tmp_path)
    path = tmp_path / "cluster.yaml"
    text = f"{head}{{adapter: torch_device, device: 'CUDA:63', tensor_parallel: 2}}\n"
    config, lines = parse_config(text, path)
    with pytest.raises(ConfigError, match=r":5: model\.replicas\[1\]\.device: .*CUDA:64"):
        check_readiness(config, path, lines)


def test_what_an_item_takes_from_its_target_is_told_with_its_key(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    config, lines = parse_config(write("{drafts: [{method: suffix}]}", "{max_running: 2}"), path)
    origins = {setting.name: setting.origin for setting in list_settings(config, path, lines)}
    assert origins["model.replicas[0].drafts[0].method"] == f"{path}:5"
    assert origins["model.replicas[1].drafts"] == "as drafts"
    assert origins["model.replicas[1].shards"] == "as model.shards"
    assert origins["model.replicas[0].max_running"] == "as limits.max_running"
    assert origins["model.replicas[1].max_running"] == f"{path}:6"


def test_the_examples_of_replicas_in_the_documentation_are_taken() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    pools = text.partition("### Pools of unlike replicas")[2].partition("\n### ")[0]
    configs = [parse_config(block, Path("c.yaml"))[0] for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", pools)]
    assert [len(config.model.placements) for config in configs] == [2, 4]
    assert [bool(config.own_drafts) for config in configs] == [False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not list_nvidia_memory(), reason="there is no NVIDIA device here")
def test_more_ranks_than_this_machine_has_gpus_are_refused_at_their_item(tmp_path: Path) -> None:
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16", num_attention_heads=64, num_key_value_heads=64)
    item = "{adapter: torch_device, device: CUDA, tensor_parallel: 64}"
    with pytest.raises(ConfigError, match=r"tensor_parallel: 64 ranks from CUDA:0 on need CUDA:63, and this machine"):
        load(f"model:\n  source: tiny\n  replicas:\n    - {{}}\n    - {item}\n", tmp_path)
