"""`outrider models check`: what it says of a model is what the load would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adapters.contract import ModelRefused
from adapters.model_source import check_source
from adapters.names import CONVERTING_ADAPTERS, LLAMA_CPP, OWN_ADAPTERS
from orchestrator.cli.models import app
from orchestrator.config.load import load_text
from tests.support import tiny_models
from tests.support.conformance import NO_FORK
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_llama_files import write_llama_file

RUNTIMES = [name for name in OWN_ADAPTERS if name != "simulated"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, without a cluster.yaml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str, code: int = 0) -> dict[str, Any]:
    """What the command says, as JSON."""
    result = CliRunner().invoke(app, ["check", "--json", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refusals_of(answer: dict[str, Any]) -> dict[str, str]:
    return {verdict["runtime"]: verdict["refusal"] for verdict in answer["runtimes"]}


def refuse(source: str, base: Path, adapter: str, **use: bool) -> str:
    """What the load says first; "" where it goes on."""
    try:
        check_source(source, base, adapter, **use)
    except ModelRefused as error:
        return str(error)
    return ""


@NO_FORK
def test_each_runtime_refuses_in_the_words_of_its_load(directory: Path) -> None:
    source = write_llama_file(directory, "qwen3moe").name
    answer = check(source)
    assert refusals_of(answer) == {name: refuse(source, directory, name) for name in RUNTIMES}
    assert [name for name, why in refusals_of(answer).items() if not why] == [LLAMA_CPP]
    assert (answer["architecture"], answer["format"]) == ("qwen3moe", "GGUF Q8_0")
    assert answer["context_tokens"] == answer["text_tokens"] == 2048
    assert answer["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # bytes, sides, heads, elements, layers
    weights = {verdict["runtime"]: verdict["weights_bytes"] for verdict in answer["runtimes"]}
    assert weights == {name: (directory / source).stat().st_size if name == LLAMA_CPP else None for name in RUNTIMES}
    assert load_text(answer["cluster_yaml"], directory / "cluster.yaml").model.adapter == "auto"


def test_a_directory_is_for_the_runtimes_that_convert(directory: Path) -> None:
    tiny_models.write_model(directory / "m", "qwen3", kind="BF16")
    answer = check("m")
    assert refusals_of(answer) == {name: refuse("m", directory, name) for name in RUNTIMES}
    assert refusals_of(answer)[LLAMA_CPP].startswith("m is no GGUF file")
    assert (answer["architecture"], answer["format"]) == ("Qwen3ForCausalLM", "safetensors")
    loading = {verdict["runtime"] for verdict in answer["runtimes"] if verdict["loads"]}
    assert loading <= set(CONVERTING_ADAPTERS)
    config = load_text(answer["cluster_yaml"], directory / "cluster.yaml")
    assert (config.model.source, config.model.adapter in loading) == (str(directory / "m"), True)


def test_where_no_runtime_loads_it_the_command_fails_and_says_why(directory: Path) -> None:
    write(directory / "m.gguf", Tiny("t5"))
    answer = check("m.gguf", code=1)
    assert (answer["loads"], answer["parameters"], answer["cluster_yaml"]) == (False, None, "")
    assert all("encoder before it writes" in why for why in refusals_of(answer).values())
    shown = CliRunner().invoke(app, ["check", "m.gguf"])
    assert (shown.exit_code, "cluster.yaml" in shown.output) == (1, False)


def test_drafts_are_those_of_the_file_and_those_that_are_named(directory: Path) -> None:
    (directory / "named").mkdir()
    (directory / "configured").mkdir()
    target = tiny_models.write_model(directory / "m", "llama3")
    write(directory / "named" / "other.gguf", Tiny("llama", words=("a", "b", "c", "ab"), vocabulary=4))
    tiny_models.write_model(directory / "configured" / "d", "qwen3")
    config = directory / "configured" / "cluster.yaml"
    config.write_text("model: {source: d}\ndrafts: [{method: suffix}, {method: model, source: d}]\n")
    arguments = ["m", "--draft", "named/other.gguf", "--draft", "m", "--config", str(config)]
    other, same, configured = check(*arguments)["drafts"]
    assert (other["fits"], other["match"]) == (False, "differs")
    assert "the target's vocabulary has 320 tokens and the draft's 4" in other["refusal"]
    assert (same["fits"], configured["fits"], configured["match"]) == (True, True, "identical")
    lines = load_text(check(*arguments)["cluster_yaml"], directory / "cluster.yaml")
    assert [draft.method for draft in lines.drafts] == ["suffix", "model"]
    assert lines.drafts[1].source == str(target)  # type: ignore[union-attr]
    shown = CliRunner().invoke(app, ["check", *arguments]).output
    assert "named/other.gguf" in shown
    assert "method: suffix" in shown


@NO_FORK
def test_a_state_cannot_be_taken_back_so_no_draft_fits(directory: Path) -> None:
    source = write_llama_file(directory, "qwen35").name
    answer = check(source, "--draft", source)
    assert "cannot be taken back" in answer["no_drafts"]
    assert [draft["refusal"] for draft in answer["drafts"]] == [answer["no_drafts"]]
    assert answer["state_bytes"] > 0
    assert load_text(answer["cluster_yaml"], directory / "cluster.yaml").model.adapter == "auto"


def test_what_is_not_there_is_one_line(directory: Path) -> None:
    result = CliRunner().invoke(app, ["check", "nowhere.gguf"])
    assert isinstance(result.exception, ModelRefused)
    assert "there is no nowhere.gguf" in str(result.exception)
