"""docs/metrics.md and the registry name the same metrics, of the same kind."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.clock import SystemClock
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.control.port import ReplicaView, StateView, Totals
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, Gauges
from tests.api.support import READY

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Idle:
    """A control that runs nothing."""

    def view(self) -> StateView:
        ready: Ready | None = None
        gauges: Gauges | None = None
        return StateView("starting", "", "", "local", ready, gauges)

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        pass

    def find_speculation(self, submit: Submit) -> None:
        pass

    async def generate(self, submit: Submit):
        yield Delta(submit.request_id, [])


class Restarted(Idle):
    """A control whose worker was restarted; `restarts` None: it was never ready."""

    restarts: int | None = None

    def view(self) -> StateView:
        ready = None if self.restarts is None else READY
        totals = Totals(restarts=self.restarts or 0)
        replica = ReplicaView(0, "target", "ready", "", "", ready, None, totals, 0)
        return StateView("ready", "", "", "local", ready, None, totals, replicas=(replica,))


def test_restarts_are_counted_once_however_often_they_are_read():
    control = Restarted()
    metrics = Metrics(control, SystemClock())
    assert b"model_name" not in metrics.render()  # no series without a model: it would stay for ever
    for restarts in (0, 1, 1, 3):
        control.restarts = restarts
        assert (
            f'outrider_worker_restarts_total{{engine="0",model_name="toy"}} {restarts}.0'.encode() in metrics.render()
        )


def test_docs_and_registry_agree():
    found = {family.name: family.type for family in Metrics(Idle(), SystemClock()).registry.collect()}
    row = re.compile(r"^\| `(outrider_\w+)` \| (\w+) \|", re.MULTILINE)
    assert dict(row.findall(DOCS.read_text(encoding="utf-8"))) == found
