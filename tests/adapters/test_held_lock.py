"""Whoever waits for a lock says so again and again: it is at work, and its watchdog is to see it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from adapters.held_lock import hold_lock

_DEADLINE_S = 120.0


def test_whoever_waits_says_for_how_long_until_it_has_the_lock(tmp_path: Path) -> None:
    path, said = tmp_path / "some.lock", queue.SimpleQueue[str]()
    entered = threading.Event()

    def wait() -> None:
        with hold_lock(path, lambda stage, _fraction: said.put(stage), "another process"):
            entered.set()

    waiter = threading.Thread(target=wait)
    with hold_lock(path, lambda stage, _fraction: said.put(f"no: {stage}"), "nobody"):
        waiter.start()
        stages = [said.get(timeout=_DEADLINE_S) for _ in range(3)]
        assert not entered.is_set()
    waiter.join(_DEADLINE_S)
    assert entered.is_set()
    assert all(stage.startswith("waiting for another process, ") for stage in stages)
    assert len(set(stages)) == 3
