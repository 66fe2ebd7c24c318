"""Models whose state cannot be rolled back have no drafts, whatever cluster.yaml says of them: it is told with its
line."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.contract import NO_REWIND
from adapters.llama_cpp.library import WrongLibrary
from adapters.model_checks import check_library
from orchestrator.config.load import list_draft_notes, load_config, parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.reload import FileStanding
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import draft_specs, engine_options
from orchestrator.planning.wanted import build_request_from_config
from tests.support.tiny_llama_files import RECURRENT, write_llama_file

DRAFTS = (
    "drafts:\n  - {method: suffix}\n  - {method: model, source: tiny-qwen3moe.gguf, adapter: llama_cpp, process: own}\n"
)


def load(directory: Path, text: str) -> tuple[ClusterConfig, list[str]]:
    path = directory / "cluster.yaml"
    path.write_text(text)
    config = load_config(path)
    return config, list_draft_notes(config, path, parse_config(text, path)[1])


def skip_without_its_library(file: Path) -> None:
    try:
        check_library(file)
    except WrongLibrary as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("adapter", ["llama_cpp", "auto"])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_configured_drafts_are_left_off_and_stay_in_the_file(tmp_path, architecture, adapter):
    file = write_llama_file(tmp_path, architecture)
    name = file.name
    skip_without_its_library(file)
    write_llama_file(tmp_path, "qwen3moe")
    head = f"model: {{source: {name}, adapter: {adapter}, device: CPU, name: tiny}}\n"
    config, notes = load(tmp_path, f"{head}{DRAFTS}canary: {{share: 0.1, speculation: {{method: fixed}}}}\n")
    assert notes == [f"{tmp_path}/cluster.yaml:2: drafts: left off: {NO_REWIND}. {name} is served without drafts"]
    [target] = config.targets
    assert target.no_drafts == NO_REWIND
    assert (target.drafts, target.canary.share, target.speculation.method) == ((), 0.0, "off")
    assert len(config.drafts) == 2
    options = engine_options(target, tmp_path)
    assert (options.drafters, options.canary, options.deepest) == ([], None, 0)
    assert draft_specs(options, target) == []
    assert build_request_from_config(target, tmp_path).no_drafts == NO_REWIND
    again, _ = FileStanding(tmp_path / "cluster.yaml", {"port": 0}).read()
    assert again.targets[0].no_drafts == NO_REWIND


def test_other_models_of_the_file_keep_theirs(tmp_path):
    name = write_llama_file(tmp_path, "qwen35").name
    text = (
        "model: {source: 'simulated:toy', adapter: simulated, name: first}\n"
        f"models:\n  - {{source: {name}, adapter: llama_cpp, name: second}}\n"
    )
    config, notes = load(tmp_path, text)
    first, second = config.targets
    assert (len(first.drafts), first.no_drafts, first.speculation.method) == (1, "", "auto")
    assert (second.drafts, second.no_drafts, second.number) == ((), NO_REWIND, 1)
    assert second.targets == (second,)
    assert [note.partition(": left off")[0] for note in notes] == [f"{tmp_path}/cluster.yaml:3: models[0].drafts"]


def test_nothing_is_told_where_nothing_is_left_off(tmp_path):
    name = write_llama_file(tmp_path, "qwen35").name
    config, notes = load(tmp_path, f"model: {{source: {name}, adapter: llama_cpp}}\ndrafts: []\n")
    assert (notes, config.targets[0].no_drafts) == ([], NO_REWIND)


def test_a_hybrid_cannot_draft(tmp_path):
    name = write_llama_file(tmp_path, "qwen35").name
    text = (
        "model: {source: 'simulated:toy', adapter: simulated}\n"
        f"drafts:\n  - method: model\n    source: {name}\n    adapter: llama_cpp\n"
    )
    with pytest.raises(ConfigError, match=r"cluster\.yaml:4: drafts\[0\]\.source: .*recurrent state.*cannot draft"):
        load(tmp_path, text)
