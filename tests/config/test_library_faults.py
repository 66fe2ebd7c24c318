"""A file that the library of llama.cpp here computes wrongly is refused at its line, and no plan takes it there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.contract import ModelRefused
from adapters.libllama import VARIABLE, LibraryPlace
from adapters.llama_cpp import library
from adapters.model_source import refuse_runtime
from orchestrator.cli.plan_table import print_proposal
from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.planning import build_local_request, propose_local
from orchestrator.errors import ConfigError
from orchestrator.planning.profiling.work import list_unfit, list_work
from tests.support.conformance import NO_FORK
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_llama_files import write_llama_file

pytestmark = NO_FORK
PLACES = {
    "model": ("model: {source: rope.gguf,\n adapter: llama_cpp}\n", "1: model.source"),
    "draft": (
        "model: {source: plain.gguf}\ndrafts:\n- {method: model, source: rope.gguf, adapter: llama_cpp}\n",
        "3: drafts[0].source",
    ),
    "standby": (
        "model: {source: rope.gguf}\nfailover:\n  standby: [{adapter: llama_cpp}]\n",
        "3: failover.standby[0].adapter",
    ),
}
SAID = (
    r"rope\.gguf: ik.* passes over rope_freqs\.weight\. Mainline llama\.cpp may run it: pip install xllamacpp\. "
    r"Or choose another adapter\."
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "find_any_mainline", lambda: None)
    plain = Tiny("llama", vocabulary=288, context=256)
    write(tmp_path / "rope.gguf", replace(plain, rope_factors=True))
    write(tmp_path / "plain.gguf", plain)
    return tmp_path


def write_config(directory: Path, text: str) -> Path:
    path = directory / "c.yaml"
    path.write_text(f"{text}store: {{directory: {directory / 'store'}}}\n")
    return path


@pytest.mark.parametrize("place", PLACES)
def test_it_is_refused_at_its_line_with_the_ways_out(directory: Path, place: str) -> None:
    text, where = PLACES[place]
    with pytest.raises(ConfigError, match=rf"c\.yaml:{re.escape(where)}: {SAID}"):
        load_config(write_config(directory, text))
    load_config(write_config(directory, text.replace("rope.gguf", "plain.gguf")))


@pytest.mark.parametrize("by", ["key", "variable"])
def test_with_a_library_of_ones_own_it_passes(directory: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    (directory / "libllama.so").write_bytes(b"of a build")
    text = PLACES["model"][0]
    if by == "variable":
        monkeypatch.setenv(VARIABLE, str(directory / "libllama.so"))
    else:
        monkeypatch.setenv(VARIABLE, "")  # given back behind the test, whatever the configuration names
        text += "adapters: {llama_cpp: {library: libllama.so}}\n"
    load_config(write_config(directory, text))
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match="passes over"):
        load_config(write_config(directory, PLACES["model"][0]))


def test_with_mainline_beside_it_passes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_any_mainline", lambda: LibraryPlace("xllamacpp", directory, "xllamacpp 1"))
    for text, _ in PLACES.values():
        load_config(write_config(directory, text))


def test_other_hosts_may_have_another_library(directory: Path) -> None:
    load_config(write_config(directory, f"{PLACES['model'][0]}cluster: {{runtime: ray, address: '10.0.0.1:6379'}}\n"))


def test_a_plan_leaves_it_out_and_says_why(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(write_config(directory, "model: {source: rope.gguf, adapter: auto, device: CPU}\n"))
    assert list(list_unfit(config, directory)) == ["llama_cpp"]
    assert {work.job.model.adapter for work in list_work(config, directory)} >= {"openvino_rt"}
    assert "llama_cpp" not in {work.job.model.adapter for work in list_work(config, directory)}
    with pytest.raises(ModelRefused, match=SAID):
        refuse_runtime("rope.gguf", directory, "llama_cpp")
    found = propose_local(config, directory, build_local_request(config, directory))
    assert found.plan.replicas[0].shards[0].runtime != "llama_cpp"
    print_proposal(found, [], explain=True)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"llama_cpp is left out there: {SAID}", said)


def test_a_plan_that_has_nothing_else_for_it_is_refused_at_the_line(directory: Path) -> None:
    write_llama_file(directory, "mixtral")
    with pytest.raises(ConfigError, match=r"c\.yaml:1: model\.source: tiny-mixtral\.gguf: ik.* loses what"):
        load_config(write_config(directory, "model: {source: tiny-mixtral.gguf, adapter: auto}\n"))


def test_a_plan_takes_what_the_library_computes(directory: Path) -> None:
    config = load_config(write_config(directory, "model: {source: plain.gguf, adapter: auto, device: CPU}\n"))
    assert list_unfit(config, directory) == {}
    assert {work.job.model.adapter for work in list_work(config, directory)} >= {"llama_cpp", "openvino_rt"}
