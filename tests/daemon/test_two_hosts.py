"""Two hosts: a draft on the other one, with the cable cut in the middle of a stream, and both hosts measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from device_profiles.store import ProfileStore
from tests.daemon.test_draft_workers import ASK, count_accepted, draft_of, own, text_while, until_it_drafts
from tests.daemon.test_life import collect
from tests.daemon.test_shard_workers import list_hosts, list_toy_texts, write_over_hosts
from tests.support import tiny_models
from tests.support.daemon import Daemon, configuration, running
from tests.support.hosts import Hosts, ray_over, two_hosts
from tests.support.waiting import until

CUT_S = 1.0


@pytest.fixture(scope="module")
def far_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that each host has for itself."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def hosts(far_disk: Path) -> Iterator[Hosts]:
    """Two hosts with one Ray over both."""
    with two_hosts() as made, ray_over(made, far_disk=far_disk):
        yield made


@pytest.mark.slow
@pytest.mark.ray
def test_the_way_between_two_hosts_is_measured_and_a_device_over_there(tmp_path: Path, hosts):
    found = hosts.on_near(lambda: profile_over_the_cable(tmp_path, hosts))
    near, far = sorted((hosts.near_ip, hosts.far_ip))
    assert {(link["left"], link["right"]) for link in found["links"]} == {(near, near), (far, far), (near, far)}
    assert all(link["rtt_ms"] > 0.0 for link in found["links"])
    assert [one.adapter for one in ProfileStore(tmp_path / "store" / "profiles").models()] == ["simulated"]


def profile_over_the_cable(directory: Path, hosts: Hosts) -> Any:
    config = configuration(directory, script="base_ms=1", runtime="ray")
    config.write_text(config.read_text().replace("runtime: ray", f"runtime: ray, address: '{hosts.address}'"))
    arguments = ("--device", "simulated:SIM", "--node", hosts.far_ip, "--seconds", "0.3", "--json")
    command = [sys.executable, "-m", "orchestrator.cli.main", "profile", "--config", str(config), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.ray
def test_a_cable_cut_or_a_draft_hung_in_a_stream_costs_no_token(tmp_path: Path, plain, hosts):
    expected = plain.client.completions.create(**ASK).choices[0].text
    hosts.on_near(lambda: draft_over_the_cable(tmp_path, hosts, expected))


def draft_over_the_cable(directory: Path, hosts: Hosts, expected: str) -> None:
    extra = own(overlap="always", answer_timeout_s=0.5, host=hosts.far_ip)
    config = configuration(directory, script="base_ms=8", runtime="ray", extra=extra)
    config.write_text(config.read_text().replace("runtime: ray", f"runtime: ray, address: '{hosts.address}'"))
    with running(config) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready", 60)
        draft = draft_of(daemon)
        assert hosts.far_ip in draft["worker"]
        assert hosts.near_ip in daemon.status()["worker"]
        assert draft["ready"]["door"][1].startswith(f"tcp:{hosts.far_ip}:")
        until_it_drafts(daemon, expected)
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**ASK, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(120)
        hosts.cable("down")
        time.sleep(CUT_S)
        before = count_accepted(daemon)
        hosts.cable("up")
        reader.join(240)
        assert "".join(pieces) == expected
        until_it_drafts(daemon, expected)
        assert count_accepted(daemon) > before
        assert daemon.status()["totals"]["restarts"] == 0
        assert draft_of(daemon)["restarts"] >= 1
        hung = draft_of(daemon)["ready"]["pid"]
        assert text_while(daemon, hung, signal.SIGSTOP) == expected
        until_it_drafts(daemon, expected)
        newest = draft_of(daemon)["ready"]["pid"]
        assert newest != hung
        assert not psutil.pid_exists(hung)  # Ray asks a process itself to end, and this one does not hear it
        assert daemon.stop() == 0
        assert not psutil.pid_exists(newest)


@pytest.mark.ray
def test_a_target_in_shards_on_both_hosts_says_what_one_process_says(
    tmp_path: Path, plain: Daemon, hosts: Hosts
) -> None:
    drafted = {"num_speculative_tokens": 4}
    expected = list_toy_texts(plain, {"method": "off"}, max_tokens=40)
    found = hosts.on_near(lambda: ask_over_the_cable(write_over_hosts(tmp_path, hosts.address, hosts.far_ip), drafted))
    assert found == ([hosts.near_ip, hosts.far_ip], expected)


def ask_over_the_cable(config: Path, how: dict[str, Any]) -> tuple[list[str], list[str]]:
    with running(config) as daemon:
        return list_hosts(daemon), list_toy_texts(daemon, how, max_tokens=40)


@pytest.mark.ray
def test_a_target_on_the_other_host_alone_answers_chats(tmp_path: Path, hosts: Hosts, far_disk: Path) -> None:
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{source: tiny, name: toy, replicas: [{{host: {hosts.far_ip}}}]}}\n"
        f"cluster: {{address: '{hosts.address}'}}\ndrafts: []\nlimits: {{kv_cache: 16 MiB, max_running: 4}}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{far_disk}/store'}}\n"
        f"state: {{directory: '{tmp_path}/state'}}\njournal: {{reserve: 1 MiB}}\n"
    )
    hosts.on_near(lambda: chat_over_the_cable(config, hosts, far_disk / "store"))


def chat_over_the_cable(config: Path, hosts: Hosts, store: Path) -> None:
    ask: Any = {"messages": [{"role": "user", "content": "hello the hello"}], "max_tokens": 8, "temperature": 0.0}
    with running(config) as daemon:
        status = daemon.status()
        assert hosts.far_ip in status["worker"]
        digest = status["ready"]["model_digest"]
        assert {one.name.split("-")[0] for one in (store / digest).iterdir() if one.is_dir()} == {"tokenizer"}
        answer = daemon.client.chat.completions.create(model="toy", **ask)
        assert (answer.usage.completion_tokens, bool(answer.choices[0].message.content)) == (8, True)
        assert daemon.stop() == 0
