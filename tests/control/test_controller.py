"""Control over a real worker process: streams outlive workers, requests that kill them do not."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clock import SystemClock
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.errors import RequestError, WorkerError
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.events import Progress
from orchestrator.protocol.rounds import Delta, RoundReport
from tests.support import engines
from tests.support.engines import Gate
from tests.support.waiting import until_async
from tests.support.workers import list_workers

PROMPT = [1, 2, 3]
LIMITS = ControlLimits(max_running=4, max_waiting=8, max_restarts=5)
WITHIN_S = 60.0  # a machine that stands still is waited for


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def control_over(
    limits: ControlLimits = LIMITS, sleep: Callable[[float], Awaitable[None]] = at_once, **options: Any
) -> TargetControl:
    return TargetControl(LocalCluster(), [engines.spec(**options)], limits, SystemClock(), sleep)


@asynccontextmanager
async def running(
    limits: ControlLimits = LIMITS, sleep: Callable[[float], Awaitable[None]] = at_once, **options: Any
) -> AsyncIterator[TargetControl]:
    """Control whose worker is ready; afterwards it is closed and no process is left."""
    control = control_over(limits, sleep, **options)
    await control.start()
    try:
        await asyncio.wait_for(control.wait_settled(), WITHIN_S)
        yield control
    finally:
        await control.close()
        assert not list_workers()


async def decode(control: TargetControl, key: str, prompt: list[int], count: int) -> list[int]:
    """Return all tokens of a request."""
    got: list[int] = []
    async with aclosing(control.generate(Submit(key, prompt, count))) as deltas:
        async for delta in deltas:
            got.extend(delta.tokens)
    return got


def kill(control: TargetControl) -> None:
    ready = control.view().ready
    assert ready is not None
    os.kill(ready.pid, signal.SIGKILL)


async def refusal(control: TargetControl, key: str = "late") -> RequestError:
    with pytest.raises(RequestError) as refused:
        await decode(control, key, PROMPT, 1)
    return refused.value


async def test_a_request_from_prompt_to_finish() -> None:
    async with running() as control:
        deltas = [delta async for delta in control.generate(Submit("a", PROMPT, 10))]
        assert [token for delta in deltas for token in delta.tokens] == engines.tokens(PROMPT, 10)
        assert deltas[-1].finish == "length"
        assert deltas[-1].stats is not None
        view = control.view()
        assert (view.phase, view.detail, view.streams) == ("ready", "", 0)
        assert view.worker.startswith("local pid")
        assert view.ready is not None
        assert view.totals.generated == 10
        assert view.totals.rounds == 10
        await until_async(lambda: (gauges := control.view().gauges) is not None and gauges.rounds == 10)


async def test_a_worker_counts_as_ours_from_its_start_on() -> None:
    control = control_over()
    await control.start()
    try:
        await until_async(lambda: control.list_workers() != [])
        assert control.view().ready is None
        early = control.list_workers()
        await asyncio.wait_for(control.wait_settled(), WITHIN_S)
        ready = control.view().ready
        assert ready is not None
        assert early == control.list_workers() == [ready.pid]
    finally:
        await control.close()
    assert control.list_workers() == []


async def test_a_killed_worker_costs_a_pause_and_no_token(caplog: pytest.LogCaptureFixture, gate: Gate) -> None:
    caplog.set_level(logging.INFO, "orchestrator.daemon.control")
    gate.allow(50)
    async with running(gate=str(gate.path)) as control:
        got: list[int] = []
        async for delta in control.generate(Submit("a", PROMPT, 200)):
            got.extend(delta.tokens)
            if len(got) == 50:
                kill(control)
                gate.open()
        assert got == engines.tokens(PROMPT, 200)
        assert delta.stats is not None
        assert delta.stats.generated == 200
        view = control.view()
        assert view.totals.restarts == 1
        assert view.totals.generated == 200
    lost = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    assert len(lost) == 1
    assert "was killed by SIGKILL" in lost[0]
    assert "restart 1 of 5" in lost[0]
    assert sum("ready again" in record.getMessage() for record in caplog.records) == 1


async def test_many_streams_outlive_many_kills(gate: Gate) -> None:
    async with running(gate=str(gate.path)) as control:
        prompts = {f"r{number}": [number, 9] for number in range(8)}  # four run, four wait
        tasks = [asyncio.create_task(decode(control, key, prompt, 60)) for key, prompt in prompts.items()]
        for kills in range(1, 4):
            gate.allow(15 * kills)
            wanted = 4 * 15 * kills  # as many run
            await until_async(lambda wanted=wanted: control.view().totals.generated >= wanted)  # type: ignore[misc]
            kill(control)
            await until_async(lambda kills=kills: control.view().totals.restarts == kills)  # type: ignore[misc]
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens(prompt, 60) for prompt in prompts.values()]
        assert control.view().totals.generated == 8 * 60


@pytest.mark.parametrize("code", [engines.ABORT, engines.EXIT_3, engines.RAISE])
async def test_a_request_that_kills_workers_is_ended(code: int) -> None:
    async with running() as control:
        assert await decode(control, "first", PROMPT, 5) == engines.tokens(PROMPT, 5)
        for attempt in range(3):  # as a client sends it again
            with pytest.raises(RequestError) as poison:
                await decode(control, f"poison{attempt}", [code, 0], 10)
            assert (poison.value.status, poison.value.code) == (422, "request_quarantined")
            assert poison.value.headers == {"x-should-retry": "false"}
        await until_async(lambda: control.view().phase == "ready")
        assert control.view().totals.restarts == 2, "alone in a worker of its own, and never again"
        assert await decode(control, "next", PROMPT, 5) == engines.tokens(PROMPT, 5)
        (found,) = control.steering.list_quarantined()
        assert (found.request_id, found.prompt_tokens, found.deaths) == ("poison0", 2, 2)
        assert control.steering.release_quarantined([found.digest, "unknown"]) == [found.digest]
        assert not control.steering.list_quarantined()


async def test_a_request_that_kills_after_a_token_in_each_life_is_found() -> None:
    """It comes further in every worker: its deaths count over all of them."""
    async with running(slots=4, step_s=0.001) as control:
        good = [asyncio.create_task(decode(control, f"r{n}", [n], 60)) for n in range(3)]
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await decode(control, "creeps", [engines.CREEP], 60)
        assert await asyncio.gather(*good) == [engines.tokens([n], 60) for n in range(3)]
        assert control.view().phase == "ready"


async def test_a_worker_that_stops_is_found_and_its_streams_go_on(gate: Gate) -> None:
    gate.allow(50)
    async with running(gate=str(gate.path)) as control:
        got: list[int] = []
        async for delta in control.generate(Submit("a", PROMPT, 200)):
            got.extend(delta.tokens)
            if len(got) == 50:
                ready = control.view().ready
                assert ready is not None
                os.kill(ready.pid, signal.SIGSTOP)
                gate.open()
        assert got == engines.tokens(PROMPT, 200)
        assert control.view().totals.restarts == 1


async def test_a_worker_that_hangs_in_native_code_is_found_and_what_hangs_it_is_convicted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(step_s=0.002) as control:
        good = asyncio.create_task(decode(control, "good", PROMPT, 3000))
        await until_async(lambda: control.view().totals.generated > 3)
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await decode(control, "hangs", [engines.HANG, 0], 10)
        assert await good == engines.tokens(PROMPT, 3000)
    assert sum("hangs: it has said nothing for" in record.getMessage() for record in caplog.records) == 3


async def test_a_worker_that_is_lost_too_often_is_tried_once_a_minute_and_serves_again() -> None:
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    limits = ControlLimits(max_running=4, max_waiting=8, max_restarts=2)
    async with running(limits, note) as control:
        for restarts in range(1, 4):
            kill(control)
            await until_async(lambda restarts=restarts: control.view().totals.restarts == restarts)  # type: ignore[misc]
            await until_async(lambda: control.view().phase == "ready")
        assert slept == [0.2, 0.4, 60.0]
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)


async def test_while_it_is_tried_once_a_minute_requests_are_told_when_to_come_back() -> None:
    gate = asyncio.Event()

    async def wait_for_gate(seconds: float) -> None:
        await gate.wait()

    async with running(ControlLimits(max_running=4, max_waiting=8, max_restarts=0), wait_for_gate) as control:
        kill(control)
        await until_async(lambda: "once a minute" in control.view().detail)
        refused = await refusal(control)
        assert (refused.status, refused.code) == (503, "model_restarting")
        assert refused.retry_after_s is not None
        assert 55 <= refused.retry_after_s <= 90
        gate.set()
        await until_async(lambda: control.view().phase == "ready")
        assert await decode(control, "a", PROMPT, 5) == engines.tokens(PROMPT, 5)


async def test_others_go_on_beside_a_request_that_kills_workers() -> None:
    async with running(slots=4, step_s=0.001) as control:
        prompts = {f"r{number}": [number] for number in range(6)}
        good = [asyncio.create_task(decode(control, key, prompt, 40)) for key, prompt in prompts.items()]
        poison = asyncio.create_task(decode(control, "poison", [engines.EXIT_3, 0], 10))
        assert await asyncio.gather(*good) == [engines.tokens(prompt, 40) for prompt in prompts.values()]
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await poison
        assert control.view().phase == "ready"


async def test_the_guilty_one_of_several_suspects_is_found() -> None:
    async with running(slots=4) as control:
        # All are in their first round when the worker dies, so any of the four may have done it.
        poison = asyncio.create_task(decode(control, "poison", [engines.ABORT, 0], 10))
        good = [asyncio.create_task(decode(control, f"r{number}", [number], 20)) for number in range(3)]
        assert await asyncio.gather(*good) == [engines.tokens([number], 20) for number in range(3)]
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await poison
        assert control.view().totals.restarts <= 4


async def test_a_worker_that_never_starts_is_given_up() -> None:
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    limits = ControlLimits(max_running=1, max_waiting=0, max_restarts=3)
    async with running(limits, note, fail_start="exit") as control:
        view = control.view()
        assert view.phase == "failed"
        assert view.detail.startswith("gave up after 3 restarts within ten minutes: worker scripted (pid")
        assert "exited with code 7" in view.detail
        assert view.totals.restarts == 3
        assert slept == [0.2, 0.4, 0.8]
        refused = await refusal(control)
        assert (refused.status, refused.code, refused.retry_after_s) == (503, "model_failed", 60)
        assert "exited with code 7" in refused.message


async def test_a_failure_that_a_restart_may_cure_is_retried_with_its_message() -> None:
    limits = ControlLimits(max_running=1, max_waiting=0, max_restarts=1)
    async with running(limits, fail_start="restartable") as control:
        assert control.view().totals.restarts == 1
        assert "no such device (worker scripted" in control.view().detail


async def test_a_failure_for_good_is_not_retried() -> None:
    async with running(fail_start="final") as control:
        view = control.view()
        assert (view.phase, view.detail, view.totals.restarts) == ("failed", "no such device", 0)


async def test_what_a_device_cannot_do_for_one_request_is_that_request_s_failure() -> None:
    async with running(step_s=0.002) as control:
        other = asyncio.create_task(decode(control, "other", PROMPT, 300))
        with pytest.raises(RequestError, match=r"ended .* worker processes"):
            await decode(control, "a", [engines.UNSUPPORTED, 3], 10)
        assert await other == engines.tokens(PROMPT, 300)
        assert control.view().phase == "ready"


async def test_a_row_that_is_not_finite_is_tried_once_more_and_fails_one_request() -> None:
    async with running(step_s=0.002) as control:
        other = asyncio.create_task(decode(control, "other", PROMPT, 60))
        with pytest.raises(RequestError, match="not a number, twice") as ended:
            await decode(control, "a", [engines.NOT_FINITE, 3], 10)
        assert (ended.value.status, ended.value.headers) == (422, {"x-should-retry": "false"})
        assert await other == engines.tokens(PROMPT, 60)
        assert control.view().totals.restarts == 0


async def test_one_request_too_many_is_answered_429(gate: Gate) -> None:
    limits = ControlLimits(max_running=1, max_waiting=1, max_restarts=1)
    async with running(limits, slots=1, gate=str(gate.path)) as control:
        tasks = [asyncio.create_task(decode(control, key, PROMPT, 40)) for key in ("a", "b")]
        await until_async(lambda: control.view().streams == 2)
        refused = await refusal(control)
        assert (refused.status, refused.code) == (429, "queue_full")
        assert refused.retry_after_s is not None
        assert refused.retry_after_s >= 1
        gate.open()
        assert await asyncio.gather(*tasks) == [engines.tokens(PROMPT, 40)] * 2
        assert await decode(control, "c", PROMPT, 2) == engines.tokens(PROMPT, 2)


async def test_closing_the_iterator_cancels_the_request() -> None:
    async with running(slots=1, step_s=0.002) as control:
        deltas = control.generate(Submit("endless", PROMPT, 1_000_000))
        assert (await anext(deltas)).tokens == engines.tokens(PROMPT, 1)
        await deltas.aclose()
        assert control.view().streams == 0
        assert await decode(control, "next", [4], 3) == engines.tokens([4], 3)


async def test_a_cancelled_task_cancels_the_request() -> None:
    async with running(slots=1, step_s=0.002) as control:
        task = asyncio.create_task(decode(control, "endless", PROMPT, 1_000_000))
        await until_async(lambda: control.view().totals.generated > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await decode(control, "next", [4], 3) == engines.tokens([4], 3)


async def test_what_the_worker_refuses_is_a_400() -> None:
    async with running() as control:
        with pytest.raises(RequestError, match="the prompt is refused") as refused:
            await decode(control, "a", [engines.REFUSE], 3)
        assert refused.value.status == 400


async def test_an_id_in_use_is_refused_and_harms_nobody(gate: Gate) -> None:
    async with running(gate=str(gate.path)) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 30))
        await until_async(lambda: control.view().streams == 1)
        assert (await refusal(control, "a")).status == 400
        gate.open()
        assert await task == engines.tokens(PROMPT, 30)


async def test_before_the_worker_is_ready_requests_are_told_to_come_back() -> None:
    control = control_over()
    assert control.view().phase == "starting"
    refused = await refusal(control)
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "model_starting", 5)
    await control.close()


async def test_requests_that_come_during_a_restart_wait() -> None:
    gate = asyncio.Event()

    async def wait_for_gate(seconds: float) -> None:
        await gate.wait()

    async with running(sleep=wait_for_gate) as control:
        kill(control)
        await until_async(lambda: "restart 1 of 5" in control.view().detail)
        view = control.view()
        assert view.phase == "restarting"
        assert view.ready is not None
        assert view.gauges is None
        task = asyncio.create_task(decode(control, "a", PROMPT, 5))
        await asyncio.sleep(0.02)
        assert not task.done()
        gate.set()
        assert await task == engines.tokens(PROMPT, 5)


async def test_drain_finishes_what_runs_and_takes_nothing_new(gate: Gate) -> None:
    gate.allow(4)
    async with running(gate=str(gate.path)) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 40))
        await until_async(lambda: control.view().totals.generated > 3)
        drain = asyncio.create_task(control.drain(WITHIN_S))
        await until_async(lambda: control.view().phase == "draining")
        refused = await refusal(control)
        assert (refused.status, refused.code) == (503, "model_draining")
        assert not task.done()
        gate.open()
        assert await task == engines.tokens(PROMPT, 40)
        await drain


async def test_a_worker_lost_while_draining_is_replaced(gate: Gate) -> None:
    gate.allow(4)
    async with running(gate=str(gate.path)) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 60))
        await until_async(lambda: control.view().totals.generated > 3)
        drain = asyncio.create_task(control.drain(WITHIN_S))
        await until_async(lambda: control.view().phase == "draining")
        kill(control)
        gate.open()
        assert await task == engines.tokens(PROMPT, 60)
        await drain
        assert control.view().totals.restarts == 1


async def test_drain_cuts_off_what_does_not_end_in_time() -> None:
    async with running(step_s=0.002) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 1_000_000))
        await until_async(lambda: control.view().streams == 1)
        await control.drain(0.05)
        with pytest.raises(RequestError, match="shutting down") as ended:
            await task
        assert (ended.value.status, ended.value.retry_after_s) == (503, 10)


async def test_close_ends_streams_and_can_come_at_any_time() -> None:
    async with running(step_s=0.002) as control:
        task = asyncio.create_task(decode(control, "a", PROMPT, 1_000_000))
        await until_async(lambda: control.view().streams == 1)
        await control.close()
        with pytest.raises(RequestError, match="shutting down"):
            await task
        await control.close()
    for pause_s in (0.0, 0.001, 0.02, 0.1):
        control = control_over()
        await control.start()
        await asyncio.sleep(pause_s)
        await control.close()
        assert not list_workers()


async def test_close_in_the_middle_of_a_restart_leaves_nothing() -> None:
    for pause_s in (0.0, 0.002, 0.01):
        async with running(sleep=asyncio.sleep) as control:
            kill(control)
            await until_async(lambda control=control: control.view().phase == "restarting")  # type: ignore[misc]
            await asyncio.sleep(pause_s)
            await asyncio.wait_for(control.close(), 5.0)


async def test_observers_see_every_round_and_cannot_break_it(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[RoundReport] = []
    progress: list[Progress] = []

    def break_control(event: RoundReport) -> None:
        raise ValueError("an observer's own trouble")

    control = control_over()
    control.observers.follow(RoundReport, break_control)
    control.observers.follow(RoundReport, rounds.append)
    control.observers.follow(Progress, progress.append)
    await control.start()
    try:
        assert (await control.wait_settled()).phase == "ready"
        assert await decode(control, "a", PROMPT, 4) == engines.tokens(PROMPT, 4)
    finally:
        await control.close()
    assert [delta.tokens[0] for event in rounds for delta in event.deltas] == engines.tokens(PROMPT, 4)
    assert progress == [Progress("load", 0.5)]
    assert "an observer's own trouble" in caplog.text


async def test_a_cluster_that_cannot_be_opened_is_a_failure_with_its_way_out() -> None:
    class Closed(LocalCluster):
        async def open(self) -> None:
            raise WorkerError("no cluster there; start one")

    control = TargetControl(Closed(), [engines.spec()], LIMITS, SystemClock())
    await control.start()
    view = await control.wait_settled()
    assert (view.phase, view.detail) == ("failed", "no cluster there; start one")
    await control.close()


async def test_a_slow_reader_holds_no_more_than_its_own_tokens() -> None:
    async with running() as control:
        deltas = control.generate(Submit("slow", PROMPT, 50))
        first = await anext(deltas)
        await until_async(lambda: control.view().streams == 0)  # the worker is done, the reader is not
        rest = [delta async for delta in deltas]
        assert [token for delta in (first, *rest) for token in delta.tokens] == engines.tokens(PROMPT, 50)
        assert isinstance(rest[-1], Delta)
        assert rest[-1].finish == "length"
