"""Several models behind the endpoint of one daemon: each is chosen by its name, and none pays for another."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_killed import wait_until_ended
from tests.support import tiny_models
from tests.support.cut_streams import BODY, Client, kill_in_mid_stream
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.profiles import store_simulated_profiles

NAMES = ("toy", "other")
ASK: dict[str, Any] = {"prompt": "the sea is", "max_tokens": 100, "temperature": 0.8, "seed": 3}
LONG = BODY | {"max_tokens": 150}


def write_two(
    directory: Path, *, script: str = "base_ms=10", further: str = "", runtime: str = "local", extra: str = ""
) -> Path:
    """A file with two models. The second says other tokens, and its workers have other limits."""
    models = (
        f"models:\n  - source: 'simulated:toy?shift=3&{script}'\n    adapter: simulated\n    name: other\n"
        f"    max_running: 3\n{further}"
    )
    return configuration(directory, script=script, runtime=runtime, extra=f"{models}{extra}")


def text_of(daemon: Daemon, name: str) -> str:
    asked = ASK | {"model": name, "extra_body": {"ignore_eos": True}}
    return str(daemon.client.completions.create(**asked).choices[0].text)


def statuses(daemon: Daemon) -> dict[str, dict[str, Any]]:
    found = daemon.status()
    return {one["model"]: one for one in (found, *found["models"])}


def pids(daemon: Daemon) -> dict[str, int]:
    return {name: one["ready"]["pid"] for name, one in statuses(daemon).items()}


def until_ready(daemon: Daemon, name: str) -> None:
    deadline = time.monotonic() + 240
    while statuses(daemon)[name]["phase"] != "ready":
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(write_two(tmp_path_factory.mktemp("models"))) as daemon:
        yield daemon


def test_each_answers_by_its_name_and_says_what_it_would_say_alone(daemon, plain, tmp_path):
    assert text_of(daemon, "toy") == text_of(plain, "toy")
    other = text_of(daemon, "other")
    assert other != text_of(daemon, "toy")
    alone = configuration(tmp_path, script="shift=3", extra="drafts: []")
    alone.write_text(alone.read_text().replace("name: toy", "name: other"))
    with running(alone) as single:
        assert text_of(single, "other") == other


def test_chat_and_tokens_go_to_the_model_that_is_named(daemon):
    messages: Any = [{"role": "user", "content": "the sea"}]
    told = {
        name: daemon.client.chat.completions.create(model=name, messages=messages, max_tokens=20, seed=1)
        for name in NAMES
    }
    assert [told[name].model for name in NAMES] == list(NAMES)
    assert told["toy"].choices[0].message.content != told["other"].choices[0].message.content
    assert told["toy"].system_fingerprint != told["other"].system_fingerprint
    for name in NAMES:
        tokens = httpx.post(f"{daemon.url}/tokenize", json={"model": name, "prompt": "sea"}).json()
        text = httpx.post(f"{daemon.url}/detokenize", json={"model": name, "tokens": tokens["tokens"]}).json()
        assert "sea" in text["prompt"]
    unknown = httpx.post(f"{daemon.url}/tokenize", json={"model": "third", "prompt": "sea"})
    assert unknown.status_code == httpx.codes.NOT_FOUND


def test_the_list_has_every_model_and_an_unknown_name_is_told_all_of_them(daemon):
    assert [one.id for one in daemon.client.models.list()] == list(NAMES)
    for name in NAMES:
        assert daemon.client.models.retrieve(name).id == name
    for ask in (
        lambda: daemon.client.models.retrieve("third"),
        lambda: daemon.client.completions.create(model="third", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert "there is no model 'third' here; there are 'toy' and 'other'" in str(refused.value)
        assert refused.value.code == "model_not_found"


def test_metrics_and_status_tell_the_models_apart(daemon, outrider):
    for name in NAMES:
        text_of(daemon, name)
    text = httpx.get(f"{daemon.url}/metrics").text
    for name in NAMES:
        assert f'outrider_request_success_total{{engine="0",finished_reason="length",model_name="{name}"}}' in text
        assert f'outrider_kv_cache_usage_perc{{engine="0",model_name="{name}"}}' in text
    heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)), "no family stands twice"
    assert text.count("outrider_api_body_bytes{") == 1, "bodies are everybody's"
    found = statuses(daemon)
    assert [found[name]["ready"]["model"] for name in NAMES] == list(NAMES)
    assert [found[name]["ready"]["slots"] for name in NAMES] == [16, 3]
    shown = outrider("status", "--socket", str(daemon.admin)).stdout
    for name in NAMES:
        assert f": {name}" in shown
        assert f"local pid {found[name]['ready']['pid']}" in " ".join(shown.split())


def test_operators_commands_reach_the_model_that_they_name(daemon, outrider):
    socket = ("--socket", str(daemon.admin))
    assert outrider("speculation", "off", "--model", "other", *socket).returncode == 0
    found = statuses(daemon)
    assert not found["toy"]["speculation"]["engines"]
    assert len(found["other"]["speculation"]["engines"]) == 1
    refused = outrider("speculation", "off", "--engine", "0", *socket)
    assert refused.returncode == 1
    assert "say which with --model (toy, other)" in refused.stderr
    assert outrider("speculation", "reset", *socket).returncode == 0
    assert not statuses(daemon)["other"]["speculation"]["engines"]
    for name in NAMES:
        answer = daemon.client.completions.create(**ASK, model=name)
        told = json.loads(outrider("explain", answer.id, "--json", *socket).stdout)
        assert told["model"] == name
    refused = outrider("cordon", "worker", "target", *socket)
    assert "say which with --model" in refused.stderr
    assert outrider("cordon", "worker", "target", "--model", "other", *socket).returncode == 0
    with pytest.raises(openai.InternalServerError) as away:
        text_of(daemon, "other")
    assert away.value.response.headers["Retry-After"]
    text_of(daemon, "toy")
    assert outrider("uncordon", "worker", "target", "--model", "other", *socket).returncode == 0
    text_of(daemon, "other")
    refused = outrider("health", "--model", "third", *socket)
    assert "there is no model 'third'" in refused.stderr


def test_a_batch_may_name_each_model_in_its_lines(daemon):
    lines = [
        {"custom_id": f"{name}-{number}", "method": "POST", "url": "/v1/completions", "body": ASK | {"model": name}}
        for number, name in enumerate([*NAMES, *NAMES, "third"])
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = daemon.client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
    batch = daemon.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + 240
    while (batch := daemon.client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert batch.output_file_id is not None
    answers = [json.loads(line) for line in daemon.client.files.content(batch.output_file_id).text.splitlines()]
    told = {one["custom_id"]: one["response"]["body"] for one in answers}
    assert {name: told[name]["model"] for name in told} == {
        "toy-0": "toy",
        "other-1": "other",
        "toy-2": "toy",
        "other-3": "other",
    }
    assert told["toy-0"]["choices"][0]["text"] != told["other-1"]["choices"][0]["text"]
    assert batch.error_file_id is not None
    (bad,) = [json.loads(line) for line in daemon.client.files.content(batch.error_file_id).text.splitlines()]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("third-4", 404)


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_killed_worker_of_one_costs_the_other_nothing_and_its_own_streams_a_pause(tmp_path, runtime):
    config = write_two(tmp_path, script="base_ms=15", runtime=runtime)
    with running(config) as daemon:
        plain = {name: Client("/v1/completions", LONG | {"model": name}) for name in NAMES}
        for client in plain.values():
            client.read(daemon.url)
        clients = {name: Client("/v1/completions", LONG | {"model": name}) for name in NAMES}
        threads = [threading.Thread(target=client.read, args=(daemon.url,)) for client in clients.values()]
        for thread in threads:
            thread.start()
        until_begun(clients.values())
        before = pids(daemon)
        os.kill(before["other"], signal.SIGKILL)
        for thread in threads:
            thread.join(240)
        for name in NAMES:
            assert clients[name].done
            assert clients[name].texts == plain[name].texts
        until_ready(daemon, "other")
        after = statuses(daemon)
        assert after["toy"]["ready"]["pid"] == before["toy"]
        assert {name: after[name]["totals"]["restarts"] for name in NAMES} == {"toy": 0, "other": 1}
        assert daemon.stop() == 0


def until_begun(clients: Any, events: int = 3) -> None:
    deadline = time.monotonic() + 240
    while any(len(client.ids) < events for client in clients):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_while_one_is_down_the_other_serves_and_probes_say_which(tmp_path):
    config = write_two(tmp_path, script="load_ms=2500")
    with running(config) as daemon:
        before = pids(daemon)
        os.kill(before["other"], signal.SIGKILL)
        saw_down = False
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            phases = httpx.get(f"{daemon.url}/health").json()["models"]
            assert phases["toy"] == "ready"
            assert httpx.get(f"{daemon.url}/ready").status_code == httpx.codes.OK
            if phases["other"] != "ready":
                saw_down = True
                assert httpx.get(f"{daemon.url}/ready", params={"model": "toy"}).status_code == httpx.codes.OK
            elif saw_down:
                break
            text_of(daemon, "toy")
        assert saw_down
        assert httpx.get(f"{daemon.url}/ready", params={"model": "third"}).status_code == httpx.codes.NOT_FOUND


def test_a_model_that_never_loads_answers_503_and_the_rest_serves(tmp_path):
    broken = "  - {source: 'simulated:toy?nonsense=1', adapter: simulated, name: broken}\n"
    config = write_two(tmp_path, further=broken, script="base_ms=1")
    with running(config) as daemon:
        assert statuses(daemon)["broken"]["phase"] == "failed"
        for name in NAMES:
            text_of(daemon, name)
        with pytest.raises(openai.InternalServerError) as failed:
            text_of(daemon, "broken")
        assert failed.value.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert failed.value.response.headers["Retry-After"]
        assert httpx.get(f"{daemon.url}/health").json()["models"]["broken"] == "failed"
        assert httpx.get(f"{daemon.url}/health", params={"model": "broken"}).status_code == 503
        assert daemon.stop() == 0
    log = config.with_suffix(".log").read_text()
    assert "a model has failed" in log


def test_the_daemon_ends_where_no_model_can_serve(tmp_path):
    config = write_two(tmp_path, script="nonsense=1")
    ended = outrider_process("serve", "--config", str(config))
    assert ended.returncode == 1
    assert "toy: " in ended.stderr
    assert "other: " in ended.stderr


def test_a_killed_daemons_workers_are_adopted_and_its_streams_go_on_each_with_its_model(tmp_path):
    config = write_two(tmp_path, script="base_ms=20", further="    drafts: []\n", extra="drafts: []\n")
    with running(config) as first:
        plain = {name: Client("/v1/completions", LONG | {"model": name}) for name in NAMES}
        for client in plain.values():
            client.read(first.url)
        clients = [Client("/v1/completions", LONG | {"model": name}, key=f"k-{name}") for name in NAMES]
        before = pids(first)
        kill_in_mid_stream(first, clients, 8)
        assert not any(client.done for client in clients)
    with running(config) as second:
        assert pids(second) == before, "each has its own worker again"
        for name, client in zip(NAMES, clients, strict=True):
            client.read(second.url)
            assert client.texts == plain[name].texts
            assert len(client.ids) == len(set(client.ids))
        assert second.stop() == 0
    wait_until_ended(list(before.values()))


def test_answers_of_a_model_that_the_file_has_no_more_do_not_go_on(tmp_path):
    config = write_two(tmp_path, script="base_ms=20", further="    drafts: []\n", extra="drafts: []\n")
    with running(config) as first:
        clients = {name: Client("/v1/completions", LONG | {"model": name}, key=name) for name in NAMES}
        before = pids(first)
        kill_in_mid_stream(first, list(clients.values()), 5)
    config.write_text(config.read_text().replace("name: other", "name: renamed"))
    with running(config) as second:
        found = statuses(second)
        assert found["toy"]["ready"]["pid"] == before["toy"]
        assert found["renamed"]["ready"]["pid"] != before["other"]
        clients["other"].read(second.url)
        assert clients["other"].statuses == [200, 404]
        clients["toy"].read(second.url)
        assert clients["toy"].done
        assert statuses(second)["renamed"]["totals"]["generated"] == 0
    wait_until_ended(list(before.values()))


def test_models_of_other_runtimes_and_vocabularies_stand_side_by_side(tmp_path):
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    further = "  - {source: tiny, name: tiny, activations: fp32, kv_cache: 16 MiB, max_running: 2}\n"
    with running(write_two(tmp_path, further=further, script="base_ms=1")) as daemon:
        found = statuses(daemon)
        assert found["tiny"]["ready"]["adapter"] == "openvino_rt"
        sizes = {name: found[name]["ready"]["vocabulary_size"] for name in ("toy", "tiny")}
        assert sizes["toy"] != sizes["tiny"]
        tokens = {
            name: httpx.post(f"{daemon.url}/tokenize", json={"model": name, "prompt": "hello the hello"}).json()[
                "tokens"
            ]
            for name in ("toy", "tiny")
        }
        assert tokens["toy"] != tokens["tiny"]
        text = text_of(daemon, "toy")
        tiny = daemon.client.completions.create(model="tiny", prompt="hello the hello", max_tokens=8, temperature=0)
        assert tiny.usage is not None
        assert tiny.usage.prompt_tokens == len(tokens["tiny"])
        os.kill(found["tiny"]["ready"]["pid"], signal.SIGKILL)
        assert text_of(daemon, "toy") == text
        until_ready(daemon, "tiny")
        again = daemon.client.completions.create(model="tiny", prompt="hello the hello", max_tokens=8, temperature=0)
        assert again.choices[0].text == tiny.choices[0].text


@pytest.mark.slow
@pytest.mark.model
def test_the_package_model_twice_with_other_drafts(tmp_path, first_layers_path, shared_store):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{first_layers_path}', name: drafted, activations: fp32}}\ncluster: {{runtime: local}}\n"
        f"models: [{{source: '{first_layers_path}', name: bare, activations: fp32, drafts: [], kv_cache: 64 MiB}}]\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{shared_store}'}}\n"
        f"state: {{directory: '{tmp_path}/state'}}\nlimits: {{kv_cache: 128 MiB}}\n",
        encoding="utf-8",
    )
    with running(config) as daemon:
        asked: dict[str, Any] = {"prompt": "one two one two one two", "max_tokens": 40, "temperature": 0}
        told = {
            name: daemon.client.completions.create(model=name, **asked).choices[0].text for name in ("drafted", "bare")
        }
        assert told["drafted"] == told["bare"]
        found = statuses(daemon)
        assert [found[name]["ready"]["drafters"] for name in ("drafted", "bare")] == [["suffix"], []]
        assert found["bare"]["ready"]["kv_blocks"] < found["drafted"]["ready"]["kv_blocks"]


@pytest.mark.slow
def test_planned_models_are_placed_beside_each_other(tmp_path, monkeypatch, outrider):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    for name, script in (("toy", "base_ms=2"), ("other", "shift=3&base_ms=2")):
        store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 3.0}, name, script=script)
    config = write_two(tmp_path, script="base_ms=2", extra="placement: {profile: never, drift_tolerance: 9}\n")
    config.write_text(config.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    config.write_text(config.read_text().replace("    adapter: simulated\n", "    adapter: auto\n    device: auto\n"))
    with running(config) as daemon:
        found = statuses(daemon)
        assert {name: found[name]["ready"]["device"] for name in NAMES} == {"toy": "SIM", "other": "SIM.1"}
        before = pids(daemon)
        assert text_of(daemon, "toy") != text_of(daemon, "other")
        plans = [query_daemon(daemon.admin, f"/admin/plan?model={name}")["plan"] for name in NAMES]
        assert [plan["replicas"][0]["shards"][0]["device"] for plan in plans] == ["here/SIM", "here/SIM.1"]
        for name in NAMES:
            shown = outrider("plan", "diff", "--model", name, "--config", str(config)).stdout
            assert "nothing would change" in shown
        text = httpx.get(f"{daemon.url}/metrics").text
        for name in NAMES:
            assert f'outrider_plan_predicted_tokens_per_second{{engine="0",model_name="{name}"}}' in text
        daemon.kill()
    with running(config) as second:
        assert pids(second) == before, "the same plans adopt the same workers"
