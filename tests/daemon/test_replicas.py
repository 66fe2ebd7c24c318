"""Several workers of one target behind one endpoint, in a real daemon, seen by the `openai` client."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import tiny_models
from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

TOKENS = 120


def ask(number: int) -> dict[str, Any]:
    return {
        "model": "toy",
        "prompt": f"the sea is {number} " * 6,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": number,
        "extra_body": {"ignore_eos": True},
    }


def text_of(daemon: Daemon, number: int) -> str:
    return daemon.client.completions.create(**ask(number)).choices[0].text


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> dict[int, str]:
    """The texts of one worker that nothing happens to."""
    return {number: text_of(plain, number) for number in range(8)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("two"), script="base_ms=10&row_ms=3", replicas="2")) as daemon:
        until_all_serve(daemon)
        yield daemon


def replicas(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.status()["replicas"]
    return found


def until_all_serve(daemon: Daemon) -> None:
    deadline = time.monotonic() + 240.0
    while {"ready"} != (phases := {one["phase"] for one in replicas(daemon)}):
        assert "failed" not in phases, daemon.log.read_text()
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.02)


class Readers:
    """Streams that are read at once, each in a thread."""

    def __init__(self, daemon: Daemon, numbers: range) -> None:
        self._daemon = daemon
        self._begun = threading.Semaphore(0)
        self._numbers = numbers
        self._pool = ThreadPoolExecutor(len(numbers))
        self._pieces: dict[int, list[str]] = {number: [] for number in numbers}
        self._texts = {number: self._pool.submit(self._read, number) for number in numbers}

    def until_all_have_begun(self) -> None:
        for _ in self._numbers:
            assert self._begun.acquire(timeout=180.0)

    def until_all_go_on(self, pieces: int) -> None:
        """Wait until every stream has had so many pieces more, or its last."""
        wanted = {number: len(had) + pieces for number, had in self._pieces.items()}
        while not all(
            text.done() or len(self._pieces[number]) >= wanted[number] for number, text in self._texts.items()
        ):
            time.sleep(0.01)

    def texts(self) -> dict[int, str]:
        found = {number: text.result(60.0) for number, text in self._texts.items()}
        self._pool.shutdown()
        return found

    def _read(self, number: int) -> str:
        pieces = self._pieces[number]
        for chunk in self._daemon.client.completions.create(**ask(number), stream=True):
            pieces.extend(choice.text for choice in chunk.choices)
            if len(pieces) == 3:
                self._begun.release()
        return "".join(pieces)


def test_requests_that_come_together_are_spread_and_answered_as_by_one_worker(daemon, expected):
    spread = []
    for _ in range(10):  # on a busy machine one may seem slower for a while
        before = [one["totals"]["generated"] for one in replicas(daemon)]
        readers = Readers(daemon, range(8))
        assert readers.texts() == expected
        after = [one["totals"]["generated"] for one in replicas(daemon)]
        streams = [(b - a) / TOKENS for a, b in zip(before, after, strict=True)]
        assert sum(streams) == 8
        spread.append(min(streams))
        if spread[-1] >= 3:
            return
    raise AssertionError(f"one of two replicas had {spread} of 8 requests")


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_killed_replica_costs_its_streams_the_way_to_the_other_one(tmp_path: Path, expected, runtime):
    # A start takes longer than the streams that go on without it, on a busy machine, too.
    config = configuration(tmp_path, script="base_ms=10&load_ms=10000", replicas="2", runtime=runtime)
    with running(config) as daemon:
        until_all_serve(daemon)
        readers = Readers(daemon, range(8))
        readers.until_all_have_begun()
        os.kill(replicas(daemon)[1]["ready"]["pid"], signal.SIGKILL)
        until(lambda: replicas(daemon)[1]["phase"] != "ready")  # pieces that were sent before say nothing
        readers.until_all_go_on(5)
        assert replicas(daemon)[1]["phase"] != "ready", "nobody waited for the one that was killed"
        assert readers.texts() == expected
        until_all_serve(daemon)
        assert [one["totals"]["restarts"] for one in replicas(daemon)] == [0, 1]


def test_when_all_are_killed_streams_wait_for_whoever_comes_first(daemon, expected):
    readers = Readers(daemon, range(8))
    readers.until_all_have_begun()
    restarts = [one["totals"]["restarts"] for one in replicas(daemon)]
    for one in replicas(daemon):
        os.kill(one["ready"]["pid"], signal.SIGKILL)
    daemon.wait_for("", phase="restarting")
    assert httpx.get(f"{daemon.url}/ready").status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert readers.texts() == expected
    until_all_serve(daemon)
    assert [one["totals"]["restarts"] for one in replicas(daemon)] == [count + 1 for count in restarts]


def test_a_prompt_goes_where_its_beginning_is_cached(daemon):
    long = "it was a dark and stormy night and the rain fell in torrents " * 8

    def count_cached(text: str) -> int:
        answer = daemon.client.completions.create(**ask(1) | {"prompt": text, "max_tokens": 4})
        return answer.usage.prompt_tokens_details.cached_tokens

    first = [one["totals"]["generated"] for one in replicas(daemon)]
    busy = Readers(daemon, range(1))
    busy.until_all_have_begun()
    assert count_cached(long) == 0  # beside a busy replica: on the other one
    busy.texts()
    after = [one["totals"]["generated"] for one in replicas(daemon)]
    made = sorted(b - a for a, b in zip(first, after, strict=True))
    assert made in ([4, TOKENS], [0, TOKENS + 4])  # the latter where the other one seemed slow, on a busy machine
    assert count_cached(long + "and then") > len(long) // 2
    assert count_cached("another " * 40) == 0
    assert count_cached(long + "but now") > len(long) // 2


def test_status_has_a_row_for_each_replica_and_metrics_a_label(daemon, outrider):
    text_of(daemon, 1)
    shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].split())
    assert any(one["last_route"].startswith("predicted to take") for one in daemon.status()["replicas"])
    for one in replicas(daemon):
        assert f"replica {one['engine']}" in shown
        assert f"local pid {one['ready']['pid']}" in shown
    counted = httpx.get(f"{daemon.url}/metrics").text
    for engine in "01":
        assert f'outrider_kv_cache_usage_perc{{engine="{engine}",model_name="toy"}}' in counted
        assert (
            f'outrider_request_success_total{{engine="{engine}",finished_reason="length",model_name="toy"}}' in counted
        )


def test_openvino_on_one_core_each_and_on_all_says_the_same(tmp_path: Path):
    cores = sorted(os.sched_getaffinity(0))
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model:\n  source: tiny\n  name: toy\n"
        f"  replicas: [{{cores: [{cores[0]}]}}, {{cores: [{cores[-1]}]}}, {{}}]\n"
        f"cluster: {{runtime: local}}\napi: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\n"
        f"store: {{directory: '{tmp_path}/store'}}\nlimits: {{kv_cache: 16 MiB, max_running: 4}}\ndrafts: []\n"
    )
    with running(config) as daemon:
        until_all_serve(daemon)
        assert [one["ready"]["cores"] for one in replicas(daemon)] == [[cores[0]], [cores[-1]], cores]
        alone = text_of(daemon, 1)
        deadline = time.monotonic() + 240.0
        with ThreadPoolExecutor(12) as pool:  # more than two of them have places for
            while not all(one["totals"]["generated"] >= TOKENS for one in replicas(daemon)):
                assert set(pool.map(lambda _: text_of(daemon, 1), range(12))) == {alone}
                assert time.monotonic() < deadline
        readers = Readers(daemon, range(1, 4))
        readers.until_all_have_begun()
        os.kill(replicas(daemon)[1]["ready"]["pid"], signal.SIGKILL)
        assert readers.texts()[1] == alone
