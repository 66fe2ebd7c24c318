"""Control over several real worker processes: requests are routed, and streams outlive any of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from orchestrator.clock import SystemClock
from orchestrator.daemon.api.served import Liveness
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.port import ReplicaView
from orchestrator.daemon.control.state import find_group
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.errors import RequestError, WorkerError
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.failover.standby import FailoverRules
from tests.control.test_controller import PROMPT, WITHIN_S, at_once, decode, refusal
from tests.control.test_controller import gate as gate
from tests.support import engines
from tests.support.engines import Gate
from tests.support.waiting import until_async
from tests.support.workers import list_workers

LIMITS = ControlLimits(max_running=4, max_waiting=8, max_restarts=5)
LONG_PROMPT = list(range(640))


@asynccontextmanager
async def running(
    count: int = 2,
    limits: ControlLimits = LIMITS,
    sleep: Callable[[float], Awaitable[None]] = at_once,
    **options: Any,
) -> AsyncIterator[TargetControl]:
    """Control whose replicas all are ready; afterwards it is closed and no process is left."""
    spec = engines.spec(**options)
    specs = [msgspec.structs.replace(spec, name=f"target-{number}") for number in range(count)]
    control = TargetControl(LocalCluster(), specs, limits, SystemClock(), sleep)
    await control.start()
    try:
        await asyncio.wait_for(control.wait_settled(), WITHIN_S)
        await until_async(lambda: all(one.phase != "starting" for one in replicas(control)))
        yield control
    finally:
        await control.close()
        assert not list_workers()


def replicas(control: TargetControl) -> tuple[ReplicaView, ...]:
    return control.view().replicas


def kill(replica: ReplicaView) -> None:
    assert replica.ready is not None
    os.kill(replica.ready.pid, signal.SIGKILL)


def list_generated(control: TargetControl) -> list[int]:
    return [one.totals.generated for one in replicas(control)]


async def test_requests_are_spread_and_none_waits_while_a_place_is_free(gate: Gate) -> None:
    async with running(3, slots=2, gate=str(gate.path)) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n, 5], 50)) for n in range(6)]
        await until_async(lambda: control.view().streams == 6)
        assert [one.streams for one in replicas(control)] == [2, 2, 2]
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens([n, 5], 50) for n in range(6)]
        assert list_generated(control) == [100, 100, 100]


async def test_a_prompt_goes_where_it_was_computed_unless_that_queue_is_long(gate: Gate) -> None:
    gate.allow(10)
    async with running(slots=2, gate=str(gate.path)) as control:
        busy = asyncio.create_task(decode(control, "busy", PROMPT, 40))
        await until_async(lambda: control.view().streams == 1)
        await decode(control, "first", LONG_PROMPT, 10)
        gate.open()
        await busy
        assert list_generated(control) == [40, 10]
        await decode(control, "again", [*LONG_PROMPT, 1, 2, 3], 10)
        await decode(control, "another", PROMPT, 10)
        assert list_generated(control) == [50, 20]  # among idle ones, the first by name without a reason for the second
        gate.allow(10)
        tasks = [asyncio.create_task(decode(control, f"long{n}", LONG_PROMPT, 60)) for n in range(2)]
        await until_async(lambda: control.view().streams == 2)
        assert [one.streams for one in replicas(control)] == [0, 2]
        tasks += [asyncio.create_task(decode(control, f"more{n}", LONG_PROMPT, 60)) for n in range(4)]
        await until_async(lambda: control.view().streams == 6)
        assert replicas(control)[0].streams >= 2
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens(LONG_PROMPT, 60)] * 6


async def test_streams_of_a_killed_replica_go_on_at_once_elsewhere(gate: Gate) -> None:
    starts = asyncio.Event()

    async def wait_to_start(seconds: float) -> None:
        await starts.wait()

    gate.allow(20)
    async with running(sleep=wait_to_start, gate=str(gate.path)) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 80)) for n in range(4)]
        await until_async(lambda: min(list_generated(control)) > 10)
        kill(replicas(control)[0])
        gate.open()
        # Nothing starts yet: the other replica has to do it all.
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 80) for n in range(4)]
        view = control.view()
        assert (view.phase, [one.phase for one in view.replicas]) == ("ready", ["restarting", "ready"])
        assert view.detail.startswith("1 of 2 replicas serve; replica 0 is restarting")
        assert view.totals.generated == 4 * 80
        assert await decode(control, "late", PROMPT, 5) == engines.tokens(PROMPT, 5)
        starts.set()
        await until_async(lambda: [one.phase for one in replicas(control)] == ["ready", "ready"])
        assert control.view().detail == ""


async def test_what_waits_goes_over_to_a_replica_that_is_back(gate: Gate) -> None:
    starts = asyncio.Event()

    async def wait_to_start(seconds: float) -> None:
        await starts.wait()

    gate.allow(10)
    async with running(sleep=wait_to_start, slots=1, gate=str(gate.path)) as control:
        kill(replicas(control)[0])
        await until_async(lambda: replicas(control)[0].phase == "restarting")
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 100)) for n in range(4)]
        await until_async(lambda: list_generated(control)[1] > 5)
        assert [one.streams for one in replicas(control)] == [0, 4]
        starts.set()
        await until_async(lambda: list_generated(control)[0] > 5)
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 100) for n in range(4)]
        assert min(list_generated(control)) >= 100


@pytest.mark.parametrize("count", [2, 3])
async def test_when_all_are_killed_at_once_nobody_is_blamed_and_every_stream_goes_on(count: int) -> None:
    async with running(count, step_s=0.003) as control:
        lone = asyncio.create_task(decode(control, "lone", [7], 90))
        await until_async(lambda: sum(list_generated(control)) > 5)
        for one in replicas(control):
            kill(one)
        assert await lone == engines.tokens([7], 90)
        await until_async(lambda: all(one.totals.restarts == 1 for one in replicas(control)))


@pytest.mark.parametrize("code", [engines.ABORT, engines.RAISE])
async def test_a_request_that_kills_workers_is_found_and_the_others_go_on(code: int) -> None:
    async with running(slots=4, step_s=0.002) as control:
        good = [asyncio.create_task(decode(control, f"r{n}", [n], 100)) for n in range(6)]
        poison = asyncio.create_task(decode(control, "poison", [code, 1], 10))
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await poison
        assert await asyncio.gather(*good) == [engines.tokens([n], 100) for n in range(6)]
        assert control.view().totals.restarts <= 4


async def test_one_replica_that_cannot_start_leaves_the_other_to_serve() -> None:
    specs = [engines.spec(fail_start="final"), msgspec.structs.replace(engines.spec(), name="other")]
    control = TargetControl(LocalCluster(), specs, LIMITS, SystemClock(), at_once)
    await control.start()
    try:
        assert (await control.wait_settled()).phase == "ready"
        await until_async(lambda: [one.phase for one in replicas(control)] == ["failed", "ready"])
        assert "replica 0 is failed: no such device" in control.view().detail
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)
    finally:
        await control.close()


ALIKE = replace(LIMITS, failover=FailoverRules(alike=True))


@asynccontextmanager
async def running_unlike(limits: ControlLimits, **options: Any) -> AsyncIterator[TargetControl]:
    """Control of two replicas whose tokens differ."""
    specs = [
        msgspec.structs.replace(engines.spec(activations=activations, **options), name=activations)
        for activations in ("bf16", "fp32")
    ]
    control = TargetControl(LocalCluster(), specs, limits, SystemClock(), at_once)
    await control.start()
    try:
        await control.wait_settled()
        yield control
    finally:
        await control.close()


async def test_where_all_are_to_be_alike_a_replica_whose_tokens_would_differ_takes_no_stream() -> None:
    async with running_unlike(ALIKE) as control:
        await until_async(lambda: sorted(replica.phase for replica in replicas(control)) == ["failed", "ready"])
        failed = next(replica for replica in replicas(control) if replica.phase == "failed")
        assert "activations" in failed.detail
        assert "model.alike is true" in failed.detail
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)
        await until_async(lambda: len(list_workers()) == 1)


async def read_groups(control: TargetControl, name: str, count: int) -> list[tuple[int, str]]:
    """Return from which token on a request's tokens are of which group. Nothing of it is lost or doubled."""
    tokens: list[int] = []
    groups = []
    async for delta in control.generate(Submit(name, [len(name)], count)):
        if delta.group:
            groups.append((len(tokens), delta.group))
        tokens += delta.tokens
    assert tokens == engines.tokens([len(name)], count)
    return groups


async def test_unlike_replicas_serve_in_groups_and_a_stream_says_where_it_changes_its_own() -> None:
    limits = replace(LIMITS, failover=FailoverRules(0.0, 10.0, "streams"))
    async with running_unlike(limits, step_s=0.005) as control:
        await until_async(lambda: [replica.phase for replica in replicas(control)] == ["ready", "ready"])
        reading = [asyncio.create_task(read_groups(control, "r" * (1 + n), 200)) for n in range(4)]
        await until_async(lambda: min(list_generated(control)) > 10)
        kill(replicas(control)[0])
        groups = await asyncio.gather(*reading)
        changed = [of_one for of_one in groups if len(of_one) == 2]
        assert changed, "those of the lost replica"
        assert all(0 < of_one[1][0] < 200 and of_one[1][1] != of_one[0][1] for of_one in changed)
        assert {of_one[0][1] for of_one in groups} == {name for of_one in changed for _, name in of_one}
        assert sum(control.view().changed_groups.values()) == len(changed)


async def test_a_stream_waits_for_its_own_group_where_it_may_not_change_it() -> None:
    async with running_unlike(LIMITS, step_s=0.005) as control:
        await until_async(lambda: [replica.phase for replica in replicas(control)] == ["ready", "ready"])
        reading = [asyncio.create_task(read_groups(control, "r" * (1 + n), 200)) for n in range(4)]
        await until_async(lambda: min(list_generated(control)) > 10)
        kill(replicas(control)[0])
        assert all(len(groups) == 1 for groups in await asyncio.gather(*reading))
        assert sum(control.view().changed_groups.values()) == 0


async def test_a_request_for_one_group_is_served_by_it_alone_and_refused_where_it_is_gone() -> None:
    async with running_unlike(LIMITS) as control:
        await until_async(lambda: [replica.phase for replica in replicas(control)] == ["ready", "ready"])
        for replica in replicas(control):
            wanted = find_group(replica.ready)
            deltas = [delta async for delta in control.generate(Submit(f"of {wanted}", PROMPT, 5, group=wanted))]
            assert [delta.group for delta in deltas if delta.group] == [wanted]
        with pytest.raises(RequestError, match="no replica has the bits") as refused:
            await anext(control.generate(Submit("gone", PROMPT, 5, group="0" * 12)))
        assert (refused.value.status, refused.value.code) == (409, "system_fingerprint_gone")


async def test_admission_counts_over_all_replicas(gate: Gate) -> None:
    limits = ControlLimits(max_running=1, max_waiting=1, max_restarts=1)
    async with running(2, limits, slots=1, gate=str(gate.path)) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 60)) for n in range(3)]
        await until_async(lambda: control.view().streams == 3)
        refused = await refusal(control)
        assert (refused.status, refused.code) == (429, "queue_full")
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 60) for n in range(3)]


async def test_cancelling_reaches_the_replica_that_has_the_request_now() -> None:
    async with running(slots=1, step_s=0.002) as control:
        endless = control.generate(Submit("endless", PROMPT, 1_000_000))
        await anext(endless)
        kill(replicas(control)[0])
        for _ in range(30):
            await anext(endless)
        await endless.aclose()
        assert control.view().streams == 0
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 5)) for n in range(2)]
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 5) for n in range(2)]


def some(*names: str, **options: Any) -> list[WorkerSpec]:
    """Specs as `running` starts them, by other names."""
    return [msgspec.structs.replace(engines.spec(**options), name=name) for name in names]


async def test_replicas_become_more_and_fewer_while_streams_go_on() -> None:
    async with running(1, step_s=0.003) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 1000)) for n in range(6)]
        await until_async(lambda: sum(list_generated(control)) > 10)
        assert await control.change(some("a", "b", step_s=0.003), []) == [0, 1]
        assert [one.name for one in replicas(control)] == ["target-0", "b"], "what runs as it should stays"
        await until_async(lambda: list_generated(control)[1] > 20)
        assert sum(one.streams for one in replicas(control)) == 6
        kill(replicas(control)[1])
        await until_async(lambda: replicas(control)[1].totals.restarts == 1 and replicas(control)[1].phase == "ready")
        await until_async(lambda: replicas(control)[1].streams > 0)
        assert await control.change(some("c", step_s=0.003), []) == [0]
        assert [(one.name, one.phase) for one in replicas(control)] == [("target-0", "ready")]
        assert len(list_workers()) == 1
        assert await control.change(some("d", "e", step_s=0.003), []) == [0, 1]
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 1000) for n in range(6)]
        view = control.view()
        assert (view.totals.generated, view.totals.restarts) == (6 * 1000, 1), "what the one that went did counts"


async def test_what_cannot_serve_beside_the_others_changes_nothing() -> None:
    async with running(2, ALIKE, step_s=0.002, activations="bf16") as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 200))
        stays = some("stays", step_s=0.002, activations="bf16")
        with pytest.raises(WorkerError, match="activations fp32 instead of bf16"):
            await control.change([*stays, *some("other", activations="fp32")], [])
        with pytest.raises(WorkerError, match="no such device"):
            await control.change(
                [*stays, *some("good", step_s=0.001, activations="bf16"), *some("bad", fail_start="final")], []
            )
        assert [one.name for one in replicas(control)] == ["target-0", "target-1"]
        assert len(list_workers()) == 2
        assert await task == engines.tokens(PROMPT, 200)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_replica_is_replaced_while_streams_go_on(count: int) -> None:
    async with running(count, step_s=0.003) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 150)) for n in range(4)]
        await until_async(lambda: min(list_generated(control)) > 10)
        before = replicas(control)[0]
        spec = msgspec.structs.replace(engines.spec(slots=7), name="target-0", environment={"SCRIPTED_DEVICE": "new"})
        await control.change([spec, *some("target-1", step_s=0.003)][:count], [])
        after = replicas(control)[0]
        assert before.ready is not None
        assert after.ready is not None
        assert (after.name, after.ready.slots, after.ready.device.full_name) == ("target-0.2", 7, "new")
        assert len(list_workers()) == count
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 150) for n in range(4)]
        view = control.view()
        assert (view.totals.generated, view.totals.restarts) == (4 * 150, 0)


async def test_a_replacement_that_does_not_start_leaves_the_old_one() -> None:
    async with running(1, step_s=0.002) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 100))
        with pytest.raises(WorkerError, match="cannot serve: no such device"):
            await control.change([engines.spec(fail_start="final")], [])
        assert await task == engines.tokens(PROMPT, 100)
        assert len(list_workers()) == 1


async def test_streams_of_a_replica_that_stops_go_on_at_once_elsewhere() -> None:
    async with running(step_s=0.002) as control:
        tasks = [asyncio.create_task(decode(control, f"r{n}", [n], 1500)) for n in range(2)]
        await until_async(lambda: min(list_generated(control)) > 5)
        ready = replicas(control)[1].ready
        assert ready is not None
        os.kill(ready.pid, signal.SIGSTOP)
        liveness = Liveness(control, SystemClock(), stalled_after_s=0.5)
        await until_async(lambda: liveness.verdict() == "stalled")
        assert await asyncio.gather(*tasks) == [engines.tokens([n], 1500) for n in range(2)]
        await until_async(lambda: [one.phase for one in replicas(control)] == ["ready", "ready"])
        assert replicas(control)[1].totals.restarts == 1


async def test_streams_stay_with_a_replica_of_another_kind_that_is_replaced_until_they_end() -> None:
    tokens = 1200  # a new worker starts and answers meanwhile, on a busy machine, too
    async with running(1, step_s=0.003, activations="bf16") as control:
        old = replicas(control)[0].ready
        task = asyncio.create_task(decode(control, "long", PROMPT, tokens))
        await until_async(lambda: list_generated(control)[0] > 5)
        replaced = asyncio.create_task(control.change([engines.spec(activations="fp32")], []))
        await until_async(
            lambda: (ready := replicas(control)[0].ready) is not None and ready.precision.activations == "fp32"
        )
        assert await decode(control, "new", [4], 5) == engines.tokens([4], 5)
        assert replicas(control)[0].totals.generated < tokens
        assert len(list_workers()) == 2
        assert old is not None
        os.kill(old.pid, signal.SIGKILL)  # it is started again: nobody else says what it says
        assert await task == engines.tokens(PROMPT, tokens)
        await asyncio.wait_for(replaced, WITHIN_S)
        assert len(list_workers()) == 1
