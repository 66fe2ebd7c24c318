"""The commands that steer a daemon, against a real one of two replicas: over its socket, and over TCP with a key."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.config.keys_change import create_key
from orchestrator.config.keys_file import USUAL_SCOPES
from tests.daemon.test_replicas import until_all_serve
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.malformed import CANARY, send_requests
from tests.support.waiting import until

STREAMS = range(4)
TOKENS = 400
PRIVATE = "a prompt that nobody else may read"
LONG: dict[str, Any] = {"model": "toy", "prompt": PRIVATE, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}


def ask(number: int, *, drafts: bool = False) -> dict[str, Any]:
    """Return a request that runs for some seconds. Its text is known from before: drafts would soon be through."""
    alone = {} if drafts else {"speculative_config": {"num_speculative_tokens": 0}}
    return {
        "model": "toy",
        "prompt": f"the sea is {number} " * 6,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": number,
        "extra_body": {"ignore_eos": True, **alone},
    }


class Fleet:
    """The daemon, and its commands. `client` has a key without the scope `admin`, `key` has only that."""

    def __init__(self, daemon: Daemon, client: OpenAI, key: str, audit: Path) -> None:
        self.daemon = daemon
        self.client = client
        self.key = key
        self.audit = audit

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command over the socket; returns what it printed."""
        return run_command(*words, "--socket", str(self.daemon.admin), code=code)

    def read(self, *words: str) -> Any:
        """Run a command with --json."""
        return json.loads(self.run(*words, "--json"))

    def list_requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.read("requests")["requests"]
        return found

    def find_replica(self, request_id: str) -> str:
        return next((one["replica"] for one in self.list_requests() if one["request_id"] == request_id), "")


def run_command(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    told = done.output + (str(done.exception) if done.exception is not None else "")
    assert done.exit_code == code, told
    return told


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("steered")
    user, _ = create_key(directory / "keys", "user", USUAL_SCOPES, 0, 0)
    boss, _ = create_key(directory / "keys", "boss", ("admin",), 0, 0)
    config = configuration(directory, script="base_ms=20", replicas="2")
    text = config.read_text().replace("api: {", "api: {keys_file: keys, ")
    config.write_text(text.replace("{format: json}", "{format: json, audit_file: audit.jsonl}"))
    with running(config) as daemon, OpenAI(base_url=f"{daemon.url}/v1", api_key=user, max_retries=0) as client:
        until_all_serve(daemon)
        yield Fleet(daemon, client, boss, directory / "audit.jsonl")


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> dict[int, str]:
    """The texts where nobody steers."""
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        texts = pool.map(lambda number: fleet.client.completions.create(**ask(number)).choices[0].text, STREAMS)
        return dict(zip(STREAMS, texts, strict=True))


class Streams:
    """Streams that are read at once, each in a thread; their ids are known from when all have begun."""

    def __init__(self, fleet: Fleet, *, drafts: bool = False) -> None:
        self._drafts = drafts
        self._client = fleet.client
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(len(STREAMS))
        self.ids: dict[int, str] = {}
        self._texts: dict[int, Future[str]] = {number: self._pool.submit(self._read, number) for number in STREAMS}
        for _ in STREAMS:
            assert self._begun.acquire(timeout=180.0)

    def texts(self) -> dict[int, str]:
        found = {number: text.result(120.0) for number, text in self._texts.items()}
        self._pool.shutdown()
        return found

    def _read(self, number: int) -> str:
        pieces: list[str] = []
        for chunk in self._client.completions.create(**ask(number, drafts=self._drafts), stream=True):
            pieces.extend(choice.text for choice in chunk.choices)
            if number not in self.ids:
                self.ids[number] = chunk.id
                self._begun.release()
        return "".join(pieces)


def test_live_requests_are_listed_with_their_keys_name_and_never_with_what_they_say(fleet: Fleet) -> None:
    with fleet.client.completions.create(**LONG, stream=True) as stream:
        first = next(iter(stream))
        shown = fleet.run("requests")
        assert first.id in shown
        assert "user" in shown
        found = fleet.list_requests()
        assert [(one["request_id"], one["state"], one["key"]) for one in found] == [(first.id, "decoding", "user")]
        assert found[0]["replica"] in ("target-0", "target-1")
        assert found[0]["tokens"] >= 1
        assert PRIVATE not in shown + json.dumps(found) + fleet.run("explain", first.id)
    until(lambda: fleet.list_requests() == [], what="a client that has gone has no request")
    assert "no request is running" in fleet.run("requests")
    history = fleet.read("explain", first.id)["requests"][0]
    assert (history["state"], history["outcome"]) == ("ended", "the client has gone")
    assert "branches of drafts on target-0: up to 4 a round" in fleet.run("explain", first.id)


def test_a_cancelled_stream_ends_with_an_error_and_leaves_its_place(fleet: Fleet) -> None:
    with fleet.client.completions.create(**LONG, stream=True) as stream:
        pieces = iter(stream)
        request_id = next(pieces).id
        assert "--yes" in fleet.run("cancel", request_id, code=2), "nobody is there to be asked"
        assert fleet.read("cancel", request_id, "--yes") == {"cancelled": [request_id]}
        with pytest.raises(openai.APIError, match="the operator of this server has cancelled") as caught:
            for _ in pieces:
                pass
        assert caught.value.code == "request_cancelled"
    until(lambda: (fleet.daemon.status()["gauges"] or {"running": 1})["running"] == 0, what="its slot is free")
    assert "no request" in fleet.run("cancel", request_id, "--yes", code=1)


def test_a_cancelled_request_that_does_not_stream_is_answered_once(fleet: Fleet) -> None:
    stubborn = fleet.client.with_options(max_retries=2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: stubborn.completions.create(**LONG))
        until(lambda: len(fleet.list_requests()) == 1, what="it runs")
        fleet.run("cancel", fleet.list_requests()[0]["request_id"], "--yes")
        with pytest.raises(openai.ConflictError) as caught:
            answer.result(60.0)
    assert caught.value.code == "request_cancelled"
    assert fleet.list_requests() == [], "it was not sent again"


def test_a_drained_worker_gives_its_streams_away_and_no_text_changes(fleet: Fleet, expected: dict[int, str]) -> None:
    streams = Streams(fleet)
    full = fleet.find_replica(streams.ids[0])
    assert full
    told = fleet.run("drain", full, "--yes")
    assert f"worker {full} is drained" in told
    assert full not in {one["replica"] for one in fleet.list_requests()}
    assert full in fleet.run("health")
    assert streams.texts() == expected
    left = fleet.read("explain", streams.ids[0])["requests"][0]["moves"]
    assert [one["replica"] for one in left] == [full]
    assert "all parts are healthy" in fleet.run("uncordon", full)


def test_a_drain_that_cannot_end_in_time_says_what_remains(fleet: Fleet) -> None:
    with fleet.client.completions.create(**LONG, stream=True) as stream:
        request_id = next(iter(stream)).id
        told = fleet.run("drain", "here/CPU", "--yes", "--timeout", "0.2", code=1)
        assert request_id in told
        assert "goes on draining" in told
        assert fleet.read("health")["parts"][0]["state"] == "draining"
        assert "all parts are healthy" in fleet.run("uncordon", "here/CPU")
    until(lambda: fleet.list_requests() == [], what="its client has gone")


def test_a_cordoned_worker_takes_nothing_and_the_older_form_of_the_command_goes_on_working(fleet: Fleet) -> None:
    assert "cordoned" in fleet.run("cordon", "target-0")
    for number in range(3):
        fleet.client.completions.create(model="toy", prompt=f"x{number}", max_tokens=2)
    answer = fleet.client.completions.create(model="toy", prompt="y", max_tokens=2)
    assert fleet.read("explain", answer.id)["routes"][0]["replica"] == "target-1"
    fleet.run("uncordon", "worker", "target")
    fleet.run("cordon", "worker", "target-1", "--drain")
    fleet.run("uncordon", "target-1")
    unknown = fleet.run("cordon", "target-7", code=1)
    assert "device here/CPU, worker target-0, worker target-1" in unknown
    fleet.run("cordon", "nothing", "target-0", code=2)


def test_a_worker_is_failed_over_and_has_its_streams_back_and_no_text_changes(
    fleet: Fleet, expected: dict[int, str]
) -> None:
    streams = Streams(fleet)
    source = fleet.find_replica(streams.ids[0])
    target = {"target-0": "target-1", "target-1": "target-0"}[source]
    assert fleet.read("failover", source, "--to", target, "--yes") == {"worker": source, "to": target}
    until(lambda: fleet.find_replica(streams.ids[0]) != source, what="it left")
    answer = fleet.client.completions.create(model="toy", prompt="z", max_tokens=2)
    assert fleet.read("explain", answer.id)["routes"][0]["replica"] == target
    assert "has its place again" in fleet.run("failover", source, "--back", "--yes")
    until(lambda: fleet.find_replica(streams.ids[0]) in (source, ""), what="it is back, or has ended")
    assert streams.texts() == expected
    assert fleet.read("health")["parts"] == []
    moves = fleet.read("explain", streams.ids[0])["requests"][0]["moves"]
    assert (moves[0]["replica"], moves[0]["why"]) == (source, f"an operator sent it to {target}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("target-0", "--to", "target-0"), "itself"),
        (("target-0", "--to", "target-9"), "there is target-0, target-1"),
        (("target-9", "--to", "target-0"), "there is no worker target-9"),
        (("target-0", "--back"), "was not failed over"),
    ],
)
def test_a_failover_that_cannot_be_says_why(fleet: Fleet, words: tuple[str, ...], told: str) -> None:
    assert told in fleet.run("failover", *words, "--yes", code=1)


def test_drafters_are_swapped_while_streams_run_and_no_text_changes(fleet: Fleet, expected: dict[int, str]) -> None:
    def list_states() -> set[str]:
        return {one["state"] for replica in fleet.read("draft", "list")["replicas"] for one in replica["drafters"]}

    def count_drafted() -> int:
        return int(fleet.daemon.status()["totals"]["drafted"])

    assert list_states() == {"ok"}
    assert "off" in fleet.run("draft", "swap", "off")
    until(lambda: list_states() == {"off"}, what="no drafter proposes")
    before = count_drafted()
    streams = Streams(fleet, drafts=True)
    assert count_drafted() == before, "nobody was asked"
    fleet.run("draft", "swap", "suffix")
    until(lambda: count_drafted() > before, what="streams that run have drafts")
    assert "there is suffix" in fleet.run("draft", "swap", "nobody", code=1)
    assert "there is 0, 1" in fleet.run("draft", "swap", "off", "--engine", "7", code=1)
    fleet.run("draft", "swap", "off", "--engine", "1")
    assert [one["chosen"] for one in fleet.read("draft", "list")["replicas"]] == [["suffix"], []]
    fleet.run("draft", "reset")
    until(lambda: list_states() == {"ok"}, what="all propose again")
    assert streams.texts() == expected


def test_what_became_of_a_request_is_explained(fleet: Fleet) -> None:
    answer = fleet.client.completions.create(**ask(1, drafts=True))
    found = fleet.read("explain", answer.id)
    history, route = found["requests"][0], found["routes"][0]
    assert history["outcome"] == answer.choices[0].finish_reason
    assert history["tokens"] == sum(one["tokens"] for one in history["rounds"]) == TOKENS
    assert history["queue_ms"] >= 0.0
    assert history["first_token_ms"] >= history["prefill_ms"] > 0.0
    assert history["key"] == "user"
    assert len(history["rounds"]) <= 64
    assert route["rated"][0]["terms"]
    told = fleet.run("explain", answer.id)
    (share,) = history["drafters"]
    assert share["name"] == "suffix"
    assert (share["drafted"], share["accepted"]) == tuple(
        sum(one[name] for one in history["rounds"]) for name in ("drafted", "accepted")
    )
    assert share["asked"] > 0
    for word in ("queue", "prefill", "drafted a round", "chosen", "why not more"):
        assert word in told
    assert "nothing is known of a request" in fleet.run("explain", "cmpl-none", code=1)


def test_a_request_is_put_into_quarantine_and_released(fleet: Fleet) -> None:
    same: dict[str, Any] = {"model": "toy", "prompt": "put me away", "max_tokens": 3}
    answer = fleet.client.completions.create(**same)
    assert "--yes" in fleet.run("quarantine", "add", answer.id, code=2)
    digest = fleet.read("quarantine", "add", answer.id, "--yes", "--minutes", "5")["quarantined"][0]["digest"]
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        fleet.client.completions.create(**same)
    assert caught.value.code == "request_quarantined"
    assert "worker processes" not in str(caught.value), "it ended none"
    assert digest in fleet.run("quarantine", "list")
    assert fleet.read("quarantine", "release", digest) == {"released": [digest]}
    fleet.client.completions.create(**same)
    assert "nothing is known" in fleet.run("quarantine", "add", "cmpl-none", "--yes", code=1)


def test_over_tcp_a_key_of_the_scope_admin_steers_and_no_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    url = fleet.daemon.url
    monkeypatch.setenv("OUTRIDER_URL", url)
    monkeypatch.setenv("OUTRIDER_KEY", fleet.key)
    done = outrider_process("requests", "--json")
    assert json.loads(done.stdout) == {"requests": []}, done.stderr
    for words in (("status",), ("health",), ("draft", "list"), ("quarantine", "list"), ("requests",)):
        run_command(*words, "--json")
    run_command("cordon", "target-0", "--url", f"{url}/v1")
    assert "all parts are healthy" in run_command("uncordon", "target-0")
    for key, status in (("", 401), ("outrider-wrong", 401), (fleet.client.api_key, 403)):
        monkeypatch.setenv("OUTRIDER_KEY", key)
        told = run_command("requests", code=1)
        assert "a key of the scope admin" in told
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=url, headers=headers) as stranger:
            for method, path in list_routes():
                answer = stranger.request(method, path)
                assert answer.status_code == status, path
                assert fleet.key not in answer.text
    written = [json.loads(line) for line in fleet.audit.read_text().splitlines()]
    calls = [one for one in written if one["event"] == "admin call" and one.get("changed")]
    by_key = [one["changed"] for one in calls if one.get("key") == "boss"]
    assert by_key == ["worker target-0: cordoned", "worker target-0: may work again"]
    assert all(one["by"].startswith("uid ") for one in calls if "key" not in one)
    assert {one["reason"] for one in written if one["event"] == "access refused"} >= {"missing", "unknown", "scope"}


def list_routes() -> list[tuple[str, str]]:
    """Return the admin routes by method and path, and some that are none."""
    posts = (
        "hold",
        "failover",
        "drafters",
        "speculation",
        "requests/cancel",
        "quarantine/add",
        "quarantine/release",
        "reload",
    )
    canary = ("reload", "canary/promote", "canary/abort", "canary/restart")
    gets = (
        "status",
        "plan",
        "health",
        "parts",
        "requests",
        "drafters",
        "quarantine",
        "canary",
        "explain/x",
        "none",
        "",
    )
    return [
        *(("POST", f"/admin/{one}") for one in (*posts, *canary)),
        *(("GET", f"/admin/{one}") for one in gets),
        ("GET", "/admin"),
    ]


def test_mutated_admin_calls_are_refused_and_tell_no_secret(fleet: Fleet) -> None:
    for place in (str(fleet.daemon.admin), fleet.daemon.url):
        found = asyncio.run(send_requests(place, 400, seed=67, key=fleet.key, admin=True))
        assert found.failures == []
        assert found.statuses["400"] > 50
        assert found.statuses["200"] > 5
    assert found.statuses["401"] > 5, "some came without the key"
    for part in fleet.read("health")["parts"]:
        fleet.run("uncordon", part["kind"], part["name"])
    fleet.run("draft", "reset")
    fleet.run("speculation", "reset")
    fleet.client.completions.create(model="toy", prompt="still here", max_tokens=2)
    log = fleet.daemon.log.read_text()
    for secret in (CANARY, PRIVATE, fleet.key):
        assert secret not in log + fleet.audit.read_text()
    assert "Traceback" not in log
