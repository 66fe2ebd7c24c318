"""Requests of several owners over a real worker: places are given in turns, and nothing waits where none does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RequestStats
from policies.serving.overrides import Scope
from tests.control.test_controller import gate as gate
from tests.control.test_controller import running
from tests.support.waiting import until_async

LIMITS = ControlLimits(max_running=2, max_waiting=100, max_restarts=5)
MANY, FEW, TOKENS = 24, 4, 6


async def follow(control: TargetControl, key: str, owner: str, ended: list[str]) -> RequestStats | None:
    """Decode a request; note its owner when it has ended."""
    stats = None
    async with aclosing(control.generate(Submit(key, [1, 2, 3], TOKENS, owner=owner))) as deltas:
        async for delta in deltas:
            stats = delta.stats or stats
    ended.append(owner)
    return stats


async def test_a_key_with_few_requests_does_not_wait_behind_one_with_many():
    async with running(LIMITS, slots=2, step_s=0.005) as control:
        ended: list[str] = []
        many = [asyncio.create_task(follow(control, f"many-{n}", "many", ended)) for n in range(MANY)]
        await until_async(lambda: len(ended) >= 2)
        few = [asyncio.create_task(follow(control, f"few-{n}", "few", ended)) for n in range(FEW)]
        await until_async(lambda: control.view().streams == MANY + FEW - len(ended))
        before = len(ended)
        waiting = control.view().gauges
        assert waiting is not None
        assert waiting.waiting >= MANY - before - 4  # those that wait in control are seen, too
        stats = await asyncio.gather(*few)
        ahead = ended[before : len(ended) - ended[::-1].index("few")].count("many")
        assert ahead <= 2 * FEW + 4  # a turn each, and those that ran or were sent ahead
        assert all(one is not None and one.queue_ms >= 0.0 for one in stats)
        last = (await asyncio.gather(*many))[-1]
        assert last is not None
        assert last.queue_ms > 0.0  # it waited in control, and that counts
    assert sorted(ended) == ["few"] * FEW + ["many"] * MANY


async def test_the_bound_of_drafts_is_known_while_a_request_waits_in_control(gate):
    async with running(LIMITS, slots=2, gate=str(gate.path)) as control:
        ended: list[str] = []
        tasks = [asyncio.create_task(follow(control, f"r-{n}", "one", ended)) for n in range(MANY)]
        await until_async(lambda: control.view().streams == MANY)
        (replica,) = control.view().replicas
        assert replica.streams < MANY, "the last waits here"
        last = Submit(f"r-{MANY - 1}", [1, 2, 3], TOKENS, owner="one")
        bound = control.find_speculation(last)
        assert bound is not None
        assert bound.by is Scope.OPERATOR
        assert control.find_speculation(Submit("another", [1], 1)) == bound
        gate.open()
        await asyncio.gather(*tasks)


async def test_without_owners_everything_is_sent_at_once(gate):
    async with running(LIMITS, slots=2, gate=str(gate.path)) as control:
        ended: list[str] = []
        tasks = [asyncio.create_task(follow(control, f"r-{n}", "", ended)) for n in range(8)]
        await until_async(lambda: control.view().streams == 8)
        assert sum(one.streams for one in control.view().replicas) == 8  # the worker has all of them
        gate.open()
        await asyncio.gather(*tasks)
