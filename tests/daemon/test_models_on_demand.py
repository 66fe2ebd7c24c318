"""Models that come and go in a real daemon: three of them, and memory for two."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.cut_streams import BODY, Client, kill_in_mid_stream
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.waiting import until

NAMES = ("toy", "second", "third")
AWAY = ("not loaded", "evicted")
ASK: dict[str, Any] = {"prompt": "the sea is", "max_tokens": 12, "temperature": 0.8, "seed": 3}
LONG = BODY | {"max_tokens": 300}


def write_three(
    directory: Path,
    *,
    script: str = "base_ms=2",
    keep: str = "on_demand",
    idle_s: float = 600.0,
    memory: str = "2.5 GiB",
) -> Path:
    """A file with three models of a GiB each, and memory for two."""
    terms = f"keep: {keep}, idle_s: {idle_s}"
    models = "models:\n" + "".join(
        f"  - {{source: 'simulated:toy?shift={3 + number}&{script}', adapter: simulated, name: {name}, drafts: [], "
        f"{terms}}}\n"
        for number, name in enumerate(NAMES[1:])
    )
    path = configuration(directory, script=script, extra=f"drafts: []\n{models}limits: {{models_memory: {memory}}}\n")
    path.write_text(path.read_text().replace("name: toy, replicas: 1", f"name: toy, {terms}"))
    return path


def residency(daemon: Daemon) -> dict[str, dict[str, Any]]:
    all_status = daemon.status()
    return {each["model"]: each["residency"] for each in (all_status, *all_status["models"])}


def states(daemon: Daemon) -> dict[str, str]:
    return {name: each["state"] for name, each in residency(daemon).items()}


def text_of(daemon: Daemon, name: str, **more: Any) -> str:
    answer = daemon.client.completions.create(**(ASK | more), model=name, extra_body={"ignore_eos": True})
    return str(answer.choices[0].text)


def test_a_model_is_loaded_by_its_first_request_and_unloaded_when_it_rests(tmp_path, outrider):
    with running(write_three(tmp_path, idle_s=1.0)) as daemon:
        assert set(states(daemon).values()) == {"not loaded"}
        entries = {each.id: each.model_dump() for each in daemon.client.models.list()}
        assert entries["second"]["state"] == "not loaded"
        first = text_of(daemon, "second")
        until(lambda: states(daemon)["second"] == "not loaded", 30)
        assert residency(daemon)["second"]["unloads"] == {"idle": 1}
        assert text_of(daemon, "second") == first, "it comes back as it was"
        assert states(daemon)["toy"] == "not loaded"
        tokens = httpx.post(f"{daemon.url}/tokenize", json={"model": "third", "prompt": "sea"}, timeout=60).json()
        assert tokens["tokens"]
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASK | {"model": "toy"}}
        file = daemon.client.files.create(file=("in.jsonl", json.dumps(line).encode() + b"\n"), purpose="batch")
        terms: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = daemon.client.batches.create(input_file_id=file.id, **terms)
        until(lambda: daemon.client.batches.retrieve(batch.id).status == "completed", 60)
        assert residency(daemon)["toy"]["loads"] == 1, "a batch has its model loaded, too"
        config = daemon.admin.parent / "cluster.yaml"
        config.write_text(config.read_text().replace("limits: {", "limits: {max_running: 3, "))
        assert outrider("reload", "--socket", str(daemon.admin)).returncode == 0
        assert text_of(daemon, "second") == first, "it is loaded by other options"
        slots = {each["model"]: each["ready"]["slots"] for each in daemon.status()["models"] if each["ready"]}
        assert slots["second"] == 3
        assert daemon.stop() == 0


def find_worker(daemon: Daemon, name: str) -> int:
    """The process of a model's worker, ready or not; 0 where it has none."""
    all_status = daemon.status()
    status = next(each for each in (all_status, *all_status["models"]) if each["model"] == name)
    _, _, pid = status["replicas"][0]["worker"].rpartition("pid ")
    return int(pid) if pid.isdecimal() and status["phase"] not in ("unloaded", "ready") else 0


def test_three_models_in_the_memory_of_two_answer_everything_while_workers_are_killed_as_they_load(tmp_path):
    draw = random.Random(7)
    wanted = draw.choices(NAMES, weights=[1 / rank for rank in (1, 2, 3)], k=40)
    with running(write_three(tmp_path, script="base_ms=2&load_ms=400")) as daemon:
        texts: dict[str, set[str]] = {name: set() for name in NAMES}
        errors: list[Exception] = []
        queue = iter(wanted)
        taking = threading.Lock()

        def ask() -> None:
            while True:
                with taking:
                    name = next(queue, "")
                if not name:
                    return
                try:
                    texts[name].add(text_of(daemon, name))
                except Exception as error:
                    errors.append(error)

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        killed = 0
        while any(client.is_alive() for client in clients):
            all_status = states(daemon)
            assert list(all_status.values()).count("loading") <= 1
            assert sum(state not in AWAY for state in all_status.values()) <= 2
            loading = [name for name, state in all_status.items() if state == "loading"]
            if loading and killed < 2 and (pid := find_worker(daemon, loading[0])):
                with suppress(ProcessLookupError):  # it was lost, or stopped, since it was looked up
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.02)
        assert errors == []
        assert killed
        assert {name: len(said) for name, said in texts.items()} == dict.fromkeys(NAMES, 1), "each says its own"
        assert sum(each["unloads"].get("room", 0) for each in residency(daemon).values()) >= 1
        metrics = httpx.get(f"{daemon.url}/metrics").text
        assert 'outrider_model_loads_total{engine="0",model_name="third"}' in metrics
        assert daemon.stop() == 0


def read_until(client: Client, daemon: Daemon, events: int) -> threading.Thread:
    thread = threading.Thread(target=client.read, args=(daemon.url,))
    thread.start()
    until(lambda: len(client.ids) >= events, 60)
    return thread


def test_a_model_with_streams_gives_way_behind_them_and_comes_back_for_those_that_came_later(tmp_path):
    with running(write_three(tmp_path, script="base_ms=25")) as daemon:
        alone = Client("/v1/completions", LONG)
        alone.read(daemon.url)
        streams = [Client("/v1/completions", LONG | {"model": name}) for name in ("toy", "second")]
        reading = [read_until(stream, daemon, 3) for stream in streams]
        third = threading.Thread(target=text_of, args=(daemon, "third"))
        third.start()
        seen: list[str] = []

        def gives_way() -> bool:
            seen[:] = [name for name, state in states(daemon).items() if state == "leaving"]
            return bool(seen)

        until(gives_way)
        (leaving,) = seen
        late = threading.Thread(target=text_of, args=(daemon, leaving))
        late.start()
        for thread in (*reading, third, late):
            thread.join(120)
        assert all(stream.done and stream.statuses == [200] for stream in streams)
        assert streams[0].texts == alone.texts
        assert residency(daemon)[leaving]["unloads"]["room"] >= 1
        assert residency(daemon)[leaving]["loads"] >= 2
        assert daemon.stop() == 0


def test_a_stream_is_never_silent_while_its_model_is_loaded(tmp_path):
    config = write_three(tmp_path, script="load_ms=2500", memory="4 GiB")
    config.write_text(config.read_text().replace("api: {", "api: {headers_after_s: 0.1, keep_alive_s: 0.1, "))
    words = [{"role": "user", "content": "the sea"}]
    requests: list[tuple[str, dict[str, Any], str, str]] = [
        ("/v1/completions", {"prompt": "the sea is", "max_tokens": 8}, ": keep-alive", "[DONE]"),
        ("/v1/messages", {"messages": words, "max_tokens": 8}, "event: ping", "message_stop"),
        ("/v1/responses", {"input": "the sea", "max_output_tokens": 8}, ": keep-alive", "response.incomplete"),
    ]
    with running(config) as daemon:
        for name, (path, body, silence, last) in zip(NAMES, requests, strict=True):
            asked = body | {"model": name, "stream": True}
            with httpx.stream("POST", f"{daemon.url}{path}", json=asked, timeout=60) as response:
                assert response.status_code == 200
                assert states(daemon)[name] == "loading", "the headers are there before the model is"
                text = "".join(response.iter_text())
            assert text.count(silence) >= 3
            assert "response.failed" not in text
            assert "event: error" not in text
            assert last in text
        assert daemon.stop() == 0


def test_who_finds_the_queue_full_is_told_when_to_come_back_and_who_leaves_is_not_waited_for(tmp_path):
    config = write_three(tmp_path, script="load_ms=3000")
    config.write_text(config.read_text().replace("limits: {", "limits: {max_running: 1, max_waiting: 1, "))
    with running(config) as daemon:
        with pytest.raises(openai.APITimeoutError):
            daemon.client.with_options(timeout=0.3).completions.create(**ASK, model="second")
        until(lambda: states(daemon)["second"] == "loaded")
        waiting = [threading.Thread(target=text_of, args=(daemon, "third")) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: residency(daemon)["third"]["waiting"] == 2)
        with pytest.raises(openai.RateLimitError) as full:
            text_of(daemon, "third")
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["Retry-After"]) >= 1
        with pytest.raises(openai.InternalServerError) as late:
            daemon.client.completions.create(**ASK, model="toy", extra_body={"timeout_s": 0.2})
        assert late.value.code == "deadline_exceeded"
        for thread in waiting:
            thread.join(60)
        assert daemon.stop() == 0


def test_a_load_that_fails_is_told_to_its_clients_alone(tmp_path):
    config = write_three(tmp_path)
    broken = "  - {source: 'simulated:toy?nonsense=1', adapter: simulated, name: broken, keep: on_demand}\n"
    config.write_text(config.read_text().replace("limits: {", f"{broken}limits: {{"))
    with running(config) as daemon:
        with pytest.raises(openai.InternalServerError) as failed:
            text_of(daemon, "broken")
        assert failed.value.status_code == 503
        assert failed.value.response.headers["Retry-After"]
        assert "nonsense" in str(failed.value)
        text_of(daemon, "second")
        assert states(daemon)["broken"] == "failed"
        assert httpx.get(f"{daemon.url}/ready").status_code == 200
        assert daemon.stop() == 0


def test_a_killed_daemons_models_stand_as_they_did_and_its_streams_go_on(tmp_path):
    config = write_three(tmp_path, script="base_ms=20")
    with running(config) as first:
        plain = {name: Client("/v1/completions", BODY | {"model": name}) for name in ("toy", "second")}
        for client in plain.values():
            client.read(first.url)
        clients = {name: Client("/v1/completions", BODY | {"model": name}, key=name) for name in plain}
        all_status = first.status()
        before = {each["model"]: each["ready"]["pid"] for each in (all_status, *all_status["models"]) if each["ready"]}
        kill_in_mid_stream(first, list(clients.values()), 5)
        os.kill(before["second"], signal.SIGKILL)  # this one has to be loaded again
    with running(config) as second:
        for name, client in clients.items():
            client.read(second.url)
            assert client.done
            assert client.texts == plain[name].texts
        all_status = second.status()
        after = {each["model"]: each["ready"]["pid"] for each in (all_status, *all_status["models"]) if each["ready"]}
        assert after["toy"] == before["toy"], "it was loaded, and its worker is there"
        assert states(second) == {"toy": "loaded", "second": "loaded", "third": "not loaded"}
        assert second.stop() == 0


def test_models_that_are_used_are_there_from_the_start_as_far_as_there_is_room(tmp_path, outrider):
    with running(write_three(tmp_path, keep="while_used")) as daemon:
        until(lambda: list(states(daemon).values()).count("loaded") == 2, 30)
        assert states(daemon)["third"] == "not loaded"
        text_of(daemon, "third")
        assert sorted(states(daemon).values()) == ["evicted", "loaded", "loaded"]
        shown = outrider("models", "--config", str(daemon.admin.parent / "cluster.yaml"), "--json")
        served = {each["model"]: each for each in json.loads(shown.stdout)["served"]}
        assert served["third"]["state"] == "loaded"
        (gone,) = [each for each in served.values() if each["state"] == "evicted"]
        assert gone["why"] == "it gave way to third"
        assert sum(gone["needs"].values()) >= 2**30
        plain = outrider("models", "--config", str(daemon.admin.parent / "cluster.yaml")).stdout
        assert "evicted: it gave way to third" in " ".join(plain.split())
        assert "keep while_used" in " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.split())
        assert daemon.stop() == 0


def test_models_that_can_never_have_their_turn_are_refused_with_the_sum(tmp_path):
    config = write_three(tmp_path, memory="1.5 GiB")
    config.write_text(config.read_text().replace("name: toy, keep: on_demand, idle_s: 600.0", "name: toy"))
    for arguments in (("config", "check", str(config)), ("serve", "--config", str(config))):
        ended = outrider_process(*arguments)
        assert ended.returncode != 0
        told = ended.stderr
        assert "models may have 1.5 GiB, and toy 1.0 GiB (always) and second 1.0 GiB (on_demand) are 2.0 GiB" in told
