"""The draft store of real daemons: answers help other and later ones, and no failure of it changes an answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.cli.status import list_rows
from tests.support.daemon import Daemon, configuration, running
from tests.support.redis_server import RedisServer, needs_redis, running_redis
from tests.support.waiting import until

PROMPTS = ["the lighthouse keeper of the north", "seven ships went out to sea", "a letter to the mayor of the town"]
TOKENS = 60
PREFIX = "outrider:{drafts}:1:"


WAITS = "wait_ms: 30000"
PATIENT = f"{WAITS}, timeout_ms: 30000"


def drafts_of(store: str, options: str) -> str:
    """The sections of a cluster.yaml with this store. Depths are fixed, so that rounds can be compared."""
    used = f", store_options: {{{options}}}" if options else ""
    return (
        f"drafts: [{{method: suffix, store: '{store}'{used}}}]\n"
        "speculation: {method: fixed, num_speculative_tokens: 8}"
    )


def answer(daemon: Daemon, prompt: str, **parameters: Any) -> str:
    """What a daemon says, greedy unless told otherwise."""
    chosen = {"temperature": 0.0, "max_tokens": TOKENS} | parameters
    return daemon.client.completions.create(model="toy", prompt=prompt, **chosen).choices[0].text


def count_accepted(daemon: Daemon) -> int:
    """Ask every prompt once, and return how many draft tokens were accepted for that."""
    before = int(daemon.status()["totals"]["accepted"])
    for prompt in PROMPTS:
        answer(daemon, prompt)
    daemon.wait_for("", streams=0)
    until(lambda: daemon.status()["totals"]["generated"] >= TOKENS * len(PROMPTS))
    return int(daemon.status()["totals"]["accepted"]) - before


def store_of(daemon: Daemon) -> dict[str, Any]:
    """The status of a daemon's store."""
    found: dict[str, Any] = daemon.status()["draft_store"]
    return found


def metric(daemon: Daemon, name: str, label: str) -> float:
    """The value of one series of the store."""
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    found = next(line for line in lines if line.startswith(f"outrider_draft_store_{name}") and label in line)
    return float(found.rpartition(" ")[2])


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Daemon]:
    config = configuration(
        tmp_path_factory.mktemp("first"), extra=drafts_of(redis_server.url, "wait_ms: 200, timeout_ms: 1000")
    )
    with running(config) as daemon:
        yield daemon


@needs_redis
def test_what_one_daemon_answered_another_drafts(plain, first, redis_server, tmp_path):
    """The second is a later daemon, too: it has nothing of the first but the store."""
    alone = count_accepted(first)
    until(lambda: store_of(first)["written"] == len(PROMPTS))
    with running(configuration(tmp_path, extra=drafts_of(redis_server.url, PATIENT))) as second:
        shared = count_accepted(second)
        found = store_of(second)
        assert (found["kind"], found["state"], found["hits"]) == ("redis", "ok", len(PROMPTS))
        assert found["location"] == f"unix://{redis_server.socket}"
        assert shared > alone
        assert shared >= 0.8 * len(PROMPTS) * TOKENS * 8 / 9  # of nine tokens of a round eight can be drafts
        assert metric(second, "lookups_total", 'outcome="hit"') == len(PROMPTS)
        for prompt in PROMPTS:
            assert answer(second, prompt) == answer(plain, prompt)
            seeded = {"temperature": 0.9, "seed": 11}
            assert answer(second, prompt, **seeded) == answer(plain, prompt, **seeded)
        until(lambda: store_of(second)["waiting"] == 0)
        assert "the lighthouse keeper" not in second.log.read_text()
    with redis_server.connect() as client:
        assert 0 < int(client.zcard(f"{PREFIX}order")) <= 2 * len(PROMPTS)
        assert all(key.startswith(PREFIX.encode()) for key in client.scan_iter())


@needs_redis
def test_a_request_without_speculation_is_neither_looked_up_nor_kept(first):
    before = store_of(first)
    answer(first, PROMPTS[0], extra_body={"speculative_config": {"num_speculative_tokens": 0}})
    assert store_of(first) == before


@needs_redis
def test_damaged_values_are_left_out(plain, first, redis_server):
    answer(first, PROMPTS[0])
    until(lambda: store_of(first)["waiting"] == 0)
    damaged = store_of(first)["damaged"]
    with redis_server.connect() as client:
        for key in client.scan_iter(f"{PREFIX}a:*"):
            client.set(key, b"OD1garbage")
        for key in client.scan_iter(f"{PREFIX}b:*"):
            if key.endswith((b"0", b"1", b"2", b"3")):
                client.set(key, b"no list")
    assert answer(first, PROMPTS[0]) == answer(plain, PROMPTS[0])
    until(lambda: store_of(first)["damaged"] > damaged)
    assert "damaged" in store_of(first)["problem"]
    with redis_server.connect() as client:
        client.flushall()


@needs_redis
def test_redis_that_hangs_or_is_gone_costs_no_answer(plain, first, redis_server):
    expected = answer(plain, PROMPTS[1])
    redis_server.send(signal.SIGSTOP)
    try:
        until(lambda: answer(first, PROMPTS[1]) == expected and store_of(first)["state"] == "away")
    finally:
        redis_server.send(signal.SIGCONT)
    until(lambda: answer(first, PROMPTS[1]) == expected and store_of(first)["state"] == "ok")
    redis_server.kill()
    until(lambda: answer(first, PROMPTS[1]) == expected and store_of(first)["state"] == "away")
    assert metric(first, "up", "toy") == 0
    assert dict(list_rows(first.status()))["draft store"].startswith("AWAY: ")
    redis_server.start()
    until(lambda: answer(first, PROMPTS[1]) == expected and store_of(first)["state"] == "ok")
    told = [json.loads(line) for line in first.log.read_text().splitlines()]
    assert {"the draft store is away: requests go on without it", "the draft store is back"} <= {
        line["event"] for line in told
    }
    assert not [line for line in told if line["level"] == "error"]


def test_a_store_on_disk_outlives_its_daemon(plain, tmp_path):
    config = configuration(tmp_path, extra=drafts_of("disk", WAITS))
    with running(config) as daemon:
        alone = count_accepted(daemon)
        assert store_of(daemon)["hits"] < len(PROMPTS)
    path = tmp_path / "state" / "drafts.sqlite"
    assert path.stat().st_mode & 0o077 == 0
    with running(config) as daemon:
        assert count_accepted(daemon) > alone
        assert (store_of(daemon)["kind"], store_of(daemon)["hits"]) == ("disk", len(PROMPTS))
        assert [answer(daemon, prompt) for prompt in PROMPTS] == [answer(plain, prompt) for prompt in PROMPTS]
        text = config.read_text()
        for store, location in (("disk:other", str(tmp_path / "other")), ("memory", None)):
            config.write_text(text.replace(drafts_of("disk", WAITS), drafts_of(store, WAITS if location else "")))
            query_daemon(daemon.admin, "/admin/reload", {"check": False}, answer_s=None)
            found = daemon.status()["draft_store"]
            assert (found and found["location"]) == location
            assert answer(daemon, PROMPTS[0]) == answer(plain, PROMPTS[0])


def test_a_users_last_answers_are_drafted_from_after_a_worker_was_lost_and_nobody_elses(tmp_path):
    extra = "drafts: [{method: suffix}]\nspeculation: {method: fixed, num_speculative_tokens: 8}"
    with running(configuration(tmp_path, extra=extra)) as daemon:
        first = answer(daemon, PROMPTS[0], user="ann")
        assert daemon.status()["recent_outputs"] == {"users": 1, "tokens": TOKENS, "given": 0}

        def lose_worker_and_ask(user: str) -> int:
            pid = daemon.status()["ready"]["pid"]
            os.kill(pid, signal.SIGKILL)
            until(lambda: daemon.status()["phase"] == "ready" and daemon.status()["ready"]["pid"] != pid)
            before = daemon.status()["totals"]["accepted"]
            assert answer(daemon, PROMPTS[0], user=user) == first, "drafts change no token"
            daemon.wait_for("", streams=0)
            return int(daemon.status()["totals"]["accepted"] - before)

        others, own = lose_worker_and_ask("bob"), lose_worker_and_ask("ann")
        assert own > others, "what ann was told is known to the daemon, and to her requests alone"
        assert daemon.status()["recent_outputs"]["given"] == 1
        assert "given to 1 requests" in str(list_rows(daemon.status()))
        assert "outrider_recent_outputs_requests_total" in httpx.get(f"{daemon.url}/metrics").text
