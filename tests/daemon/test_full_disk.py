"""The disk that holds the state is full, and the daemon is killed: its streams are there all the same."""

from __future__ import annotations

import json
import os
import resource
import signal
from contextlib import ExitStack

import httpx

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
from tests.support.daemon import Daemon, configuration, running, starting
from tests.support.small_disk import keep_full, small_disk
from tests.support.waiting import until

DISK_MIB = 32  # as in outrider_lab.chaos
WITHIN_S = 60.0
RESERVE = "journal: {reserve: 16 MiB}"  # of everybody who says nothing
LIMITS = "drafts: []\nlimits: {max_running: 3, kv_cache: 64 MiB}"


def list_problems(daemon: Daemon) -> list[str]:
    """What the status says that the journal cannot keep."""
    return [one["kind"] for one in daemon.status()["journal"]["problems"]]


def read_ready(daemon: Daemon) -> list[str]:
    """What is told to whoever asks whether it serves; it does."""
    answer = httpx.get(f"{daemon.url}/ready")
    assert answer.status_code == httpx.codes.OK
    warnings: list[str] = answer.json().get("warnings", [])
    return warnings


def read_gauge(daemon: Daemon, kind: str) -> float:
    """What the metrics say of a problem."""
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    return float(next(one for one in lines if "journal_problems" in one and f'"{kind}"' in one).split()[-1])


def test_streams_that_began_on_a_full_disk_outlive_the_daemon(tmp_path):
    """All is on the full disk: the state, the store, the admin socket, the log. It stays full over the start. The
    worker is one that was started while it was full."""
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        config = configuration(disk, script="base_ms=20", extra=f"drafts: []\n{RESERVE}")
        requests = [
            ("/v1/completions", BODY),
            ("/v1/completions", BODY | {"temperature": 0.0, "logprobs": 2}),
            ("/v1/chat/completions", CHAT),
        ]
        with running(config) as first:
            plain = read_undisturbed(first, requests)
            clients = [Client(*request, key=f"k{index}" * (index % 2)) for index, request in enumerate(requests)]
            with keep_full(disk):
                (before,) = workers_of(first)
                os.kill(before, signal.SIGKILL)
                until(lambda: first.status()["phase"] == "ready" and workers_of(first) != [before], WITHIN_S)
                kill_in_mid_stream(first, clients, 8)
                pids = workers_of_state(disk)
                assert not all(client.done for client in clients)
                with running(config) as second:
                    assert workers_of(second) == pids != [before]
                    assert list_problems(second) == []
                    read_on_alike(second, clients, plain)
                    assert second.stop() == 0


def test_a_disk_that_is_full_at_the_first_start_is_told_and_taken_when_there_is_room(tmp_path, outrider):
    config = configuration(tmp_path, script="base_ms=10", extra=f"drafts: []\n{RESERVE}")
    with small_disk(tmp_path / "state", DISK_MIB) as state, ExitStack() as full:
        full.enter_context(keep_full(state))
        with running(config) as daemon:
            assert list_problems(daemon) == ["not_written", "reserve"]
            assert any("No space left on device" in one for one in read_ready(daemon))
            assert "journal.reserve asks for" in daemon.log.read_text(encoding="utf-8")
            client = Client("/v1/completions", BODY)
            client.read(daemon.url)
            assert client.done
            assert read_gauge(daemon, "reserve") == 1.0
            full.close()
            until(lambda: list_problems(daemon) == [], WITHIN_S)
            assert read_ready(daemon) == []
            with keep_full(state):
                config.write_text(config.read_text(encoding="utf-8").replace("drafts: []", LIMITS), encoding="utf-8")
                assert outrider("reload", "--socket", str(daemon.admin)).returncode == 0
                daemon.wait_for("", WITHIN_S, phase="ready")
                again = Client("/v1/completions", BODY)
                kill_in_mid_stream(daemon, [again], 8)
                with running(config) as second:
                    again.read(second.url)
                    assert set(again.statuses) == {200}
                    assert again.texts == client.texts


def test_a_store_that_is_full_at_the_first_start_is_told_with_the_way_out(tmp_path, outrider):
    """A SIGHUP meanwhile is told, and made good when the daemon serves."""
    config = configuration(tmp_path, script="base_ms=1", extra="drafts: []")
    with small_disk(tmp_path / "store", DISK_MIB) as store, ExitStack() as full:
        full.enter_context(keep_full(store))
        with starting(config) as daemon:
            until(lambda: f"{store}: the disk became full" in daemon.status()["detail"], WITHIN_S)
            assert "Free some space there" in httpx.get(f"{daemon.url}/ready").json()["error"]["message"]
            told = outrider("health", "--socket", str(daemon.admin)).stdout
            assert "the model 'toy' is starting" in told
            assert "the disk became full" in " ".join(told.split())
            probe = outrider("health", "--ready", "--socket", str(daemon.admin))
            assert (probe.returncode, probe.stdout[:32]) == (1, "not ready: the model is starting")
            config.write_text(f"{config.read_text()}limits: {{max_running: 3}}\n")
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: "when the daemon serves" in daemon.status()["reload"]["last"], WITHIN_S)
            full.close()
            daemon.wait_ready()
            until(lambda: "took effect" in daemon.status()["reload"]["last"], WITHIN_S)
            assert daemon.status()["ready"]["slots"] == 3
            assert "is starting" not in outrider("health", "--socket", str(daemon.admin)).stdout
            assert outrider("health", "--ready", "--socket", str(daemon.admin)).stdout == "ready\n"


def test_what_the_journal_cannot_keep_is_told_and_no_more_when_it_can(tmp_path, outrider):
    """A limit of the kernel's on the daemon's files stands for whatever lets writes fail."""
    config = configuration(tmp_path, script="base_ms=10", extra="alerts: {every_s: 0.2}")
    with running(config) as daemon:
        assert list_problems(daemon) == []
        assert read_ready(daemon) == []
        before = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        client = Client("/v1/completions", BODY, key="k")
        client.read(daemon.url)
        assert client.done
        assert list_problems(daemon) == ["not_written"]
        assert "would not outlive the daemon" in read_ready(daemon)[0]
        assert "JOURNAL" in outrider("status", "--socket", str(daemon.admin)).stdout
        assert read_gauge(daemon, "not_written") == 1.0
        until(lambda: "OutriderJournalShort" in list_alerts(daemon), WITHIN_S)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before)
        until(lambda: list_problems(daemon) == [], WITHIN_S)
        until(lambda: "OutriderJournalShort" not in list_alerts(daemon), WITHIN_S)
        assert read_ready(daemon) == []
        daemon.kill()
    with running(config) as second:
        again = Client("/v1/completions", BODY, key="k", last=client.ids[3])
        again.read(second.url)
        assert set(again.statuses) == {200}
        assert again.ids == client.ids[4:]


def list_alerts(daemon: Daemon) -> list[str]:
    transport = httpx.HTTPTransport(uds=str(daemon.admin))
    with httpx.Client(transport=transport, base_url="http://daemon") as client:
        return [one["alert"] for one in json.loads(client.get("/admin/alerts").text)["alerts"]]
