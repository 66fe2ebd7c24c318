"""What sources were found to be holds for all that is built from a configuration, until a reload looks again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters.contract import ModelRefused
from adapters.hf_hub import DownloadFailed
from adapters.model_identity import ModelIdentity
from orchestrator.config.load import parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sources import FoundSources
from orchestrator.daemon.bootstrap.failover import build_standbys
from orchestrator.daemon.bootstrap.model_sources import bind_sources, renew_sources
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.planning.wanted import start_replicas
from orchestrator.protocol.model_pins import list_pinned
from tests.support import tiny_gguf
from tests.support.tiny_gguf import Tiny

MODEL = Tiny("llama")
COMMIT = "a" * 40
HUB = "model: {source: 'hf:org/model', replicas: {min: 1, max: 2}}\ndrafts: [{method: model, source: 'hf:org/draft'}]"


def configure(directory: Path, text: str) -> ClusterConfig:
    config, _ = parse_config(f"{text}\nstore: {{directory: '{directory}/store'}}\n", Path("c.yaml"))
    return config


def test_a_model_of_the_hub_stays_at_the_commit_that_it_was_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is asked
    bound = FoundSources({f"hf:org/{name}": f"hf:org/{name}@{COMMIT}" for name in ("model", "draft")})
    standby = "failover: {standby: [{readiness: warm}]}"
    config = configure(tmp_path, f"{HUB}\n{standby}").with_sources(bound)
    specs, _ = build_start_specs(start_replicas(config, 2), tmp_path)
    standbys = build_standbys(config, tmp_path)
    for options in [*(spec.options for spec in specs), *(one.spec.options for one in standbys)]:
        assert options["model"]["source"] == f"hf:org/model@{COMMIT}"
        assert options["drafters"][0]["model"]["source"] == f"hf:org/draft@{COMMIT}"
    with pytest.raises((DownloadFailed, ModelRefused)):
        build_start_specs(config.with_sources(FoundSources()), tmp_path)


def test_a_reload_asks_no_hub_for_a_model_that_workers_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is asked
    bound = FoundSources({"hf:org/model": f"hf:org/model@{COMMIT}"})
    served = {one: ModelIdentity(one, "1" * 16) for one in bound.bound.values()}
    config = configure(tmp_path, f"model: {{source: 'hf:org/model@{COMMIT}'}}")
    found = renew_sources(config, tmp_path, bound, served)
    assert (found.sources.identities, found.replaced) == ({}, ())


def test_what_was_found_goes_along_and_is_no_difference_of_the_file(tmp_path: Path) -> None:
    config = configure(tmp_path, "model: {source: m.gguf, name: m}")
    found = FoundSources({"m.gguf": "m.gguf"}, {"m.gguf": ModelIdentity("m.gguf", "1" * 16)})
    bound = config.with_sources(found)
    assert start_replicas(bound, 1).sources == found
    assert bound.model_dump() == config.model_dump()
    assert config.sources == FoundSources()


def test_a_reload_names_what_was_replaced_and_keeps_the_rest(tmp_path: Path) -> None:
    config = configure(tmp_path, "model: {source: m.gguf}\ndrafts: [{method: model, source: d.gguf}]")
    for name in ("m.gguf", "d.gguf"):
        tiny_gguf.write(tmp_path / name, MODEL)
    running = bind_sources(config)
    first = renew_sources(config, tmp_path, running, {})
    assert (first.sources, first.replaced) == (running, ())
    served = {name: ModelIdentity(name, digest_of(config, tmp_path, name)) for name in running.bound}
    assert renew_sources(config, tmp_path, running, served).sources == running
    tiny_gguf.write(tmp_path / "d.gguf", replace(MODEL, seed=6))
    second = renew_sources(config, tmp_path, running, served)
    assert [line.split(":")[0] for line in second.replaced] == ["d.gguf"]
    assert set(second.sources.identities) == {"d.gguf"}
    (spec,), _ = build_start_specs(config.with_sources(second.sources), tmp_path)
    assert list_pinned(spec.options) == second.sources.identities
    again = renew_sources(config, tmp_path, second.sources, served)
    assert (again.sources, again.replaced) == (second.sources, ()), "it is what runs now"
    tiny_gguf.write(tmp_path / "d.gguf", MODEL)
    back = renew_sources(config, tmp_path, second.sources, served)
    assert back.sources.identities["d.gguf"].digest == served["d.gguf"].digest
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(ModelRefused, match=r"there is no m\.gguf"):
        renew_sources(config, tmp_path, running, served)


def digest_of(config: ClusterConfig, base: Path, name: str) -> str:
    unknown = {name: ModelIdentity(name, "0" * 16)}
    return renew_sources(config, base, bind_sources(config), unknown).sources.identities[name].digest
