"""Does the daemon give everything back? Mixed requests, many of them cancelled, malformed or read slowly, then idle.

    python -m outrider_lab.soak [--config cluster.yaml] [--requests 500] [--concurrency 12] [--seed S] [--json OUT]

Bars:

- Slots, KV blocks, memory and open files within 5 % of the start.
- No 5xx.
- Bad requests refused with their own status.
- Every answer that was not cancelled is the text that the same request gave before, alone and without speculation.

The start is measured after a warm-up with the same mixture, when memory is steady. Exits 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from adapters.free_port import find_free_port
from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.config.load import admin_socket_path, load_config
from orchestrator.errors import OutriderError
from outrider_lab.soak.requests import Mix, Seen, Soak, list_malformed_requests, make_cases

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
MOST_CHANGE = 0.05
CLOSED_WITHIN_S = 0.5  # by then the daemon has seen that the question for its status has hung up
STEADY_CHANGE = 0.01
MOST_ROUNDS = 20
EXACT = ("running", "waiting", "streams", "restarts")
MEMORY = ("worker_rss_bytes", "daemon_rss_bytes")
FORMULAS = {
    "start": "when nothing runs, after the reference outputs, filling the KV cache once, and rounds of --warmup "
    "requests until resident memory grew by less than 1 % in one",
    "end": "after all requests, when nothing has run for --idle seconds",
    "free_blocks": "at least 95 % of the start",
    "bytes, files": "at most 105 % of the start; resident memory of the processes as the system says",
    "wrong outputs": "text or number of tokens is not that of the same request alone, without speculation",
}


def state(admin: Path, daemon_pid: int) -> dict[str, int]:
    """Return what must come back. Memory is asked of the system: the worker's own gauge is as old as its last round."""
    status = query_daemon(admin)
    gauges, daemon = status["gauges"], psutil.Process(daemon_pid)
    time.sleep(CLOSED_WITHIN_S)
    return {
        "running": gauges["running"],
        "waiting": gauges["waiting"],
        "streams": status["streams"],
        "restarts": status["totals"]["restarts"],
        "free_blocks": gauges["free_blocks"],
        "worker_rss_bytes": psutil.Process(status["ready"]["pid"]).memory_info().rss,
        "daemon_rss_bytes": daemon.memory_info().rss,
        "daemon_files": daemon.num_fds(),
    }


def bars(start: dict[str, int], end: dict[str, int], seen: Seen) -> list[tuple[str, str, str, str, bool]]:
    """Return (what, start, end, bar, passed)."""
    rows = []
    for name, before in start.items():
        after = end[name]
        if name in EXACT:
            good, bar = after == before, "the same"
        elif name == "free_blocks":
            good, bar = after >= before * (1.0 - MOST_CHANGE), f"at least {1.0 - MOST_CHANGE:.0%}"
        else:
            good, bar = after <= before * (1.0 + MOST_CHANGE), f"at most {1.0 + MOST_CHANGE:.0%}"
        rows.append((name, _format_value(name, before), _format_value(name, after), bar, good))
    for name, found in (
        ("5xx", seen.server_errors),
        ("other surprises", seen.unexpected),
        (f"wrong outputs, of {seen.compared} compared", seen.wrong),
    ):
        rows.append((name, "", str(len(found)), "0", not found))
    return rows


def _format_value(name: str, value: int) -> str:
    return f"{value / 2**20:.1f} MiB" if name.endswith("_bytes") else str(value)


@contextmanager
def daemon(config: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start `outrider serve`, wait until it is ready; stop it with SIGTERM at the end."""
    command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _ready(port):
            if process.poll() is not None:
                sys.exit(f"the daemon ended with {process.returncode} before it was ready (see above)")
            if time.monotonic() > deadline:
                sys.exit(f"the daemon was not ready within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()  # does nothing to one that has ended
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def settle(admin: Path, idle_s: float) -> None:
    """Wait until nothing runs, then `idle_s` more. What never ends is left to the bars."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < deadline:
        status = query_daemon(admin)
        if not (status["gauges"]["running"] or status["gauges"]["waiting"] or status["streams"]):
            break
        time.sleep(0.1)
    time.sleep(idle_s)


def fill(soak: Soak, ready: dict[str, Any], sequences: int) -> None:
    """Touch the whole KV cache, as the first days of a service would."""
    with Console(stderr=True).status("filling the KV cache"):
        positions = ready["kv_blocks"] * ready["block_tokens"]
        asyncio.run(soak.fill_cache(positions, sequences, ready["context_tokens"], ready["vocabulary_size"]))


def warm_up(soak: Soak, admin: Path, daemon_pid: int, arguments: argparse.Namespace) -> int:
    """Send rounds of requests until memory is steady: runtimes keep what they prepared for each new batch shape.

    Returns how many requests that took. What never is steady is left to the bars.
    """
    before, sent, steady = state(admin, daemon_pid), 0, False
    while not steady and sent < MOST_ROUNDS * arguments.warmup:
        asyncio.run(soak.fire(arguments.warmup))
        sent += int(arguments.warmup)
        after = state(admin, daemon_pid)
        steady = all(after[name] <= before[name] * (1.0 + STEADY_CHANGE) for name in MEMORY)
        before = after
    return sent


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; returns `summary`, `runs`, `environment` and `formulas`."""
    loaded, port = load_config(arguments.config), find_free_port()
    admin = admin_socket_path(loaded, port)
    mix = Mix(arguments.concurrency, arguments.rest, arguments.cancel_within, arguments.seed)
    with daemon(arguments.config, port) as process:
        ready = query_daemon(admin)["ready"]
        soak = Soak(
            f"http://127.0.0.1:{port}",
            ready["model"],
            make_cases(ready["model"], arguments.prompts, arguments.max_tokens),
            list_malformed_requests(ready["model"], int(loaded.limits.max_body)),
            mix,
        )
        asyncio.run(soak.take_references())
        fill(soak, ready, loaded.limits.max_running)
        warmed_up = warm_up(soak, admin, process.pid, arguments)
        settle(admin, arguments.idle)
        start, soak.seen = state(admin, process.pid), Seen()
        began_s = time.monotonic()
        asyncio.run(soak.fire(arguments.requests))
        duration_s = time.monotonic() - began_s
        settle(admin, arguments.idle)
        end = state(admin, process.pid)
    rows = bars(start, end, soak.seen)
    rows.append(("exit code of the daemon", "", str(process.returncode), "0", process.returncode == 0))
    return {
        "summary": {
            "passed": all(good for *_, good in rows),
            "duration_s": duration_s,
            "warmup_requests": warmed_up,
            "compared": soak.seen.compared,
            **{f"{name}_start": value for name, value in start.items()},
            **{f"{name}_end": value for name, value in end.items()},
            "server_errors": soak.seen.server_errors,
            "unexpected": soak.seen.unexpected,
            "wrong_outputs": soak.seen.wrong,
        },
        "runs": [
            {"bars": [dict(zip(("what", "start", "end", "bar", "passed"), row, strict=True)) for row in rows]},
            {"ends": {f"{kind}: {end}": count for (kind, end), count in sorted(soak.seen.ends.items())}},
        ],
        "environment": {
            "outrider": version("outrider"),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "model": ready["model"],
            "device": f"{ready['adapter']} {ready['device']}",
            "runtime": loaded.cluster.runtime,
            **{name: getattr(arguments, name) for name in ("requests", "concurrency", "warmup", "max_tokens", "seed")},
        },
        "formulas": FORMULAS,
    }


def show(result: dict[str, Any]) -> None:
    """Print how the requests ended, and the bars."""
    console = Console()
    bars_run, ends_run = result["runs"]
    environment, summary = result["environment"], result["summary"]
    ends = Table(
        title=f"{environment['requests']} requests, {environment['concurrency']} at a time, {environment['model']}"
    )
    ends.add_column("request: end")
    ends.add_column("count", justify="right")
    for name, count in ends_run["ends"].items():
        ends.add_row(name, str(count))
    console.print(ends)
    table = Table(title=f"{summary['duration_s']:.0f} s, then idle; warm-up {summary['warmup_requests']} requests")
    for name in ("", "start", "end", "bar", ""):
        table.add_column(name, justify="right" if name in ("start", "end") else "left")
    for row in bars_run["bars"]:
        verdict = "[green]ok[/green]" if row["passed"] else "[red]FAILED[/red]"
        table.add_row(row["what"], row["start"], row["end"], row["bar"], verdict)
    console.print(table)
    for surprise in (*summary["server_errors"], *summary["unexpected"], *summary["wrong_outputs"])[:20]:
        console.print(surprise, markup=False, highlight=False)


def main() -> int:
    """Run, print, return 0 when every bar was met."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider_lab.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--prompts", type=Path, default=Path("tools/prompts.jsonl"))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=100, help="requests in each round of the warm-up")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48, help="the longest answer")
    parser.add_argument("--cancel-within", type=float, default=1.5, help="seconds")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds that a slow reader waits after each piece")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds without requests before measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        result = run(arguments)
    except OutriderError as error:
        sys.exit(f"soak: {error}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    show(result)
    return 0 if result["summary"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
