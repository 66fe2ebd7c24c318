"""Draft workers that several replicas share, in real processes: whatever becomes of one, outputs are the target's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest

from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.port import DraftView
from policies.serving.draft_pool import PoolSize
from tests.control.test_drafts import SUBMIT, running
from tests.control.test_drafts import expected as expected
from tests.support.waiting import until_async

ONE = PoolSize(1, 1)


@asynccontextmanager
async def sharing(
    expected: list[int], *, replicas: int = 2, size: PoolSize = ONE, answer_timeout_s: float = 0.5, **options: Any
) -> AsyncIterator[TargetControl]:
    """Control whose replicas are ready, with draft workers that they share. Afterwards no process is left."""
    options |= {"replicas": replicas, "answer_timeout_s": answer_timeout_s, "pools": {"knowing": size}}
    async with running(expected, **options) as control:
        await until_async(lambda: all(one.phase == "ready" for one in control.view().replicas))
        await until_async(lambda: all_connected(control))
        yield control


def drafts_of(control: TargetControl) -> list[DraftView]:
    return [draft for draft in control.view().drafts if draft.phase == "ready"]


def all_connected(control: TargetControl) -> bool:
    """Each replica that serves says that it is connected to its draft worker."""
    serving = {one.name for one in control.view().replicas if one.phase == "ready"}
    return {one for draft in drafts_of(control) for one in draft.connected} == serving


async def decode(control: TargetControl, key: str) -> list[int]:
    got: list[int] = []
    async with aclosing(control.generate(msgspec.structs.replace(SUBMIT, request_id=key))) as deltas:
        async for delta in deltas:
            got.extend(delta.tokens)
    return got


def has_streams(control: TargetControl, name: str) -> bool:
    return any(one.streams for one in control.view().replicas if one.name == name)


async def spread(control: TargetControl) -> asyncio.Future[list[list[int]]]:
    """Begin a request on each replica; returns what they will have said."""
    names = [one.name for one in control.view().replicas]
    tasks = []
    for name in names:
        for other in names:
            control.steering.hold("worker", other, "cordoned" if other != name else "")
        tasks.append(asyncio.create_task(decode(control, f"on {name}")))
        await until_async(partial(has_streams, control, name))
    for name in names:
        control.steering.hold("worker", name, "")
    return asyncio.gather(*tasks)


async def decode_at_once(control: TargetControl, expected: list[int], count: int) -> None:
    outs = await asyncio.gather(*(decode(control, f"r{number}") for number in range(count)))
    assert outs == [expected] * count


async def until_all_draft(control: TargetControl, expected: list[int]) -> None:
    """Decode on each replica, the others cordoned off, until drafts make up most of an answer there."""
    names = [one.name for one in control.view().replicas]
    for name in names:
        for other in names:
            control.steering.hold("worker", other, "cordoned" if other != name else "")
        async with asyncio.timeout(60.0):
            before = -1
            while count_accepted(control, name) - before < 100:
                before = count_accepted(control, name)
                assert await decode(control, "r") == expected
    for name in names:
        control.steering.hold("worker", name, "")


def count_accepted(control: TargetControl, name: str) -> int:
    return next(one.totals.accepted for one in control.view().replicas if one.name == name)


async def test_two_replicas_on_one_draft_worker_say_what_plain_decoding_says(expected):
    async with sharing(expected) as control:
        (draft,) = control.view().drafts
        assert sorted(draft.targets) == sorted(draft.connected) == ["target-0", "target-1"]
        await until_all_draft(control, expected)
        await until_async(lambda: drafts_of(control)[0].load is not None)
        load = drafts_of(control)[0].load
        assert load is not None
        assert load.targets == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_shared_draft_worker_that_is_lost_costs_no_replica_a_token(expected, number):
    async with sharing(expected, script="base_ms=10") as control:
        await until_all_draft(control, expected)
        ready = control.view().drafts[0].ready
        assert ready is not None
        running = await spread(control)
        os.kill(ready.pid, number)
        assert await running == [expected] * 2
        async with asyncio.timeout(60.0):
            while not control.view().drafts[0].restarts:  # a hung one is found while it is asked
                await decode_at_once(control, expected, 4)
        await until_async(lambda: all_connected(control))
        assert not psutil.pid_exists(ready.pid)
        await until_all_draft(control, expected)
        assert control.view().totals.restarts == 0


async def test_a_replica_that_is_killed_leaves_the_other_its_drafts_and_gets_them_again(expected):
    async with sharing(expected, script="base_ms=10") as control:
        await until_all_draft(control, expected)
        lost = control.view().replicas[0]
        assert lost.ready is not None
        running = await spread(control)
        os.kill(lost.ready.pid, signal.SIGKILL)
        assert await running == [expected] * 2
        await until_async(lambda: control.view().replicas[0].phase == "ready" and all_connected(control))
        await until_all_draft(control, expected)
        assert control.view().drafts[0].restarts == 0


async def test_a_replica_that_stands_still_in_a_request_holds_up_no_draft_of_the_other(expected):
    async with sharing(expected, script="base_ms=10") as control:
        await until_all_draft(control, expected)
        stopped = control.view().replicas[0]
        assert stopped.ready is not None
        before = control.view().replicas[1].totals.accepted
        running = await spread(control)
        os.kill(stopped.ready.pid, signal.SIGSTOP)
        try:
            await until_async(lambda: control.view().replicas[1].totals.accepted - before >= 100)
        finally:
            if psutil.pid_exists(stopped.ready.pid):
                os.kill(stopped.ready.pid, signal.SIGCONT)
        assert await running == [expected] * 2
        assert control.view().drafts[0].restarts == 0


async def test_a_worker_is_added_while_sharing_costs_drafts_and_removed_when_it_is_spare(expected):
    size = PoolSize(1, 2, idle_s=3.0)
    # Passes take as long as they have rows, so two replicas get half of the drafts each; alone they get them all.
    slow: dict[str, Any] = {"row_ms": 1.0, "fields": {"runs_ahead": "always"}}
    async with sharing(expected, size=size, script="base_ms=6", answer_timeout_s=5.0, **slow) as control:
        assert len(control.view().drafts) == 1
        async with asyncio.timeout(60.0):
            while len(drafts_of(control)) < 2 or not all_connected(control):
                await decode_at_once(control, expected, 4)
        assert sorted(draft.targets for draft in drafts_of(control)) == [("target-0",), ("target-1",)]
        await until_all_draft(control, expected)
        await until_async(lambda: len(control.view().drafts) == 1, 60.0)
        await until_async(lambda: all_connected(control))
        assert sorted(control.view().drafts[0].targets) == ["target-0", "target-1"]
        await until_all_draft(control, expected)
        assert control.view().drafts[0].restarts == 0


async def test_more_workers_than_one_share_the_replicas_and_one_that_is_lost_leaves_its_own_to_the_other(expected):
    async with sharing(expected, replicas=3, size=PoolSize(2, 2)) as control:
        await until_async(lambda: len(drafts_of(control)) == 2 and all_connected(control))
        assert sorted(len(draft.targets) for draft in drafts_of(control)) == [1, 2]
        ready = drafts_of(control)[0].ready
        assert ready is not None
        os.kill(ready.pid, signal.SIGKILL)
        await until_async(lambda: any(len(draft.connected) == 3 for draft in control.view().drafts))
        await until_all_draft(control, expected)
        await until_async(lambda: len(drafts_of(control)) == 2 and all_connected(control))
        assert sorted(len(draft.targets) for draft in drafts_of(control)) == [1, 2]
