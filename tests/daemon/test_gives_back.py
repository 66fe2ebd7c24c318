"""What clients took of a daemon comes back when they are gone, whatever they did, and answers stay right meanwhile."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI

from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

OFF: dict[str, Any] = {"speculative_config": {"method": "off"}}
CASES: list[dict[str, Any]] = [
    {"model": "toy", "prompt": f"{beginning} the sea is {number}", "max_tokens": 12 + 4 * number, **sampling}
    for number, beginning in enumerate(("they say", "they say that", "once"))
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": number})
]
MALFORMED: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b'{"model": "nobody", "prompt": "a"}', 404),
    (b'{"model": "toy", "prompt": "a", "max_tokens": -1}', 400),
    (b'{"model": "toy", "prompt": "' + b"a" * (300 << 10) + b'"}', 413),
]
KINDS = ("stream", "whole", "cancelled", "malformed")
ROUND = 32
_MOST_ROUNDS = 20
_STEADY, _ALLOWED = 1.01, 1.05
"""By how much memory may grow in a round behind which it is taken for steady, and in those that follow."""


def ask(client: OpenAI, number: int, expected: list[str]) -> None:
    kind, place = KINDS[number % len(KINDS)], number // len(KINDS)
    case, text = CASES[place % len(CASES)], expected[place % len(CASES)]
    if kind == "malformed":
        content, status = MALFORMED[place % len(MALFORMED)]
        assert httpx.post(f"{client.base_url}completions", content=content, timeout=120.0).status_code == status
    elif kind == "whole":
        assert client.completions.create(**case).choices[0].text == text
    elif kind == "stream":
        chunks = client.completions.create(**case, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    else:
        stream = client.completions.create(**case | {"max_tokens": 200}, stream=True)
        for _ in itertools.islice(stream, 1 + place % 3):
            pass
        stream.close()


def read_state(daemon: Daemon) -> dict[str, int]:
    """Return what the daemon and its worker hold, once nothing runs any more and no client is connected."""
    process = psutil.Process(daemon.process.pid)

    def idle() -> bool:
        status = daemon.status()
        running = status["gauges"]["running"] or status["gauges"]["waiting"] or status["streams"]
        return not (running or count_clients(process))

    until(idle)
    status = daemon.status()
    return {
        "restarts": status["totals"]["restarts"],
        "used_blocks": -status["gauges"]["free_blocks"],
        "files": process.num_fds(),
        "daemon_bytes": process.memory_info().rss,
        "worker_bytes": psutil.Process(status["ready"]["pid"]).memory_info().rss,
    }


def count_clients(process: psutil.Process) -> int:
    """Return how many connections to the API its daemon holds."""
    connections = process.net_connections("tcp")
    ports = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return sum(connection.laddr.port in ports and bool(connection.raddr) for connection in connections)


def test_the_daemon_gives_everything_back_and_answers_right_in_bad_company(tmp_path: Path) -> None:
    limits = "limits: {max_running: 4, max_body: 256 KiB, kv_cache: 4 MiB}"
    config = configuration(tmp_path, script="base_ms=1", extra=limits)
    with running(config) as daemon, ThreadPoolExecutor(8) as clients:

        def connect() -> OpenAI:
            return OpenAI(base_url=f"{daemon.url}/v1", api_key="unused", max_retries=0)

        with connect() as client:
            expected = [client.completions.create(**case, extra_body=OFF).choices[0].text for case in CASES]

        def play_round() -> dict[str, int]:
            with connect() as client:
                list(clients.map(lambda number: ask(client, number, expected), range(ROUND)))
            return read_state(daemon)

        start = play_round()
        for _ in range(_MOST_ROUNDS):
            before, start = start, play_round()
            if all(start[name] <= before[name] * _STEADY for name in ("daemon_bytes", "worker_bytes")):
                break
        end = play_round()
        assert end["restarts"] == start["restarts"] == 0
        assert end["used_blocks"] == start["used_blocks"]
        process = psutil.Process(daemon.process.pid)
        until(lambda: process.num_fds() <= start["files"], 30.0)
        for name in ("daemon_bytes", "worker_bytes"):
            assert end[name] <= start[name] * _ALLOWED, (name, start, end)
