"""What do streams notice of bad clients and of ten times the load? One daemon, calm and storm in turns.

    python -m outrider_lab.measure.overload [--config cluster.yaml] [--part bad|burst|all] [--seconds 8]
                                   [--burst-seconds 60] [--rounds 2] [--json OUT]

- `bad`: a few streams decode while something bad goes on. Given is the time between their events, beside that of the
  calm just before.
- `burst`: ten times as many requests at a time as the daemon takes in. Given are the accepted ones' times per token,
  beside those of a daemon that is exactly full, how soon the rest was refused, and the daemon's memory.

Bad clients are processes of their own with the lowest priority: the bench is about the daemon, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from adapters.free_port import find_free_port

STREAMS = 3
RUNNING, WAITING = 4, 8
TIMES_TOO_MANY = 10
TOKENS = 48
MIB = 1024 * 1024
START_TIMEOUT_S = 300.0
SETTLED_S = 1.0
PROMPT = "Write a long story about a lighthouse, its keeper and the sea."


@dataclass
class Seen:
    """Gaps between events of streams, s; times per output token, s; answers by status, with the time each took."""

    gaps: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)


def quantile(values: list[float], q: float) -> float:
    """Return a quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


@contextmanager
def serve(config: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """Run a daemon with this configuration, but for its limits; gives its address and its process."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    source = settings["model"]["source"]
    if "://" not in source and (config.parent / source).exists():
        settings["model"]["source"] = str((config.parent / source).resolve())
    settings["limits"] = settings.get("limits", {}) | {"max_running": RUNNING, "max_waiting": WAITING}
    settings["cluster"] = {"runtime": "local"}
    port = find_free_port()
    settings["api"] = {"port": port, "admin_socket": str(directory / "admin.sock")}
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with (directory / "daemon.log").open("wb") as log:
        command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + START_TIMEOUT_S
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"the daemon did not come up:\n{(directory / 'daemon.log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60.0)


def _ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready").status_code == httpx.codes.OK
    return False


async def stream(client: httpx.AsyncClient, url: str, seen: Seen, max_tokens: int) -> None:
    """Read one stream, and note when its events come."""
    body = {"model": _model(url), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0.0}
    begun, first, last, count = time.perf_counter(), 0.0, 0.0, 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        seen.statuses[str(answer.status_code)] += 1
        if answer.status_code != httpx.codes.OK:
            await answer.aread()
            seen.refused_s.append(time.perf_counter() - begun)
            seen.retry_after_s.append(int(answer.headers.get("Retry-After", "0")))
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or '"content":""' in line:
                continue
            now = time.perf_counter()
            if count:
                seen.gaps.append(now - last)
            first, last, count = first or now, now, count + 1
    if count > 1:
        seen.ttfts.append(first - begun)
        seen.tpots.append((last - first) / max(1, max_tokens - 1))


_models: dict[str, str] = {}


def _model(url: str) -> str:
    if url not in _models:
        _models[url] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return _models[url]


async def watch_streams(url: str, seconds: float) -> Seen:
    """Decode STREAMS streams for so long; what they begin with does not count."""
    seen = Seen()

    async def keep_on(client: httpx.AsyncClient) -> None:
        while True:
            await stream(client, url, seen, 1000)

    async with httpx.AsyncClient(timeout=None) as client:  # noqa: S113 -- the bench ends them
        tasks = [asyncio.create_task(keep_on(client)) for _ in range(STREAMS)]
        await asyncio.sleep(SETTLED_S)
        seen.gaps.clear()
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


# ------------------------------------------------------------------ bad clients, each in a process of its own

Answers = Any  # a queue of (status, seconds)


def post_for_ever(url: str, content: bytes, stop: Event, answers: Answers) -> None:
    """Send one body again and again."""
    os.nice(19)
    with httpx.Client(timeout=120.0) as client:
        while not stop.is_set():
            begun = time.perf_counter()
            with suppress(httpx.HTTPError):
                answer = client.post(f"{url}/v1/chat/completions", content=content, headers=_JSON)
                answers.put((answer.status_code, time.perf_counter() - begun))


_JSON = {"Content-Type": "application/json"}


def large_prompt(model: str) -> bytes:
    """8 MiB of digits."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "7" * (8 * MIB - 200)}]}).encode()


def middling_prompt(model: str) -> bytes:
    """As much text as is tokenised before it is seen not to fit."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "the sea " * 15_000}]}).encode()


def _ask_for_schema(model: str, properties: int) -> bytes:
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(properties)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    head = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return json.dumps(head | {"response_format": wanted}).encode()


def large_schema(model: str) -> bytes:
    """A schema of 8 MiB."""
    return _ask_for_schema(model, 215_000)


def medium_schema(model: str) -> bytes:
    """A schema of 514 KiB."""
    return _ask_for_schema(model, 14_000)


def no_body(model: str) -> bytes:
    """Nothing is sent."""
    return b""


def plain_request(model: str) -> bytes:
    """The same request as those with a schema, without one: it is served too."""
    head = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return json.dumps(head).encode()


def small_schema(model: str) -> bytes:
    """A schema of 14 KiB, which is served, with nearly as many properties as can be followed."""
    return _ask_for_schema(model, 400)


def wide_schema(model: str) -> bytes:
    """A schema that is compiled, and cannot be followed."""
    return _ask_for_schema(model, 1_700)


def idle_connections(url: str, _: bytes, stop: Event, answers: Answers) -> None:
    """Open 10,000 connections, and open them again when they are closed."""
    os.nice(19)
    host, port = url.removeprefix("http://").split(":")
    held: list[socket.socket] = []
    with suppress(KeyboardInterrupt):
        while not stop.is_set():
            for _number in range(50):
                if len(held) < 10_000:
                    one = socket.socket()
                    one.settimeout(5.0)
                    with suppress(OSError):
                        one.connect((host, int(port)))
                        held.append(one)
            time.sleep(0.02)
    answers.put((f"opened {len(held)}", 0.0))
    for one in held:
        one.close()


def drip_feeders(url: str, _: bytes, stop: Event, answers: Answers) -> None:
    """200 clients that send a request byte by byte, half of them stuck in the head, half in the body."""
    os.nice(19)
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    length = b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n"

    def connect(number: int) -> socket.socket:
        one = socket.create_connection((host, int(port)), 5.0)
        one.setblocking(False)
        one.send(head + (length if number % 2 else b"X-Slow: "))
        return one

    held = [connect(number) for number in range(200)]
    while not stop.is_set():
        for number, one in enumerate(held):
            try:
                one.send(b"x")
                with suppress(BlockingIOError):
                    if found := one.recv(1000):
                        answers.put((int(found[9:12]), 0.0))
                        raise ConnectionResetError
            except OSError:
                one.close()
                with suppress(OSError):
                    held[number] = connect(number)
        time.sleep(0.25)
    for one in held:
        one.close()


BAD: list[tuple[str, Any, Any, int]] = [
    ("8 MiB of digits, 2 clients", post_for_ever, large_prompt, 2),
    ("120 KB of text, 2 clients", post_for_ever, middling_prompt, 2),
    ("8 MiB schema, 2 clients", post_for_ever, large_schema, 2),
    ("514 KiB schema, 2 clients", post_for_ever, medium_schema, 2),
    ("no schema, 1 client", post_for_ever, plain_request, 1),
    ("14 KiB schema, 1 client", post_for_ever, small_schema, 1),
    ("60 KiB schema, 1 client", post_for_ever, wide_schema, 1),
    ("10,000 idle connections", idle_connections, no_body, 1),
    ("200 drip-feeding clients", drip_feeders, no_body, 1),
    ("nothing", None, no_body, 0),
]


def measure_bad(url: str, pid: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return for each kind of bad client what streams have beside it, over what they have before and behind."""
    context = multiprocessing.get_context("spawn")
    found = []
    for name, target, argument, count in BAD:
        calm, storm, answers_seen = Seen(), Seen(), Counter[str]()
        slowest: list[float] = []
        for _ in range(rounds):
            calm.gaps += asyncio.run(watch_streams(url, seconds)).gaps
            stop, answers = context.Event(), context.Queue()
            arguments = (url, argument(_model(url)), stop, answers)
            clients = [context.Process(target=target, args=arguments, daemon=True) for _ in range(count)]
            for client in clients:
                client.start()
            time.sleep(3.0 if clients else 0.0)  # until they are at it
            seen = asyncio.run(watch_streams(url, seconds))
            storm.gaps += seen.gaps
            storm.statuses += seen.statuses
            stop.set()
            until = time.monotonic() + 20.0
            while any(client.is_alive() for client in clients) and time.monotonic() < until:
                _take(answers, answers_seen, slowest)
                time.sleep(0.05)
            _take(answers, answers_seen, slowest)
            for client in clients:
                client.kill()
                client.join()
        row: dict[str, Any] = {"what": name, "answers": dict(answers_seen), "streams": dict(storm.statuses)}
        row |= {"answer_p50_s": quantile(slowest, 0.5), "answer_max_s": max(slowest, default=float("nan"))}
        for label, of in (("mean", statistics.fmean), ("p50", lambda v: quantile(v, 0.5)), ("p99", _p99)):
            before, beside = of(calm.gaps or [float("nan")]), of(storm.gaps or [float("nan")])
            row |= {
                f"calm_{label}_ms": before * 1e3,
                f"storm_{label}_ms": beside * 1e3,
                f"ratio_{label}": beside / before,
            }
        row["storm_max_ms"], row["calm_max_ms"] = (max(of.gaps, default=0.0) * 1e3 for of in (storm, calm))
        row["daemon_rss_mib"] = psutil.Process(pid).memory_info().rss / MIB
        found.append(row)
        print(_format_bad(row), flush=True)
    return found


def _p99(values: list[float]) -> float:
    return quantile(values, 0.99)


def _take(answers: Answers, seen: Counter[str], slowest: list[float]) -> None:
    while not answers.empty():
        status, seconds = answers.get()
        seen[str(status)] += 1
        if seconds:
            slowest.append(seconds)


def _format_bad(row: dict[str, Any]) -> str:
    figures = "  ".join(
        f"{label} {row[f'calm_{label}_ms']:.1f} -> {row[f'storm_{label}_ms']:.1f} ms ({row[f'ratio_{label}']:.2f}x)"
        for label in ("mean", "p50", "p99")
    )
    answers = f"answers {row['answers']} p50 {row['answer_p50_s']:.2f} s, max {row['answer_max_s']:.2f} s"
    rest = f"max {row['storm_max_ms']:.0f} ms  {answers}  RSS {row['daemon_rss_mib']:.0f} MiB"
    return f"{row['what']:28} ITL {figures}  {rest}"


# ------------------------------------------------------------------ ten times the load


def crowd(url: str, content: bytes, stop: Event, answers: Answers) -> None:
    """The clients that are too many: each asks again a second after it was refused, whatever it was told."""
    os.nice(19)
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nConnection: close\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(content) + content

    async def one() -> None:
        while not stop.is_set():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(whole)
                status = (await reader.readline())[9:12].decode()
                answers.put((status, 0.0))
                await reader.read()
                writer.close()
            await asyncio.sleep(1.0)

    async def everybody() -> None:
        count = (TIMES_TOO_MANY - 1) * (RUNNING + WAITING)
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(everybody())


async def load(url: str, at_a_time: int, seconds: float) -> Seen:
    """Keep so many clients at it; who is refused asks again a second later."""
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_a_time)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:  # noqa: S113 -- the bench ends them
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                refused = len(seen.refused_s)
                with suppress(httpx.HTTPError):
                    await stream(client, url, seen, TOKENS)
                if len(seen.refused_s) > refused:
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(one() for _ in range(at_a_time)))
    return seen


def measure_burst(url: str, pid: int, seconds: float) -> dict[str, Any]:
    """Return what accepted requests have under ten times the load, and what they have where the daemon is just full."""
    capacity = RUNNING + WAITING
    daemon, context = psutil.Process(pid), multiprocessing.get_context("spawn")
    asyncio.run(load(url, RUNNING, 5.0))
    alone = asyncio.run(load(url, 1, 8.0))
    full = asyncio.run(load(url, capacity, seconds))
    before, others = daemon.memory_info().rss, Counter[str]()
    stop, answers = context.Event(), context.Queue()
    body = {"model": _model(url), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    content = json.dumps(body | {"stream": True, "ignore_eos": True, "temperature": 0.0}).encode()
    clients = context.Process(target=crowd, args=(url, content, stop, answers), daemon=True)
    clients.start()
    time.sleep(3.0)
    storm = asyncio.run(load(url, capacity, seconds))
    most = daemon.memory_info().rss
    stop.set()
    _take(answers, others, [])
    clients.kill()
    clients.join()
    back_s = _time_recovery(url, 1.5 * quantile(alone.ttfts, 0.5))
    row: dict[str, Any] = {
        "at_a_time": TIMES_TOO_MANY * capacity,
        "capacity": capacity,
        "seconds": seconds,
        "statuses": dict(storm.statuses),
        "statuses_of_the_crowd": dict(others),
        "full_tpot_p50_ms": quantile(full.tpots, 0.5) * 1e3,
        "full_tpot_p99_ms": quantile(full.tpots, 0.99) * 1e3,
        "storm_tpot_p50_ms": quantile(storm.tpots, 0.5) * 1e3,
        "storm_tpot_p99_ms": quantile(storm.tpots, 0.99) * 1e3,
        "tpot_p50_ratio": quantile(storm.tpots, 0.5) / quantile(full.tpots, 0.5),
        "tpot_p99_ratio": quantile(storm.tpots, 0.99) / quantile(full.tpots, 0.99),
        "refused_p50_ms": quantile(storm.refused_s, 0.5) * 1e3,
        "refused_p99_ms": quantile(storm.refused_s, 0.99) * 1e3,
        "retry_after_s": dict(Counter(map(str, storm.retry_after_s)).most_common(5)),
        "ttft_alone_ms": quantile(alone.ttfts, 0.5) * 1e3,
        "back_to_normal_s": back_s,
        "rss_before_mib": before / MIB,
        "rss_at_the_end_mib": most / MIB,
    }
    for name, value in row.items():
        print(f"{name:24} {value:.2f}" if isinstance(value, float) else f"{name:24} {value}", flush=True)
    return row


def _time_recovery(url: str, ttft_s: float) -> float:
    """Return how long it takes until a request has its first token within this time; NaN where it never has."""

    async def ask() -> float:
        begun = time.monotonic()
        async with httpx.AsyncClient(timeout=None) as client:  # noqa: S113 -- the bench ends it
            while time.monotonic() - begun < 30.0:
                seen = Seen()
                await stream(client, url, seen, 4)
                if seen.ttfts and seen.ttfts[0] <= ttft_s:
                    return time.monotonic() - begun
                await asyncio.sleep(0.1)
        return float("nan")

    return asyncio.run(ask())


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--part", choices=["bad", "burst", "all"], default="all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase beside bad clients")
    parser.add_argument("--burst-seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2, help="calm and storm so often, in turns")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    print(found)
    with tempfile.TemporaryDirectory() as directory, serve(asked.config.resolve(), Path(directory)) as (url, pid):
        if asked.part in ("bad", "all"):
            found["bad"] = measure_bad(url, pid, asked.seconds, asked.rounds)
        if asked.part in ("burst", "all"):
            found["burst"] = measure_burst(url, pid, asked.burst_seconds)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


if __name__ == "__main__":
    main()
