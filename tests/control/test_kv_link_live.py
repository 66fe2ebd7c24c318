"""Real workers that share no memory: streams cross a link from one to the other, and whoever dies, no token differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.contract import NODE_ADDRESS, WorkerSpec
from tests.control.test_controller import at_once
from tests.control.test_kv_moves_live import LIMITS, SCRIPT, STREAMS, Brake, ask, tokens_of, totals
from tests.control.test_kv_moves_live import expected as expected
from tests.control.test_kv_moves_live import failing as failing_alike
from tests.control.test_kv_moves_live import slow as slow
from tests.support import moving
from tests.support.daemon import configuration
from tests.support.waiting import until_async


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, slow: Brake) -> WorkerSpec:
    """As the worker of a cluster of several hosts, with an address that these reach."""
    path = configuration(tmp_path_factory.mktemp("link"), script=SCRIPT.format(slow=slow.path), extra="drafts: []")
    (spec,), _ = build_start_specs(load_config(path), path.parent)
    options = {**spec.options, "across_hosts": True}
    environment = {**spec.environment, NODE_ADDRESS: "127.0.0.1"}
    return msgspec.structs.replace(spec, entry=moving.ENTRY, options=options, environment=environment)


def failing(worker: WorkerSpec, name: str, fault: str = "") -> WorkerSpec:
    """A worker that no other one is taken for."""
    found = failing_alike(worker, name, fault)
    return msgspec.structs.replace(found, environment={**found.environment, "OUTRIDER_TEST_NAME": name})


@asynccontextmanager
async def apart(*specs: WorkerSpec) -> AsyncIterator[TargetControl]:
    control = TargetControl(LocalCluster(), specs, LIMITS, SystemClock(), at_once, share_memory=False)
    await control.start()
    try:
        await asyncio.wait_for(control.wait_settled(), 60.0)
        await until_async(lambda: all(one.phase == "ready" for one in control.view().replicas))
        yield control
    finally:
        await control.close()


async def move_all(control: TargetControl, slow: Brake, spec: WorkerSpec) -> dict[str, list[int]]:
    """Decode all streams, and change to this worker once each has some tokens. Rounds are slow until all have moved, so
    that none ends before its pages have gone."""
    slow.set()
    tasks = [asyncio.create_task(tokens_of(control, ask(number))) for number in range(STREAMS)]
    await until_async(lambda: control.view().totals.generated >= 10 * STREAMS)
    changing = asyncio.create_task(control.change([spec], []))
    await until_async(lambda: totals(control).pages + totals(control).recomputed >= STREAMS)
    slow.release()
    texts = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
    await asyncio.wait_for(changing, 60.0)
    return {f"r{number}": text for number, text in enumerate(texts)}


async def test_streams_of_a_replaced_worker_cross_the_link(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with apart(failing(worker, "old")) as control:
        assert await move_all(control, slow, failing(worker, "new")) == expected
        done = totals(control)
        assert (done.pages, done.recomputed) == (STREAMS, 0), caplog.text
        assert "over a link" in caplog.text
        assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize("fault", [moving.DIE_SENDING, moving.CORRUPT_LINK], ids=lambda fault: fault)
async def test_what_goes_wrong_where_pages_are_sent_costs_the_pages_only(worker, slow, expected, fault, caplog):
    caplog.set_level("DEBUG")
    async with apart(failing(worker, "old", fault)) as control:
        assert await move_all(control, slow, failing(worker, "new")) == expected
        assert totals(control).pages == 0, caplog.text
        assert totals(control).recomputed, caplog.text


async def test_the_next_worker_may_die_while_pages_come(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with apart(failing(worker, "old")) as control:
        assert await move_all(control, slow, failing(worker, "new", moving.DIE_RECEIVING)) == expected
        assert control.view().totals.restarts >= 1
