"""One suite over every cluster: what control relies on, with real processes and a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import structlog

from adapters.contract import silent
from adapters.libllama import VARIABLE
from orchestrator.errors import WorkerLost
from orchestrator.launch.local import LocalCluster
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.planning.profiling.run import Watch, measure_path
from orchestrator.planning.profiling.work import echo_spec, name_of, paths, probe_spec
from orchestrator.protocol.commands import Cancel, Stop, Submit
from orchestrator.protocol.contract import Cluster, WorkerSpec
from orchestrator.protocol.events import Event, Failed
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Refused, RoundReport
from orchestrator.protocol.trace_messages import TraceContext
from tests.support import engines
from tests.support.waiting import RunningTime
from tests.support.workers import collect, deltas, is_gone, rays_environment, start_worker, tokens_until

PROMPT = [1, 2, 3]
LIBRARY = "/opt/build/libllama.so"

# One event loop for the module: an embedded Ray costs seconds, and workers belong to their loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def handler_seen() -> Iterator[list[int]]:
    """A daemon's own SIGTERM handler, installed before any cluster is opened."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)]
)
async def cluster(request: pytest.FixtureRequest, handler_seen: list[int]) -> AsyncIterator[Cluster]:
    os.environ[VARIABLE] = LIBRARY
    before = rays_environment()
    cluster: Cluster = LocalCluster() if request.param == "local" else RayCluster("")
    await cluster.open()
    await cluster.open()
    yield cluster
    await cluster.close()
    await cluster.close()
    assert rays_environment() == before  # whoever is started later has nothing of it
    del os.environ[VARIABLE]


async def test_ready_tells_where_it_runs(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, _, ready):
        assert ready.pid != os.getpid()
        assert worker.where.startswith(cluster.runtime)
        assert worker.where.endswith(f"pid {ready.pid}")
        assert worker.pids == (ready.pid,)


async def test_the_path_within_each_of_its_nodes_is_measured(cluster: Cluster) -> None:
    nodes = await cluster.nodes()
    assert len(nodes) == 1
    found: list[Any] = []
    watch = Watch(silent, found.append)
    for left, right in paths(nodes):
        # As where they are on two hosts: over TCP too, if the host has an address.
        await measure_path(
            cluster, echo_spec(right, across=True), functools.partial(probe_spec, left=left, right=right), watch
        )
    assert [(one.left, one.right) for one in found] == [(name_of(nodes[0]), name_of(nodes[0]))]
    assert 0.0 < found[0].rtt_ms < 200.0


async def test_a_stream_from_prompt_to_finish(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, _):
        worker.send(Submit("a", PROMPT, max_tokens=20))
        got: list[int] = []
        async for delta in deltas(events):
            got.extend(delta.tokens)
            if delta.finish:
                assert delta.finish == "length"
                assert delta.stats is not None
                assert delta.stats.generated == 20
                break
        assert got == engines.tokens(PROMPT, 20)


async def test_the_context_of_a_trace_goes_there_and_comes_back(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, ready):
        context = TraceContext(f"00-{'1' * 32}-{'2' * 16}-01", "vendor=left", 1.0)
        worker.send(Submit("a", PROMPT, max_tokens=2, trace=context))
        done = await anext(event async for event in events if isinstance(event, RoundReport))
        assert done.trace is not None
        assert done.trace.pid == ready.pid
        assert [one.trace for one in done.trace.sequences] == [context]


async def test_a_stream_goes_on_behind_committed_tokens(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, _):
        expected = engines.tokens(PROMPT, 12)
        worker.send(Submit("a", PROMPT, max_tokens=12, committed=expected[:7]))
        assert await tokens_until(events, 12) == expected[7:]


async def test_cancel_frees_the_place(cluster: Cluster) -> None:
    async with start_worker(cluster, slots=1, step_s=0.005) as (worker, events, _):
        worker.send(Submit("endless", PROMPT, max_tokens=100_000))
        worker.send(Submit("next", [4], max_tokens=3))
        seen: list[str] = []
        async for delta in deltas(events):
            if not seen:
                worker.send(Cancel("endless"))
            seen.append(delta.request_id)
            if delta.finish:
                break
        assert seen[-3:] == ["next"] * 3


async def test_many_streams_share_one_channel_in_order(cluster: Cluster) -> None:
    async with start_worker(cluster, slots=16, step_s=0.001) as (worker, events, _):
        prompts = {f"r{number}": [number, 7] for number in range(40)}
        for key, prompt in prompts.items():
            worker.send(Submit(key, prompt, max_tokens=25))
        got: dict[str, list[int]] = {key: [] for key in prompts}
        running = len(prompts)
        async for delta in deltas(events):
            got[delta.request_id].extend(delta.tokens)
            running -= delta.finish != ""
            if running == 0:
                break
        assert got == {key: engines.tokens(prompt, 25) for key, prompt in prompts.items()}


async def test_commands_keep_their_order(cluster: Cluster) -> None:
    async with start_worker(cluster, slots=1) as (worker, events, _):
        for number in range(200):
            worker.send(Submit(f"r{number}", [1], max_tokens=1))
            worker.send(Submit(f"x{number}", [1], max_tokens=1_000_000))
            worker.send(Cancel(f"x{number}"))
        finished = []
        async for delta in deltas(events):
            if delta.finish:
                finished.append(delta.request_id)
            if len(finished) == 200:
                break
        assert finished == [f"r{number}" for number in range(200)]


async def test_a_refused_request_costs_no_other(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, _):
        worker.send(Submit("bad", [engines.REFUSE], max_tokens=3))
        event = await anext(event async for event in events if isinstance(event, Refused))
        assert event == Refused("bad", "the prompt is refused", "invalid")
        worker.send(Submit("good", PROMPT, max_tokens=3))
        assert await tokens_until(events, 3) == engines.tokens(PROMPT, 3)


async def test_sigkill_in_mid_stream_is_told_with_its_reason(cluster: Cluster) -> None:
    async with start_worker(cluster, step_s=0.005) as (worker, events, ready):
        worker.send(Submit("a", PROMPT, max_tokens=100_000))
        assert await tokens_until(events, 10) == engines.tokens(PROMPT, 10)
        os.kill(ready.pid, signal.SIGKILL)
        with RunningTime() as since_killed, pytest.raises(WorkerLost) as lost:
            await tokens_until(events, 100_000)
        assert since_killed.read_s() < 2.0
        message = str(lost.value)
        assert f"pid {ready.pid}" in message
        assert "\n" not in message
        assert len(message) < 200
        if cluster.runtime == "local":
            assert message == f"worker scripted (pid {ready.pid}) was killed by SIGKILL"
        worker.send(Submit("b", PROMPT, max_tokens=3))  # to the dead: dropped


@pytest.mark.parametrize(
    ("code", "local_ending"),
    [
        (engines.ABORT, "was killed by SIGABRT"),
        (engines.SEGFAULT, "was killed by SIGSEGV"),
        (engines.EXIT_3, "exited with code 3"),
    ],
)
async def test_a_crash_is_a_lost_worker(cluster: Cluster, code: int, local_ending: str) -> None:
    async with start_worker(cluster) as (worker, events, ready):
        worker.send(Submit("a", [code, 3], max_tokens=10))
        with pytest.raises(WorkerLost) as lost:
            await tokens_until(events, 10)
        assert f"pid {ready.pid}" in str(lost.value)
        if cluster.runtime == "local":
            assert str(lost.value).endswith(local_ending)
        assert await is_gone(ready.pid)


async def test_an_exception_becomes_failed_and_a_lost_worker(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, ready):
        worker.send(Submit("a", [engines.RAISE, 3], max_tokens=10))
        seen: list[Event] = []
        with pytest.raises(WorkerLost, match=r"exited with code 1$"):
            await collect(events, seen)
        assert seen[-1] == Failed("RuntimeError: the script says so", restartable=True)
        got = [delta.tokens[0] for event in seen if isinstance(event, RoundReport) for delta in event.deltas]
        assert got == engines.tokens([engines.RAISE, 3], 3)
        assert await is_gone(ready.pid)


@pytest.mark.parametrize("entry", ["no.such.module:engine", "tests.support.engines:nothing", "no-colon"])
async def test_an_entry_that_is_not_there_fails_for_good(cluster: Cluster, entry: str) -> None:
    worker = await cluster.start(WorkerSpec("odd", entry, {}))
    seen: list[Event] = []
    with pytest.raises(WorkerLost):
        await collect(worker.events(), seen)
    await worker.stop(1.0)
    assert isinstance(seen[0], Failed)
    assert not seen[0].restartable
    assert entry in seen[0].message


async def test_stop_ends_the_stream_and_the_process(cluster: Cluster) -> None:
    worker = await cluster.start(engines.spec(step_s=0.002))
    events = worker.events()
    ready = await anext(event async for event in events if isinstance(event, Ready))
    worker.send(Submit("a", PROMPT, max_tokens=100_000))
    await tokens_until(events, 5)
    await asyncio.gather(worker.stop(5.0), worker.stop(5.0))
    assert await is_gone(ready.pid, within_s=3.0)
    assert [event async for event in events if isinstance(event, Failed)] == []
    await worker.stop(5.0)


async def test_a_stop_command_ends_the_events_normally(cluster: Cluster) -> None:
    async with start_worker(cluster) as (worker, events, ready):
        worker.send(Stop())
        assert [event async for event in events if isinstance(event, Failed)] == []
        assert await is_gone(ready.pid)


async def test_a_worker_that_hangs_is_killed_after_the_grace(cluster: Cluster) -> None:
    worker = await cluster.start(engines.spec(ignore_stop=True))
    events = worker.events()
    ready = await anext(event async for event in events if isinstance(event, Ready))
    worker.send(Submit("a", [engines.HANG, 0], max_tokens=1))
    before = time.monotonic()
    with RunningTime() as running:
        await worker.stop(0.2)
    assert time.monotonic() - before >= 0.2
    assert running.read_s() < 4.0
    assert await is_gone(ready.pid, within_s=3.0)


async def test_the_spec_adds_to_the_workers_environment(cluster: Cluster) -> None:
    spec = msgspec.structs.replace(engines.spec(), environment={"SCRIPTED_DEVICE": "a device"})
    worker = await cluster.start(spec)
    ready = await anext(event async for event in worker.events() if isinstance(event, Ready))
    await worker.stop(5.0)
    assert ready.device.full_name == "a device"


async def test_a_library_of_llama_cpp_that_is_named_is_every_workers(cluster: Cluster) -> None:
    worker = await cluster.start(engines.spec(shown=VARIABLE))
    ready = await anext(event async for event in worker.events() if isinstance(event, Ready))
    await worker.stop(5.0)
    assert ready.device.full_name == LIBRARY


async def test_a_worker_is_on_its_cores_before_its_engine_is_imported(cluster: Cluster) -> None:
    here = min(os.sched_getaffinity(0))
    worker = await cluster.start(msgspec.structs.replace(engines.spec(), cores=[here]))
    ready = await anext(event async for event in worker.events() if isinstance(event, Ready))
    threads = {thread.id: os.sched_getaffinity(thread.id) for thread in psutil.Process(ready.pid).threads()}
    await worker.stop(5.0)
    assert ready.device.cores == [here]
    assert set(map(frozenset, threads.values())) == {frozenset({here})}


async def test_a_core_that_the_host_lacks_is_told_and_not_tried_again(cluster: Cluster) -> None:
    worker = await cluster.start(msgspec.structs.replace(engines.spec(), cores=[0, 4095]))
    seen: list[Event] = []
    with pytest.raises(WorkerLost):
        await collect(worker.events(), seen)
    await worker.stop(1.0)
    assert isinstance(seen[0], Failed)
    assert not seen[0].restartable
    assert seen[0].message.startswith("cores 4095 cannot be had on this host; a worker may use ")


async def test_the_event_loop_lives_while_a_worker_starts(cluster: Cluster) -> None:
    longest_s = 0.0
    with RunningTime() as running:
        start = asyncio.create_task(cluster.start(engines.spec()))
        while not start.done():
            before = running.read_s(), time.thread_time()
            await asyncio.sleep(0.001)
            waited_s, computed_s = running.read_s() - before[0], time.thread_time() - before[1]
            longest_s = max(longest_s, waited_s, computed_s)
    worker = await start
    await worker.stop(5.0)
    assert longest_s < 0.25


async def test_the_daemons_signal_handler_survives(cluster: Cluster, handler_seen: list[int], capfd: Any) -> None:
    handler_seen.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert handler_seen == [signal.SIGTERM]
    assert "SIGTERM received" not in capfd.readouterr().err  # Ray's native handler prints that and a trace


async def test_what_a_worker_prints_is_in_the_log(cluster: Cluster) -> None:
    with structlog.testing.capture_logs() as entries:
        async with start_worker(cluster) as (worker, events, ready):
            worker.send(Submit("a", [engines.RAISE, 0], max_tokens=10))
            with pytest.raises(WorkerLost):
                await collect(events, [])
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not any("second line" in str(entry.get("line")) for entry in entries):  # noqa: ASYNC110 -- Ray tells when it likes
            await asyncio.sleep(0.05)
    printed = [entry for entry in entries if entry["event"] == "worker output" and entry["pid"] == ready.pid]
    assert any("Traceback" in entry["line"] for entry in printed)
    assert any("a second line" in entry["line"] for entry in printed)
