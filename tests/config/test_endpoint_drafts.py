"""A draft of a llama-server in cluster.yaml: what goes with it, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.config.drafts import EndpointDraft, draft_names
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import draft_specs, engine_options
from orchestrator.protocol.load_options import EndpointDraftOptions
from orchestrator.recommend.candidates import list_candidates

ENDPOINT = "endpoint: 'http://mac:8080'"


def write(directory: Path, *drafts: str) -> Path:
    path = directory / "cluster.yaml"
    lines = "".join(f"  - {{{draft}}}\n" for draft in drafts)
    path.write_text(f"model: {{source: 'simulated:toy', adapter: simulated}}\ndrafts:\n{lines}")
    return path


def test_a_draft_with_an_endpoint_needs_nothing_else(tmp_path):
    path = write(tmp_path, "method: suffix", f"method: model, {ENDPOINT}", "method: model, endpoint: 'http://pc:8080/'")
    config = load_config(path)
    assert isinstance(config.drafts[1], EndpointDraft)
    assert draft_names(config.drafts) == ["suffix", "model", "model-2"]
    options = engine_options(config, tmp_path)
    draft = options.drafters[1]
    assert draft == EndpointDraftOptions("model", "drafts[1]", "http://mac:8080", "", "auto", 100.0, 20.0, "")
    assert options.drafters[2] == replace(draft, name="model-2", place="drafts[2]", endpoint="http://pc:8080")
    assert draft_specs(options, config) == []  # nobody of ours runs it
    assert config.model_sources == ("simulated:toy",)
    names = [candidate.name for candidate in list_candidates(config, [], [])]
    assert names == ["suffix", "model on http://mac:8080", "model on http://pc:8080"]


@pytest.mark.parametrize(
    "key", ["adapter: onnx_rt", "device: CPU", "cores: [1]", "weights: int4", "kv_cache: 1 GiB", "process: own"]
)
def test_what_says_how_a_model_is_loaded_does_not_go_with_it(tmp_path, key):
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, "method: suffix", f"method: model, {ENDPOINT}, {key}"))
    name = key.split(":")[0]
    why = f"it says how a model is loaded here, and with endpoint none is; leave {name} or endpoint out"
    assert str(raised.value) == f"{tmp_path / 'cluster.yaml'}:4: drafts[1].{name}: unknown key; {why}"


@pytest.mark.parametrize(
    ("keys", "place", "why"),
    [
        ("endpoint: mac", "endpoint", "must be the address of a llama-server, as http://HOST:8080"),
        (f"{ENDPOINT}, api_key_file: no.key", "api_key_file", "no.key: No such file"),
        (f"{ENDPOINT}, api_key_file: open.key", "api_key_file", "is open to every user of this machine; chmod o= it"),
        (f"{ENDPOINT}, source: 'simulated:toy'", "source", "set mismatched_vocabulary: translate"),
        (
            f"{ENDPOINT}, mismatched_vocabulary: translate",
            "mismatched_vocabulary",
            "name a model that has it as source",
        ),
        (f"{ENDPOINT}, max_wait: 3", "max_wait", "did you mean 'max_wait_ms'?"),
    ],
)
def test_what_cannot_be_is_told_with_its_line(tmp_path, keys, place, why):
    (tmp_path / "open.key").write_text("sk-1\n")
    (tmp_path / "open.key").chmod(0o644)
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, f"method: model, {keys}"))
    assert f"cluster.yaml:3: drafts[0].{place}: " in str(raised.value)
    assert why in str(raised.value)


def test_methods_are_told_as_they_are_written(tmp_path):
    with pytest.raises(ConfigError, match="must be 'suffix', 'index', 'head', 'model', not 'endpoint'"):
        load_config(write(tmp_path, "method: endpoint"))
