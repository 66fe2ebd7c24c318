"""Real workers are replaced while streams run: KV caches go along, and whoever dies, no token differs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.port import KvMoveTotals
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import SharedMemory, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.shared_memory import SharedMemoryFailed, open_memory, write_all
from policies.sampling import Sampling
from tests.control.test_controller import at_once
from tests.support import moving
from tests.support.daemon import configuration
from tests.support.loops import decode, loop_over, toy
from tests.support.waiting import until_async

SCRIPT = "base_ms=1&row_ms=0.05&drift_ms=40&drift_while={slow}"
TOKENS = 250
STREAMS = 3
LIMITS = ControlLimits(max_running=8, max_waiting=8, max_restarts=5)


def ask(number: int, tokens: int = TOKENS) -> Submit:
    """Every other one is sampled; prompts end at and beside borders of blocks of 16."""
    prompt = [97 + number, 32, 101] * 133 + [32] * number
    return Submit(f"r{number}", prompt, tokens, Sampling(0.9 * (number % 2), seed=number))


class Brake:
    """While it is set forwards are slow, so that streams last until the next worker is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self) -> None:
        self.path.touch()

    def release(self) -> None:
        self.path.unlink()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    asks = [ask(number) for number in range(STREAMS)]
    return {one.request_id: decode(loop_over(toy(), None), [one])[0][one.request_id] for one in asks}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("slow") / "slow")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, slow: Brake) -> WorkerSpec:
    script = SCRIPT.format(slow=slow.path)
    path = configuration(tmp_path_factory.mktemp("moves"), script=script, extra="drafts: []")
    (spec,), _ = build_start_specs(load_config(path), path.parent)
    return msgspec.structs.replace(spec, entry=moving.ENTRY)


def failing(worker: WorkerSpec, name: str, fault: str = "") -> WorkerSpec:
    return msgspec.structs.replace(worker, name=name, environment={**worker.environment, moving.FAULT: fault})


def list_shared() -> list[str]:
    """The shared memory that this process and its workers have open."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            links = os.scandir(f"/proc/{process.pid}/fd")
        except OSError:
            continue
        for link in links:
            try:
                found += [target for target in [os.readlink(link.path)] if "memfd:outrider-kv-" in target]
            except OSError:
                continue
    return found


@asynccontextmanager
async def serving(*specs: WorkerSpec, share_memory: bool = True) -> AsyncIterator[TargetControl]:
    control = TargetControl(LocalCluster(), specs, LIMITS, SystemClock(), at_once, share_memory=share_memory)
    await control.start()
    try:
        await asyncio.wait_for(control.wait_settled(), 60.0)
        await until_async(lambda: all(one.phase == "ready" for one in control.view().replicas))
        yield control
        assert len(control._effects.memories) == 0, "all was given back while control serves"
        assert not list_shared()
    finally:
        await control.close()


async def tokens_of(control: TargetControl, request: Submit) -> list[int]:
    return [token async for delta in control.generate(request) for token in delta.tokens]


def totals(control: TargetControl) -> KvMoveTotals:
    return sum(control.view().kv_moves.values(), KvMoveTotals())


async def move_all(
    control: TargetControl, slow: Brake, spec: WorkerSpec, moved: Callable[[], bool] | None = None
) -> dict[str, list[int]]:
    """Decode all streams, and change to this worker once each has some tokens. Rounds are slow until it serves, or all
    have `moved`."""
    slow.set()
    tasks = [asyncio.create_task(tokens_of(control, ask(number))) for number in range(STREAMS)]
    await until_async(lambda: control.view().totals.generated >= 10 * STREAMS)
    changing = asyncio.create_task(control.change([spec], []))
    await until_async(moved or (lambda: control.view().replicas[0].name == spec.name))
    slow.release()
    texts = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
    await asyncio.wait_for(changing, 60.0)
    return {f"r{number}": text for number, text in enumerate(texts)}


async def test_streams_of_a_replaced_worker_take_their_cache_along(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old")) as control:
        assert await move_all(control, slow, failing(worker, "new", "another environment")) == expected
        done = totals(control)
        assert (done.pages, done.recomputed) == (STREAMS, 0), caplog.text
        assert done.bytes >= STREAMS * 400 * 16
        assert done.seconds > 0.0
        assert control.view().totals.generated == STREAMS * TOKENS
        assert f"gave away its streams: {STREAMS} with their KV cache" in caplog.text
        gauges = control.view().gauges
        assert gauges is not None
        assert gauges.prefix_queries == 0, "the next worker looked for no prompt, as it computed none"


@pytest.mark.parametrize("fault", [moving.DIE_WRITING, moving.HANG_WRITING, moving.CORRUPT], ids=lambda fault: fault)
async def test_what_goes_wrong_where_pages_are_written_costs_the_pages_only(worker, slow, expected, fault, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old", fault)) as control:
        assert await move_all(control, slow, failing(worker, "new")) == expected
        done = totals(control)
        assert (done.pages, done.recomputed) == (0, STREAMS), caplog.text


async def test_the_next_worker_may_die_of_the_pages(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old")) as control:
        assert await move_all(control, slow, failing(worker, "new", moving.DIE_READING)) == expected
        done = totals(control)
        assert (done.pages, done.recomputed) == (0, STREAMS), caplog.text
        assert control.view().totals.restarts >= 1


def test_nothing_is_left_of_a_daemon_that_was_killed() -> None:
    """Shared memory has no name in any directory: it goes with the last process that has it open."""
    program = (
        "import time; from orchestrator.protocol.shared_memory import SharedMemories; kept = SharedMemories()\n"
        "made = kept.create('k', 1 << 20); print(made.path, made.name, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        path, name = daemon.stdout.readline().split()
        memory = SharedMemory(path, name, 1 << 20)
        with open_memory(memory, writing=True) as file:
            write_all(file, memoryview(b"pages"))
        with open_memory(memory) as file:
            daemon.kill()
            daemon.wait()
            assert os.read(file, 9) == b"pages", "whoever has it open can still read it"
    with pytest.raises(SharedMemoryFailed, match="cannot be used"), open_memory(memory):
        pass
    assert not [one for one in os.listdir("/dev/shm") if "outrider" in one]  # noqa: S108
