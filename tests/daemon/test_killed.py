"""SIGKILL of the daemon: its workers wait for the next one, and no stream loses or doubles anything."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest

from tests.daemon.test_plans import write_planned_config
from tests.support.cut_streams import (
    BODY,
    CHAT,
    Client,
    kill_in_mid_stream,
    read_on_alike,
    read_undisturbed,
    workers_of,
    workers_of_state,
)
from tests.support.daemon import Daemon, configuration, running
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import is_alive


def test_a_killed_daemon_is_followed_by_one_that_has_its_workers_and_its_streams(tmp_path):
    config = configuration(tmp_path, script="base_ms=20", replicas="2", extra="drafts: []")
    requests = [
        ("/v1/completions", BODY),
        ("/v1/completions", BODY | {"temperature": 0.0, "logprobs": 2}),
        ("/v1/completions", BODY | {"stop": ["zzzzz"], "prompt": "another"}),
        ("/v1/chat/completions", CHAT),
    ]
    with running(config) as first:
        plain = read_undisturbed(first, requests)
        # With a key or without one: the event's id is enough.
        clients = [Client(*request, key=f"k{index}" * (index % 2)) for index, request in enumerate(requests)]
        kill_in_mid_stream(first, clients, 8)
        pids = workers_of_state(tmp_path)
        assert len(pids) == 2
        assert not all(client.done for client in clients)
    with running(config) as second:
        assert sorted(workers_of(second)) == sorted(pids)
        read_on_alike(second, clients, plain)
        assert second.stop() == 0
    wait_until_ended(pids)


def wait_until_ended(pids: list[int]) -> None:
    """Whoever has adopted them in the system's own tree reaps them when it likes; a zombie has ended."""
    deadline = time.monotonic() + 120
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_answer_that_is_not_streamed_is_there_for_its_key(tmp_path):
    """What an ordinary client does: it sends the same request again."""
    config = configuration(tmp_path, script="base_ms=20", extra="drafts: []")
    headers = {"Idempotency-Key": "once"}
    with running(config) as first:
        expected = httpx.post(f"{first.url}/v1/completions", json=BODY, timeout=180).json()["choices"]
        ask = threading.Thread(target=_post, args=(f"{first.url}/v1/completions", headers))
        ask.start()
        first.wait_for("", streams=1)
        first.kill()
        ask.join(240)
    with running(config) as second:
        wait_for_tokens(second)  # it goes on before anybody asks
        answer = httpx.post(f"{second.url}/v1/completions", json=BODY, headers=headers, timeout=180).json()
        assert answer["choices"] == expected
        assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert second.status()["totals"]["generated"] <= BODY["max_tokens"]


def wait_for_tokens(daemon: Daemon) -> None:
    deadline = time.monotonic() + 120
    while not daemon.status()["totals"]["generated"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _post(url: str, headers: dict[str, str]) -> None:
    with suppress(httpx.TransportError):
        httpx.post(url, json=BODY, headers=headers, timeout=180)


def test_what_a_drain_cuts_off_goes_on_in_the_next_daemon(tmp_path):
    config = configuration(tmp_path, script="base_ms=15", extra="limits: {drain_timeout_s: 0.2}")
    with running(config) as first:
        plain = Client("/v1/completions", BODY)
        plain.read(first.url)
        client = Client("/v1/completions", BODY)
        client.read(first.url, events=10)
        assert first.stop() == 0
    with running(config) as second:
        client.read(second.url)
        assert client.texts == plain.texts


def test_a_draft_worker_is_adopted_too_and_drafts_for_its_target_again(tmp_path):
    drafts = "drafts: [{method: model, source: 'simulated:toy?', adapter: simulated, process: own}]\n"
    config = configuration(tmp_path, script="base_ms=10", extra=drafts)
    with running(config) as first:
        wait_for_draft(first)
        plain = Client("/v1/completions", BODY)
        plain.read(first.url)
        pids = workers_of(first)
        assert len(pids) == 2
        client = Client("/v1/completions", BODY)
        kill_in_mid_stream(first, [client], 5)
    with running(config) as second:
        wait_for_draft(second)
        assert workers_of(second) == pids
        client.read(second.url)
        assert client.texts == plain.texts
        before, deadline = asks_of(second), time.monotonic() + 120
        while asks_of(second) <= before:  # a draft that does not pay is asked now and then
            assert time.monotonic() < deadline
            Client("/v1/completions", BODY).read(second.url)


def wait_for_draft(daemon: Daemon) -> None:
    deadline = time.monotonic() + 120
    while not (drafts := daemon.status()["drafts"]) or drafts[0]["phase"] != "ready" or not asks_of(daemon):
        assert time.monotonic() < deadline
        Client("/v1/completions", BODY | {"max_tokens": 20}).read(daemon.url)


def asks_of(daemon: Daemon) -> int:
    """How often the target's worker asked its draft worker."""
    gauges = daemon.status()["replicas"][0]["gauges"]
    return sum(one["remote"]["asks"] for one in (gauges or {"drafters": []})["drafters"] if one["remote"])


def test_without_a_next_daemon_workers_end_and_a_stop_leaves_none(tmp_path):
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("runtime: local", "runtime: local, orphan_wait_s: 1"))
    with running(config) as daemon:
        (pid,) = workers_of(daemon)
        daemon.kill()
    wait_until_ended([pid])


def test_a_worker_that_is_still_loading_goes_on_loading_for_the_next_daemon(tmp_path):
    config = configuration(tmp_path, script="load_ms=3000")
    command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config)]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + 240
        while not (tmp_path / "state" / "workers").exists() or not (pids := workers_of_state(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.kill()
        first.wait()
    with running(config) as second:
        assert workers_of(second) == pids


def test_a_planned_worker_is_adopted_by_the_same_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 5.0}, script="base_ms=2")
    config = write_planned_config(tmp_path, "base_ms=2", "placement: {profile: never}")
    with running(config) as first:
        pids = workers_of(first)
        first.kill()
    with running(config) as second:
        assert workers_of(second) == pids


@pytest.mark.slow
@pytest.mark.model
def test_the_default_models_kernels_say_what_they_would_have_said(tmp_path, first_layers_path, shared_store):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{first_layers_path}', name: toy}}\ncluster: {{runtime: local}}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{shared_store}'}}\n"
        f"state: {{directory: '{tmp_path}/state'}}\nlimits: {{kv_cache: 256 MiB}}\n",
        encoding="utf-8",
    )
    asks = [BODY | {"max_tokens": 250, "temperature": temperature} for temperature in (0.0, 0.8)]
    with running(config) as first:
        plain = read_undisturbed(first, [("/v1/completions", ask) for ask in asks])
        pids = workers_of(first)
        clients = [Client("/v1/completions", ask, key=f"k{number}") for number, ask in enumerate(asks)]
        kill_in_mid_stream(first, clients, 6)
        assert not all(client.done for client in clients)
    begun_s = time.monotonic()
    with running(config) as second:
        ready_s = time.monotonic() - begun_s
        assert workers_of(second) == pids
        read_on_alike(second, clients, plain)
    assert ready_s < 60.0  # some 2 s on a machine that has nothing else to do
