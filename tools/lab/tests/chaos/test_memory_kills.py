"""A serving worker that the kernel kills for want of memory: its stream goes on, in a worker that has less."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from outrider_lab.chaos.faults.memory import find_memory_cgroup, starve

from tests.support.daemon import configuration, running
from tests.support.waiting import until


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_a_worker_that_was_killed_for_memory_comes_back_smaller_and_its_stream_goes_on(tmp_path: Path) -> None:
    if find_memory_cgroup() is None or os.geteuid() != 0:
        pytest.skip("memory cgroups cannot be made here")
    config = configuration(
        tmp_path, script="base_ms=20", extra="limits: {kv_cache: 64 MiB}\nspeculation: {method: 'off'}"
    )
    with running(config) as daemon:
        create = partial(daemon.client.completions.create, model="toy", prompt="the sea is", max_tokens=300, seed=3)
        whole = create(extra_body={"ignore_eos": True}).choices[0].text
        stream: Any = create(stream=True, extra_body={"ignore_eos": True})
        text, killed = "", False
        for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            if text and not killed:
                pid = daemon.status()["ready"]["pid"]
                killed = starve(pid, f"outrider-test-{os.getpid()}", partial(has_ended, pid))
                assert killed
        assert text == whole, "a lost target costs a pause"
        until(lambda: bool(daemon.status()["ready"] and daemon.status()["ready"]["memory_reduced"]), 120.0)
        reduced = daemon.status()["ready"]["memory_reduced"]
    assert reduced == [
        "loading with 64.0 MiB of KV cache and 1024 rows a forward: the kernel killed the worker for want of memory"
    ]
    log = daemon.log.read_text()
    assert "was killed for want of memory (SIGKILL by the kernel); free memory" in log
    assert "with half of its KV cache" in log
