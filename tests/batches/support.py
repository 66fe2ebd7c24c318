"""Inputs and processes of batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon


def line_of(number: int, **changes: Any) -> dict[str, Any]:
    """Return a request in OpenAI's batch format; every second one is a chat."""
    body: dict[str, Any] = {"model": "toy", "max_tokens": 24, "seed": number, "ignore_eos": True}
    if number % 2:
        body["messages"] = [{"role": "user", "content": f"the sea {number}"}]
    else:
        body["prompt"] = f"the sea {number}"
    url = "/v1/chat/completions" if number % 2 else "/v1/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body} | changes


def write_input(path: Path, lines: list[Any]) -> Path:
    """Write lines; texts are written as they are."""
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines), encoding="utf-8")
    return path


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the whole results in an output file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def count_results(path: Path) -> int:
    """Return how many whole lines there are now."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start_batch(source: Path, output: Path, url: str, *more: str) -> subprocess.Popen[str]:
    """Start `outrider batch`."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "orchestrator.cli.main", "batch", "--input", str(source), "--output", str(output)),
            *("--url", f"{url}/v1", *more),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slow_script(directory: Path) -> str:
    """What the simulated model is to do: rounds take a moment, and six times as long within `slow_down`."""
    return f"base_ms=4&drift_ms=20&drift_while={directory}/slow"


@contextmanager
def slow_down(directory: Path) -> Iterator[None]:
    """Let a batch last until a test has done what it does meanwhile: a machine may be at something else for long."""
    slow = directory / "slow"
    slow.touch()
    try:
        yield
    finally:
        slow.unlink()


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait for a condition. Raises AssertionError where it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def kill_worker(daemon: Daemon) -> None:
    """Send SIGKILL to the target's worker."""
    os.kill(daemon.status()["ready"]["pid"], signal.SIGKILL)


def find_batch(output: Path) -> int:
    """Return the process of `outrider batch` that writes an output, whoever started it."""
    for found in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = found.read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if str(output) in words and "submit" not in words:
            return int(found.parent.name)
    raise AssertionError(f"nothing writes {output}")
