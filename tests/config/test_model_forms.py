"""A runtime that reads GGUF files alone is given no directory, whatever it is to run, and no plan gives it one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapters import cpuinfo, registry
from adapters.contract import AdapterUnavailable, ModelRefused, Unsupported
from adapters.device_check import check_device
from adapters.llama_cpp.fork import ForkLibrary
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.planning.profiling.work import list_work
from tests.support import tiny_gguf, tiny_models

SOURCES = ("tiny", "~/tiny", "hf:some/model", "hf:some/model@main")
PLACES = {
    "model": ("model: {{source: '{source}',\n adapter: llama_cpp}}\n", "1: model.source"),
    "draft": (
        "model: {{source: tiny.gguf}}\ndrafts:\n- {{method: model, source: '{source}', adapter: llama_cpp}}\n",
        "3: drafts[0].source",
    ),
    "another model": (
        "model: {{source: tiny.gguf, name: a}}\nmodels:\n- {{source: '{source}', name: b, adapter: llama_cpp}}\n",
        "3: models[0].source",
    ),
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama"))
    return tmp_path


def write(directory: Path, text: str) -> Path:
    path = directory / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_directory_is_refused_at_its_line_with_a_way_out(directory: Path, source: str, place: str) -> None:
    text, where = PLACES[place]
    path = write(directory, text.format(source=source))
    said = (
        f"c.yaml:{where}: {source} is no GGUF file, and llama_cpp reads nothing else. Name one (hf:ORG/NAME/FILE.gguf"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(path)


def test_a_standby_of_a_directory_is_refused_too(directory: Path) -> None:
    text = "model: {source: tiny}\nfailover:\n  standby: [{device: CPU}, {adapter: llama_cpp}]\n"
    with pytest.raises(ConfigError, match=r"c\.yaml:3: failover\.standby\[1\]\.adapter: tiny is no GGUF file"):
        load_config(write(directory, text))


@pytest.mark.parametrize("place", PLACES)
def test_a_gguf_file_passes(directory: Path, place: str) -> None:
    load_config(write(directory, PLACES[place][0].format(source="tiny.gguf")))


def test_a_directory_that_reaches_the_runtime_all_the_same_is_refused(directory: Path) -> None:
    with pytest.raises(ModelRefused, match="tiny is no GGUF file, and llama_cpp reads nothing else"):
        registry.get("llama_cpp").prepare(directory / "tiny", directory, lambda stage, done: None)


def test_what_plans_choose_from_has_the_runtime_for_files_alone(directory: Path) -> None:
    pytest.importorskip("ik_llama_cpp", reason="it is not installed: outrider extras install llama")
    with pytest.raises(Unsupported, match="tiny is no GGUF file, and llama_cpp reads nothing else"):
        list_work(load_config(write(directory, "model: {source: tiny}\n")), directory, ["llama_cpp"])
    chosen = {}
    for source in ("tiny", "tiny.gguf"):
        text = f"model: {{source: {source}, adapter: auto}}\nstore: {{directory: {directory}/store}}\n"
        config = load_config(write(directory, text))
        chosen[source] = {work.job.model.adapter for work in list_work(config, directory)}
    assert chosen["tiny.gguf"] - chosen["tiny"] == {"llama_cpp", "openvino_llama"}


def test_a_draft_is_measured_wherever_its_target_is(directory: Path) -> None:
    """A draft model that reads by OpenVINO and drafts by llama.cpp among them."""
    pytest.importorskip("ik_llama_cpp", reason="it is not installed: outrider extras install llama")
    text = (
        "model: {source: tiny.gguf, adapter: auto}\n"
        "drafts: [{method: model, source: tiny.gguf, adapter: auto}]\n"
        f"store: {{directory: {directory}/store}}\n"
    )
    places: dict[str, set[tuple[str, str]]] = {"target": set(), "draft": set()}
    for work in list_work(load_config(write(directory, text)), directory):
        places[work.job.role].add((work.job.model.adapter, work.job.model.device))
    assert places["draft"] == places["target"]
    assert "openvino_llama" in {adapter for adapter, _ in places["draft"]}


def test_a_processor_that_the_library_is_not_built_for_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ik_llama_cpp", reason="it is not installed: outrider extras install llama")
    told = tmp_path / "cpuinfo"
    told.write_text("processor : 0\nflags : fpu sse2 avx f16c\n")
    monkeypatch.setattr(cpuinfo, "_CPUINFO", told)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for ask in (ForkLibrary, lambda: check_device("llama_cpp", "CPU")):
        with pytest.raises(AdapterUnavailable, match="is built for processors with avx2, fma, which this one has not"):
            ask()
    told.write_text("processor : 0\n")  # it does not tell what it has
    assert check_device("llama_cpp", "CPU") == "ik_llama_cpp is installed"
