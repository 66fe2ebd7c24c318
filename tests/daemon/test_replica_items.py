"""Replicas with drafts, shards and ranks of their own, in a real daemon whose workers are killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_replaced_models import LETTERS
from tests.daemon.test_replicas import ask, replicas, until_all_serve
from tests.support import tiny_gguf
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.waiting import until

MODEL = "method: model, source: 'simulated:toy', adapter: simulated"
ITEMS = (
    f"{{drafts: [{{method: suffix, memory: 0 B}}, {{{MODEL}, process: own, overlap: always}}], max_running: 2}}",
    "{drafts: [], max_running: 2}",
    "{shards: [{layers: 1}, {layers: 2}], max_running: 2}",
)
SHARED = f"drafts: [{{{MODEL}, process: own, overlap: always}}]"
WORKERS = ["model", "replica-0-model"]


def write(directory: Path, *items: str) -> Path:
    return configuration(directory, script="base_ms=3&layers=3", replicas=f"[{', '.join(items)}]", extra=SHARED)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("items")


@pytest.fixture(scope="module")
def daemon(place: Path) -> Iterator[Daemon]:
    with running(write(place, *ITEMS)) as daemon:
        until_all_draft(daemon)
        yield daemon


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> list[str]:
    return [plain.client.completions.create(**ask(number)).choices[0].text for number in range(6)]


def until_all_draft(daemon: Daemon) -> None:
    """Wait until all replicas serve, and each draft worker is connected to its replica."""
    until_all_serve(daemon)
    until(lambda: [list_drafters(each) for each in replicas(daemon)] == [["suffix", "replica-0-model"], [], ["model"]])
    until(lambda: sorted(draft["name"] for draft in daemon.status()["drafts"] if draft["connected"]) == WORKERS)


def list_drafters(replica: dict[str, Any]) -> list[str]:
    return [drafter["name"] for drafter in (replica["gauges"] or {}).get("drafters", [])]


def read_texts(daemon: Daemon) -> list[str]:
    def read(number: int) -> str:
        return str(daemon.client.completions.create(**ask(number)).choices[0].text)

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(read, range(6)))


def list_pids(daemon: Daemon) -> list[int]:
    return [replica["ready"]["pid"] for replica in replicas(daemon)]


def test_each_replica_drafts_with_its_own_and_no_token_differs(daemon: Daemon, expected, outrider) -> None:
    def all_have_drafted() -> bool:
        assert read_texts(daemon) == expected
        counts = [replica["totals"] for replica in replicas(daemon)]
        assert counts[1]["by_drafter"] == {}, "it has none"
        proposed = [name for count in counts for name, drafter in count["by_drafter"].items() if drafter["accepted"]]
        return all(count["generated"] for count in counts) and {*WORKERS} <= {*proposed}

    # The one without drafts may rest while the others make more without it (ADR 0144): first it has all to itself.
    others, socket = ("target-0", "target-2"), ("--socket", str(daemon.admin))
    for name in others:
        outrider("cordon", name, *socket)
    assert read_texts(daemon) == expected
    for name in others:
        outrider("uncordon", name, *socket)
    until(all_have_drafted)
    shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].replace("│", " ").split())
    assert "drafts by suffix+replica-0-model" in shown
    assert "drafts by nothing" in shown
    assert "layers 0 to 0 on simulated" in shown
    assert "draft worker replica-0-model" in shown


def test_a_choice_of_drafters_is_each_replicas_own(daemon: Daemon, expected) -> None:
    query_daemon(daemon.admin, "/admin/drafters", {"names": ["suffix", "model"]})
    chosen = [replica["chosen"] for replica in query_daemon(daemon.admin, "/admin/drafters")["replicas"]]
    assert chosen == [["suffix"], [], ["model"]]
    assert read_texts(daemon) == expected
    query_daemon(daemon.admin, "/admin/drafters", {"names": None})


def test_a_killed_replica_and_a_killed_draft_cost_no_token_and_come_back_as_they_were(daemon: Daemon, expected) -> None:
    for kind in ("replicas", "drafts"):
        before = [each["ready"]["pid"] for each in daemon.status()[kind]]
        for pid in before:
            assert read_while_killed(daemon, pid) == expected
        until_others_run(daemon, kind, before)
        until_all_draft(daemon)
    assert read_texts(daemon) == expected


def read_while_killed(daemon: Daemon, pid: int) -> list[str]:
    """Return the texts of six requests, during which a worker is killed."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_texts, daemon)
        until(lambda: any(replica["streams"] for replica in replicas(daemon)) or reading.done())
        os.kill(pid, signal.SIGKILL)
        return reading.result()


def until_others_run(daemon: Daemon, kind: str, pids: list[int]) -> None:
    def are_others() -> bool:
        return not {*pids} & {(each["ready"] or {}).get("pid", 0) for each in daemon.status()[kind]}

    until(are_others)


def test_another_item_replaces_its_own_replica_alone(daemon: Daemon, place: Path, expected) -> None:
    def reload() -> str:
        done = outrider_process("reload", "--socket", str(daemon.admin))
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = list_pids(daemon)
    write(place, ITEMS[0], "{drafts: [], max_running: 3}", ITEMS[2])
    output = reload()
    assert "1 target workers are started beside the 3 that serve" in output
    after = list_pids(daemon)
    assert [pid in after for pid in before] == [True, False, True]
    write(place, "{drafts: [{method: suffix}], max_running: 2}", "{drafts: [], max_running: 3}", ITEMS[2])
    reload()
    assert list_pids(daemon) == after, "drafters are exchanged where they are"
    until(lambda: [list_drafters(each) for each in replicas(daemon)] == [["suffix"], [], ["model"]])
    assert [draft["name"] for draft in daemon.status()["drafts"]] == ["model"]
    assert read_texts(daemon) == expected
    write(place, *ITEMS)
    reload()
    until_all_draft(daemon)


def test_the_next_daemon_takes_over_each_worker_with_what_it_has(place: Path, daemon: Daemon, expected) -> None:
    before = list_pids(daemon), {draft["ready"]["pid"] for draft in daemon.status()["drafts"]}
    daemon.kill()
    with running(place / "cluster.yaml") as second:
        until_all_draft(second)
        assert (list_pids(second), {draft["ready"]["pid"] for draft in second.status()["drafts"]}) == before
        assert read_texts(second) == expected


NO_GROUP = "fp_000000000000"
TINY = replace(tiny_gguf.Tiny("llama"), hidden=128, heads=2, head_dim=64, vocabulary=94, words=LETTERS, context=2048)
REAL = (
    "{drafts: [{method: suffix}, {method: model, source: tiny.gguf, adapter: llama_cpp, process: own}]}",
    "{adapter: llama_cpp, drafts: []}",
    "{adapter: onnx_rt, shards: [{layers: 1}, {layers: 1, adapter: openvino_rt}]}",
    "{adapter: torch_device, tensor_parallel: 2, drafts: [{method: suffix}]}",
)


@pytest.mark.slow
def test_four_runtimes_with_drafts_and_parts_of_their_own_decode_as_they_do_without_drafts(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", TINY)
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: tiny.gguf, name: tiny, weights: as_file, replicas: [{', '.join(REAL)}]}}\n"
        "cluster: {runtime: local}\ndevices: {threads: 1}\nlimits: {kv_cache: 16 MiB, max_running: 1}\n"
        "failover: {other_bits: new_requests}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{tmp_path}/store'}}\n"
        f"state: {{directory: '{tmp_path}/state'}}\nlogging: {{format: json}}\n"
    )

    def read(daemon: Daemon, group: str, **how: Any) -> str:
        answer = daemon.client.completions.create(
            model="tiny",
            prompt="hello-the-hello-the-hello",
            max_tokens=120,
            temperature=0.0,
            extra_body={"ignore_eos": True, "speculative_config": how, "system_fingerprint": group},
        )
        assert answer.system_fingerprint == group
        return answer.choices[0].text

    with running(path) as daemon:
        until_all_serve(daemon)
        until(lambda: [draft["phase"] for draft in daemon.status()["drafts"]] == ["ready"])
        ready = [replica["ready"] for replica in replicas(daemon)]
        assert [len(each["shards"]) for each in ready] == [0, 0, 2, 0]
        assert "2 ranks" in ready[3]["split"]
        assert [each["drafters"] for each in ready] == [["suffix", "replica-0-model"], [], ["suffix"], ["suffix"]]
        with pytest.raises(APIStatusError) as refused:
            read(daemon, NO_GROUP)
        groups = {*re.findall("fp_[0-9a-f]+", str(refused.value))} - {NO_GROUP}
        assert len(groups) == len(REAL), "each is a group of its own"
        texts = {group: read(daemon, group, method="off") for group in groups}
        assert {group: read(daemon, group, num_speculative_tokens=4) for group in groups} == texts
        drafted = [replica["totals"]["accepted"] > 0 for replica in replicas(daemon)]
        assert drafted == [True, False, True, True]
        for number in range(len(REAL)):
            assert read_while_one_is_killed(daemon, number, read, groups) == texts
            until_all_serve(daemon)


def read_while_one_is_killed(
    daemon: Daemon, number: int, read: Callable[[Daemon, str], str], groups: set[str]
) -> dict[str, str]:
    """Return a text of each group, during which the worker of this replica is killed."""
    pid = list_pids(daemon)[number]
    with ThreadPoolExecutor(len(groups)) as pool:
        reading = {group: pool.submit(read, daemon, group) for group in groups}
        until(lambda: replicas(daemon)[number]["streams"] or all(each.done() for each in reading.values()))
        os.kill(pid, signal.SIGKILL)
        texts = {group: each.result() for group, each in reading.items()}
    until(lambda: replicas(daemon)[number]["totals"]["restarts"] == 1)
    return texts
