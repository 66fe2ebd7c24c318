"""No worker outlives a daemon that was killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import psutil
import pytest

from tests.support import engines
from tests.support.workers import is_gone

pytestmark = pytest.mark.asyncio


DRIVER = """
import asyncio, sys
from orchestrator.workers.local import LocalCluster
from orchestrator.workers.ray_runtime import RayCluster
from orchestrator.workers.messages import Ready, Submit
from tests.support import engines

async def main():
    cluster = LocalCluster() if sys.argv[1] == "local" else RayCluster("")
    await cluster.open()
    worker = await cluster.start(engines.spec(step_s=0.01))
    async for event in worker.events():
        if isinstance(event, Ready):
            worker.send(Submit("a", [int(sys.argv[2]), 5], max_tokens=100_000))
            print(event.pid, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("runtime", "prompt", "within_s"),
    [
        ("local", 1, 2.0),
        ("local", engines.HANG, 2.0),
        pytest.param("ray", 1, 10.0, marks=pytest.mark.ray),
    ],
)
async def test_no_worker_outlives_a_killed_daemon(runtime: str, prompt: int, within_s: float) -> None:
    driver = subprocess.Popen(  # noqa: ASYNC220 -- it is killed below, and must not be asyncio's child
        [sys.executable, "-c", DRIVER, runtime, str(prompt)],
        cwd=engines.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        pid = int(await asyncio.to_thread(driver.stdout.readline))
        assert psutil.pid_exists(pid)
        driver.kill()
    assert await is_gone(pid, within_s)
