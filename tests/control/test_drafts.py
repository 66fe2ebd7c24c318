"""Draft workers in real processes: whatever becomes of them, streams go on with the target's own tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest

from orchestrator.clock import SystemClock
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.drafts.draft_workers import NO_POOLS
from orchestrator.daemon.control.port import DraftView
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import Submit
from policies.sampling import Sampling
from policies.serving.draft_pool import PoolSize
from tests.support import drafted, drafters
from tests.support.loops import decode as decode_here
from tests.support.loops import loop_over, toy
from tests.support.waiting import until_async
from tests.support.workers import list_workers

# Its depth is fixed: whether drafts pay depends on what else runs here.
SUBMIT = Submit("a", [60, 32, 101], 200, sampling=Sampling(0.8, seed=3), depth=12)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return decode_here(loop_over(toy(), None), [SUBMIT])[0]["a"]


@asynccontextmanager
async def running(
    expected: list[int],
    *,
    max_restarts: int = 5,
    replicas: int = 1,
    script: str = "base_ms=1.5",
    answer_timeout_s: float = 0.3,
    pools: Mapping[str, PoolSize] = NO_POOLS,
    **draft: Any,
) -> AsyncIterator[TargetControl]:
    """Control whose target is ready; its draft workers may not be yet. Afterwards no process is left."""
    spec = drafted.target_spec(script=script, answer_timeout_s=answer_timeout_s)
    control = TargetControl(
        LocalCluster(),
        [msgspec.structs.replace(spec, name=f"target-{number}") for number in range(replicas)],
        ControlLimits(4, 8, max_restarts),
        SystemClock(),
        drafts=[drafters.spec([[*SUBMIT.prompt, *expected]], **draft)],
        draft_pools=pools,
    )
    await control.start()
    try:
        await asyncio.wait_for(control.wait_settled(), 60.0)
        yield control
    finally:
        await control.close()
        assert not list_workers()


def draft_of(control: TargetControl) -> DraftView:
    return control.view().drafts[0]


def pid_of(control: TargetControl) -> int:
    ready = draft_of(control).ready
    assert ready is not None
    return ready.pid


async def decode(control: TargetControl, meanwhile: Callable[[int], None] = lambda count: None) -> list[int]:
    got: list[int] = []
    async with aclosing(control.generate(SUBMIT)) as deltas:
        async for delta in deltas:
            got.extend(delta.tokens)
            meanwhile(len(got))
    return got


async def count_accepted_in_a_stream(control: TargetControl, expected: list[int]) -> int:
    before = control.view().totals.accepted
    assert await decode(control) == expected
    return control.view().totals.accepted - before


async def test_the_target_serves_before_its_draft_worker_is_ready(expected):
    async with running(expected) as control:
        assert draft_of(control).phase == "starting"
        assert await decode(control) == expected
        await until_async(lambda: draft_of(control).phase == "ready")
        await until_it_drafts(control, expected)
        ready = draft_of(control).ready
        assert ready is not None
        assert (ready.drafter.adapter, ready.vocabulary_size) == ("scripted", drafters.VOCABULARY)
        assert draft_of(control).worker == f"local pid {ready.pid}"


async def until_it_drafts(control: TargetControl, expected: list[int]) -> None:
    async with asyncio.timeout(60.0):
        while await count_accepted_in_a_stream(control, expected) < 100:
            pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_draft_process_killed_or_hung_in_a_stream_costs_no_token_and_comes_back(expected, number):
    async with running(expected) as control:
        await until_async(lambda: draft_of(control).phase == "ready")
        await until_it_drafts(control, expected)
        pid = pid_of(control)
        struck: list[int] = []

        def strike(count: int) -> None:
            if count > 30 and not struck:
                struck.append(count)
                os.kill(pid, number)

        for _ in range(10):  # a hung one is found while it is asked
            assert await decode(control, strike) == expected
            if draft_of(control).restarts:
                break
        await until_async(lambda: draft_of(control).restarts == 1 and draft_of(control).phase == "ready")
        assert struck
        assert not psutil.pid_exists(pid)
        await until_it_drafts(control, expected)
        assert control.view().totals.restarts == 0


@pytest.mark.parametrize("fault", ["garbage", "raise", "exit", "hang"])
async def test_when_the_restarts_are_spent_the_target_goes_on_without(expected, fault):
    async with running(expected, max_restarts=1, fault=fault, at=8) as control:
        async with asyncio.timeout(60.0):
            while draft_of(control).phase != "failed":
                assert await decode(control) == expected
        assert "lost 2 times in ten minutes, now started once a minute" in draft_of(control).detail
        assert control.view().phase == "ready"
        assert await count_accepted_in_a_stream(control, expected) == 0


async def test_a_new_target_worker_is_attached_to_the_same_draft_worker(expected):
    async with running(expected) as control:
        await until_async(lambda: draft_of(control).phase == "ready")
        await until_it_drafts(control, expected)
        pid, ready = pid_of(control), control.view().ready
        assert ready is not None
        os.kill(ready.pid, signal.SIGKILL)
        assert await decode(control) == expected
        await until_it_drafts(control, expected)
        assert pid_of(control) == pid
        assert draft_of(control).restarts == 0


async def test_a_draft_that_cannot_be_loaded_is_not_tried_again(expected):
    async with running(expected, refused="no such file") as control:
        await until_async(lambda: draft_of(control).phase == "failed")
        assert draft_of(control).detail == "no such file"
        assert draft_of(control).restarts == 0
        assert await decode(control) == expected


async def both(control: TargetControl, expected: list[int]) -> list[int]:
    """Decode on both replicas at once; returns how many drafts each had accepted."""
    before = [one.totals.accepted for one in control.view().replicas]

    async def decode_one(key: str) -> list[int]:
        got: list[int] = []
        async with aclosing(control.generate(msgspec.structs.replace(SUBMIT, request_id=key))) as deltas:
            async for delta in deltas:
                got.extend(delta.tokens)
        return got

    assert list(await asyncio.gather(decode_one("one"), decode_one("two"))) == [expected, expected]
    return [one.totals.accepted - count for one, count in zip(control.view().replicas, before, strict=True)]


def list_drafted(control: TargetControl) -> list[tuple[str, ...]]:
    return sorted(draft.targets for draft in control.view().drafts)


async def test_each_replica_has_a_draft_worker_of_its_own_and_gets_another_one_that_is_free(expected):
    async with running(expected, replicas=2, max_restarts=0) as control:
        # Control is settled by the first target that serves: the other one may be later than both drafts.
        await until_async(lambda: list_drafted(control) == [("target-0",), ("target-1",)])
        async with asyncio.timeout(60.0):
            while min(await both(control, expected)) < 100:
                pass
        # A target that is tried once a minute leaves its draft worker; the other one's is lost, and it takes that.
        lost = control.view().replicas[0]
        assert lost.ready is not None
        os.kill(lost.ready.pid, signal.SIGKILL)
        await until_async(lambda: control.view().replicas[0].spent)
        await until_async(lambda: list_drafted(control) == [(), ("target-1",)])
        used = next(draft for draft in control.view().drafts if draft.targets)
        assert used.ready is not None
        os.kill(used.ready.pid, signal.SIGKILL)
        await until_async(
            lambda: [one.targets for one in control.view().drafts if one.phase == "ready"] == [("target-1",)]
        )
        await until_it_drafts(control, expected)
