"""Real workers that share no memory: streams cross a link from one to the other, and whoever dies, no token differs."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.config.load import load_config
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.protocol.contract import NODE_ADDRESS, WorkerSpec
from tests.control.test_kv_moves_live import SCRIPT, STREAMS, Brake, move_all, serving, totals
from tests.control.test_kv_moves_live import expected as expected
from tests.control.test_kv_moves_live import failing as failing_alike
from tests.control.test_kv_moves_live import slow as slow
from tests.support import moving
from tests.support.daemon import configuration


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


async def move_over_link(control: TargetControl, slow: Brake, spec: WorkerSpec) -> dict[str, list[int]]:
    """Rounds are slow until all have moved, so that none ends before its pages have gone."""
    return await move_all(control, slow, spec, lambda: totals(control).pages + totals(control).recomputed >= STREAMS)


async def test_streams_of_a_replaced_worker_cross_the_link(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old"), share_memory=False) as control:
        assert await move_over_link(control, slow, failing(worker, "new")) == expected
        done = totals(control)
        assert (done.pages, done.recomputed) == (STREAMS, 0), caplog.text
        assert "over a link" in caplog.text
        assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize("fault", [moving.DIE_SENDING, moving.CORRUPT_LINK], ids=lambda fault: fault)
async def test_what_goes_wrong_where_pages_are_sent_costs_the_pages_only(worker, slow, expected, fault, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old", fault), share_memory=False) as control:
        assert await move_over_link(control, slow, failing(worker, "new")) == expected
        assert totals(control).pages == 0, caplog.text
        assert totals(control).recomputed, caplog.text


async def test_the_next_worker_may_die_while_pages_come(worker, slow, expected, caplog):
    caplog.set_level("DEBUG")
    async with serving(failing(worker, "old"), share_memory=False) as control:
        assert await move_over_link(control, slow, failing(worker, "new", moving.DIE_RECEIVING)) == expected
        assert control.view().totals.restarts >= 1
