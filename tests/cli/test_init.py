"""`outrider init`: what it proposes for models and servers that are here, and that what it writes is served."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from adapters.local_models import OLLAMA, LocalModel
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import load_config, load_text
from orchestrator.setup import servers
from orchestrator.setup.servers import find_servers, list_usual_urls
from tests.cli.test_first_steps import read_until
from tests.support.conformance import NO_FORK
from tests.support.daemon import running
from tests.support.fake_engines import OLLAMA as OLLAMA_ROUTES
from tests.support.fake_engines import VLLM, list_models, running_engine, say
from tests.support.llama_server import running_llama_server
from tests.support.local_models import write_hub_model, write_ollama_model
from tests.support.tiny_gguf import Tiny, write
from tests.support.vocabularies import LETTERS


def write_model(path: Path, layers: int, words: tuple[str, ...] = (*LETTERS, "th", "he")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny = Tiny("llama", layers=layers, words=words, vocabulary=len(words))
    write(path, tiny, {"general.type": "model", "general.name": path.stem})
    return path


def propose(outrider: Any, *arguments: object) -> dict[str, Any]:
    done = outrider("init", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@NO_FORK
def test_target_and_draft_are_chosen_by_size_and_vocabulary(outrider: Any, home: Path) -> None:
    models = home / "models"
    big, small = write_model(models / "big.gguf", 12), write_model(models / "small.gguf", 2)
    write_model(models / "other.gguf", 1, (*LETTERS, "in"))
    write(models / "t5.gguf", Tiny("t5"))
    answer = propose(outrider, "--models", models)
    assert (answer["target"], answer["draft"], answer["written"]) == (str(big), str(small), False)
    assert not (home / "cluster.yaml").exists()
    listed = {model["name"]: model for model in answer["models"]}
    assert "encoder before it writes" in listed["t5.gguf"]["problem"]
    assert all(listed[name]["tokens_per_s"] > 0.0 for name in ("big.gguf", "small.gguf", "other.gguf"))
    assert listed["big.gguf"]["memory_bytes"] > listed["small.gguf"]["memory_bytes"] > 0
    config = load_text(answer["cluster_yaml"], home / "cluster.yaml")
    assert [draft.source for draft in config.drafts if isinstance(draft, ModelDraft)] == [str(small)]
    assert propose(outrider, "--models", models, "--model", "other.gguf")["draft"] is None
    refused = outrider("init", "--json", "--models", models, "--model", "t5.gguf")
    assert refused.returncode == 1
    assert refused.stderr.startswith("outrider: --model t5.gguf: ")


@NO_FORK
def test_a_front_is_written_with_the_port_that_others_join(outrider: Any, home: Path) -> None:
    write_model(home / "models" / "m.gguf", 2)
    answer = propose(outrider, "--models", home / "models", "--front", "127.0.0.1")
    cluster = load_text(answer["cluster_yaml"], home / "cluster.yaml").cluster
    assert (cluster.address, cluster.head) == ("127.0.0.1:6379", True)
    assert "outrider join 127.0.0.1:6379" in answer["cluster_yaml"]
    refused = outrider("init", "--json", "--front", "127.0.0.1", "--hosts", "auto")
    assert "give one of them" in refused.stderr


@NO_FORK
def test_models_of_other_programs_are_served_from_where_they_lie(outrider: Any, home: Path) -> None:
    content = write_model(home / "made.gguf", 2).read_bytes()
    blob = write_ollama_model(home / ".ollama" / "models", "tiny:1b", content)
    write_hub_model(home / "hub", "org/tiny-GGUF", {"tiny-Q8_0.gguf": content[:-32] + bytes(32)})
    studio = write_model(home / ".lmstudio" / "models" / "org" / "tiny" / "tiny.gguf", 3)
    answer = propose(outrider, "--model", "tiny:1b")
    sources = {model["source"]: model for model in answer["models"]}
    assert list(sources) == ["hf:org/tiny-GGUF/tiny-Q8_0.gguf", str(blob), str(studio)]
    assert {model["problem"] for model in sources.values()} == {""}
    written = load_text(answer["cluster_yaml"], home / "cluster.yaml").model
    assert (written.source, written.name, written.adapter) == (str(blob), "tiny:1b", "auto")
    assert propose(outrider)["target"] == str(studio)
    by_hub = propose(outrider, "--model", "org/tiny-GGUF/tiny-Q8_0.gguf")
    assert load_text(by_hub["cluster_yaml"], home / "cluster.yaml").model.source == "hf:org/tiny-GGUF/tiny-Q8_0.gguf"


@NO_FORK
@pytest.mark.model
def test_what_it_writes_is_checked_and_serves(outrider: Any, home: Path, first_layers_path: Path) -> None:
    models = home / "models"
    models.mkdir()
    (models / "smol.gguf").symlink_to(first_layers_path)
    done = outrider("init", "--yes", "--models", models)
    assert done.returncode == 0, done.stderr
    assert "outrider serve --config cluster.yaml" in done.stdout
    path = home / "cluster.yaml"
    text = path.read_text()
    assert set(yaml.safe_load(text)) == {"model"}
    assert "# Predicted: " in text
    assert outrider("config", "check", path).returncode == 0
    assert "name another --output" in outrider("init", "--yes", "--models", models).stderr
    assert path.read_text() == text
    assert "replaced" in outrider("init", "--yes", "--overwrite", "--models", models).stdout
    own = f"api: {{port: 0, admin_socket: '{home}/admin.sock'}}\njournal: {{reserve: 1 MiB}}\n"
    path.write_text(f"{text}{own}")
    with running(path) as daemon:
        client: OpenAI = daemon.client
        answer = client.completions.create(model=client.models.list().data[0].id, prompt="The sea", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


@NO_FORK
@pytest.mark.model
def test_a_llama_server_is_proposed_by_its_files_and_taken_where_it_is_named(
    outrider: Any, home: Path, first_layers_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    models = home / "models"
    models.mkdir()
    (models / "smol.gguf").symlink_to(first_layers_path)
    write_model(models / "other.gguf", 1)
    with running_llama_server(first_layers_path, home) as server:
        monkeypatch.setattr(servers, "USUAL_PORTS", {server.port: "llama-server"})
        (listed,) = propose(outrider, "--models", models)["servers"]
        assert listed["title"].startswith("llama-server")
        assert (listed["can_be_member"], listed["slots"]) == (True, 2)
        assert listed["models"][0]["source"] == str(models / "smol.gguf")
        wrong = outrider("init", "--json", "--models", models, "--model", "other.gguf", "--member", server.url)
        assert "does not serve other.gguf" in wrong.stderr
        done = outrider("init", "--yes", "--models", models, "--model", "smol.gguf", "--member", server.url)
        assert done.returncode == 0, done.stderr
        model = load_config(home / "cluster.yaml").model
        assert [getattr(replica, "endpoint", "") for replica in model.placements] == ["", server.url]
        assert outrider("config", "check", home / "cluster.yaml").returncode == 0
        stands_in = propose(outrider, "--models", models, "--instead-of", server.url)
    config = load_text(stands_in["cluster_yaml"], home / "cluster.yaml")
    assert (config.api.port, config.model.source) == (server.port, str(models / "smol.gguf"))
    gone = outrider("init", "--json", "--models", models, "--member", server.url)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"outrider: --member {server.url}: ")


def test_servers_are_known_by_what_they_have_and_not_by_names_alone(tmp_path: Path) -> None:
    local = LocalModel(str(tmp_path / "blob"), OLLAMA, "m:latest", tmp_path / "blob", 1)
    namesake = LocalModel(str(tmp_path / "m"), "elsewhere", "m", tmp_path / "m", 1)
    hub = LocalModel("hf:org/m", "the Hugging Face cache", "org/m", tmp_path / "hub", 1)
    ollama = {**OLLAMA_ROUTES, "/v1/models": list_models(id="m:latest", owned_by="library")}
    own = {"/v1/models": list_models(owned_by="outrider")}
    keyed, page = {"/v1/models": say({"error": "no key"}, 401)}, {"/": say("a web page")}
    with running_engine(keyed) as locked, running_engine(page) as other:
        (server,) = find_servers([locked.url, other.url], [])
    assert (server.url, bool(server.members), bool(server.problem)) == (locked.url, False, True)
    with running_engine(ollama) as first, running_engine(VLLM) as second, running_engine(own) as third:
        urls = [engine.url for engine in (first, second, third)]
        matches = find_servers(urls, [namesake, local, hub])
        strangers = find_servers(urls, [namesake])
    assert [server.models[0].model for server in matches] == [local, hub, None]
    assert [bool(server.members) for server in matches] == [True, True, False]
    assert [server.title for server in matches] == ["Ollama 0.33.0", "vLLM 0.33.0", "Outrider"]
    assert not any(server.members for server in strangers)
    assert not find_servers(urls, [local])
    assert list_usual_urls(["10.0.0.1", "::1"])[::3] == ["http://10.0.0.1:8080", "http://[::1]:8080"]


@NO_FORK
def test_without_a_model_or_a_terminal_it_says_what_to_do(outrider: Any, home: Path) -> None:
    nothing = outrider("init", "--yes")
    assert nothing.returncode == 1
    assert "there is no model here: name a folder with --models" in nothing.stderr
    absent = outrider("init", "--yes", "--models", home / "nowhere")
    assert absent.stderr == f"outrider: --models {home / 'nowhere'}: there is no such file or folder\n"
    assert outrider("init").returncode == 2
    assert not (home / "cluster.yaml").exists()


@NO_FORK
def test_on_a_terminal_it_asks(home: Path) -> None:
    models = home / "models"
    write_model(models / "a.gguf", 2)
    write_model(models / "b.gguf", 12)
    (home / "cluster.yaml").write_text("mine\n")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "orchestrator.cli.main", "init", "--models", str(models)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        try:
            shown = read_until(ours, b"number").decode()
            assert "tokens/s (an" in shown
            os.write(ours, b"2\n")
            read_until(ours, b"Draft with a.gguf?")
            os.write(ours, b"n\n")
            read_until(ours, b"Go on?")
            os.write(ours, b"y\n")
            read_until(ours, b"outrider serve --config cluster.yaml")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    written = yaml.safe_load((home / "cluster.yaml").read_text())
    assert written == {"model": {"source": str(models / "b.gguf"), "adapter": "auto", "device": "auto"}}
