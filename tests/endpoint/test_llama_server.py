"""A real llama-server as a replica of a real daemon, alone and beside a worker of ours."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from adapters.tokenizer import load_tokenizer
from adapters.tokenizer_files import META_FILE
from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, running
from tests.support.llama_server import LlamaServer, running_llama_server
from tests.support.waiting import until

pytestmark = pytest.mark.model

MESSAGES: list[Any] = [{"role": "user", "content": "Write a long story about the sea. 🦜"}]


LONG = 120


def configure(directory: Path, store: Path, model: Path, replicas: str) -> Path:
    """Write a cluster.yaml over a model whose own workers are llama.cpp's, too."""
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: {model}, name: smol, adapter: llama_cpp, replicas: {replicas}}}\n"
        "limits: {kv_cache: 128 MiB, max_running: 4}\ndevices: {threads: 1}\nfailover: {after_s: 0.5}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\nlogging: {{format: json}}\ndrafts: []\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(first_layers_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with running_llama_server(first_layers_path, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def alone(
    server: LlamaServer, store: Path, first_layers_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon whose only replica is the server."""
    replicas = f"[{{endpoint: '{server.url}/v1'}}]"
    with running(configure(tmp_path_factory.mktemp("alone"), store, first_layers_path, replicas)) as daemon:
        yield daemon


def encode_chat(store: Path) -> list[int]:
    return load_tokenizer(str(next(store.glob(f"*/*/{META_FILE}")).parent)).encode_chat(MESSAGES)


def decode_alone(server: LlamaServer, ids: list[int], tokens: int) -> dict[str, Any]:
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "top_k": 1, "return_tokens": True}
    answer: dict[str, Any] = server.ask("/completion", {**body, "ignore_eos": True})
    return answer


def open_chat(daemon: Daemon, tokens: int = LONG) -> Any:
    return daemon.client.chat.completions.create(
        model="smol",
        messages=MESSAGES,
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def hold(daemon: Daemon, worker: str, state: str) -> None:
    query_daemon(daemon.admin, "/admin/hold", {"kind": "worker", "name": worker, "state": state})


def test_a_greedy_chat_is_the_servers_own_answer_to_our_tokens(alone: Daemon, server: LlamaServer, store: Path) -> None:
    body: dict[str, Any] = {"model": "smol", "messages": MESSAGES, "max_tokens": 60, "temperature": 0.0}
    answer = alone.client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    ready = alone.status()["replicas"][0]["ready"]
    assert (ready["adapter"], ready["device"]) == ("endpoint", f"{server.url}/v1")
    assert ready["device_name"].startswith("llama-server")
    ids = encode_chat(store)
    own = decode_alone(server, ids, 60)
    assert own["tokens_evaluated"] == len(ids)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 60)
    assert answer.choices[0].message.content == own["content"]


def test_a_client_that_leaves_frees_the_slot_there(alone: Daemon, server: LlamaServer) -> None:
    stream = open_chat(alone, 900)
    next(iter(stream))
    assert server.count_busy() == 1
    stream.close()
    until(lambda: not server.count_busy(), 60.0)


def test_what_the_server_does_not_do_is_refused_by_its_name(alone: Daemon) -> None:
    with pytest.raises(openai.BadRequestError, match="no replica serves a request with 'logprobs': target does not do"):
        alone.client.chat.completions.create(model="smol", messages=MESSAGES, max_tokens=4, logprobs=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        alone.client.completions.create(model="smol", prompt=[5] * 5000, max_tokens=4)


def test_schemas_bind_answers_there_and_stop_strings_end_them_here(alone: Daemon) -> None:
    schema = {"enum": ["sea", "land"]}
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    bound: dict[str, Any] = {"max_tokens": 400, "response_format": json_schema}
    body: dict[str, Any] = {"model": "smol", "messages": MESSAGES, "temperature": 0.0}
    answer = alone.client.chat.completions.create(**body, **bound).choices[0]
    assert (answer.finish_reason, json.loads(answer.message.content or "") in schema["enum"]) == ("stop", True)
    whole = alone.client.chat.completions.create(**body, max_tokens=60).choices[0].message.content or ""
    stop = whole[20:23]
    cut = alone.client.chat.completions.create(**body, max_tokens=60, stop=[stop]).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("stop", whole[: whole.index(stop)])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_stream_of_a_server_that_is_gone_goes_on_at_our_worker_and_says_so(
    tmp_path: Path, store: Path, default_model_path: Path, number: int
) -> None:
    with running_llama_server(default_model_path, tmp_path) as server:
        replicas = f"[{{}}, {{endpoint: '{server.url}/v1'}}]"
        with running(configure(tmp_path, store, default_model_path, replicas)) as daemon:
            until(lambda: [one["phase"] for one in daemon.status()["replicas"]] == ["ready", "ready"])
            hold(daemon, "target-0", "cordoned")
            ids = encode_chat(store)
            tokens = decode_alone(server, ids, LONG)["tokens"]
            text, usage, prints = "", None, []
            for count, chunk in enumerate(open_chat(daemon)):
                if count == 20:
                    hold(daemon, "target-0", "")
                    server.send_signal(number)
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                prints.append(chunk.system_fingerprint)
                usage = chunk.usage or usage
            assert usage is not None
            assert usage.completion_tokens == LONG
            [change] = usage.model_extra["system_fingerprints"]
            assert list(dict.fromkeys(prints))[1:] == [change["system_fingerprint"]]
            kept = change["from_token"]
            body = {"model": "smol", "prompt": [*ids, *tokens[:kept]], "max_tokens": LONG - kept, "temperature": 0.0}
            rest = daemon.client.completions.create(**body, extra_body={"ignore_eos": True})
            tokenizer = load_tokenizer(str(next(store.glob(f"*/*/{META_FILE}")).parent))
            assert text.startswith(tokenizer.decode(tokens[:kept]).rstrip("\ufffd"))
            assert text.endswith(rest.choices[0].text.lstrip("\ufffd"))
            server.send_signal(signal.SIGCONT) if number == signal.SIGSTOP else server.start()
            until(lambda: [one["phase"] for one in daemon.status()["replicas"]] == ["ready", "ready"])
