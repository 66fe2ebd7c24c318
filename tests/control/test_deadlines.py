"""A request's time is bounded while it runs, while it waits, and while its worker hangs or starts again."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing

import pytest

from orchestrator.daemon.control.controller import TargetControl
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import DEADLINE, Delta
from tests.control.test_controller import LIMITS, PROMPT, decode, running
from tests.support import engines


async def deltas(control: TargetControl, submit: Submit) -> list[Delta]:
    async with aclosing(control.generate(submit)) as source:
        return [delta async for delta in source]


async def test_a_running_request_ends_with_what_it_has() -> None:
    async with running(slots=1, step_s=0.002) as control:
        got = await deltas(control, Submit("a", PROMPT, 1_000_000, timeout_s=0.3))
        assert got[-1].finish == DEADLINE
        tokens = [token for delta in got for token in delta.tokens]
        assert tokens == engines.tokens(PROMPT, len(tokens)) != []
        assert control.view().streams == 0
        assert await decode(control, "next", [4], 3) == engines.tokens([4], 3)  # its place is free


async def test_a_waiting_request_is_answered_504() -> None:
    async with running(slots=1, step_s=0.002) as control:
        async with aclosing(control.generate(Submit("long", PROMPT, 1_000_000))) as other:
            await anext(other)
            with pytest.raises(RequestError) as over:
                await deltas(control, Submit("b", PROMPT, 5, timeout_s=0.1))
        assert (over.value.status, over.value.code) == (504, "deadline_exceeded")


async def test_the_configured_bound_holds_for_requests_that_ask_for_more_or_for_nothing() -> None:
    bounded = dataclasses.replace(LIMITS, request_timeout_s=0.2)
    async with running(bounded, slots=2, step_s=0.002) as control:
        for asked in (0.0, 100.0):
            got = await deltas(control, Submit(f"a{asked}", PROMPT, 1_000_000, timeout_s=asked))
            assert got[-1].finish == DEADLINE


async def test_a_hanging_worker_does_not_hold_a_request_beyond_its_time() -> None:
    async with running(step_s=0.2) as control:  # a hang keeps the GIL: what came before it must have been sent
        got = await deltas(control, Submit("a", [engines.HANG, 2], 50, timeout_s=2.0))
        assert [len(delta.tokens) for delta in got] == [1, 1, 0]
        assert got[-1].finish == DEADLINE
