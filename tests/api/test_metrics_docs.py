"""docs/metrics.md and the registry name the same metrics, of the same kind."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.api.metrics import Metrics
from orchestrator.cluster.port import Delta, Gauges, Ready, Submit
from orchestrator.control.port import StateView

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Idle:
    """A control that runs nothing."""

    def view(self) -> StateView:
        ready: Ready | None = None
        gauges: Gauges | None = None
        return StateView("starting", "", "", "local", ready, gauges)

    async def generate(self, submit: Submit):
        yield Delta(submit.request_id, [])


def test_docs_and_registry_agree():
    found = {family.name: family.type for family in Metrics(Idle()).registry.collect()}
    row = re.compile(r"^\| `(outrider_\w+)` \| (\w+) \|", re.MULTILINE)
    assert dict(row.findall(DOCS.read_text(encoding="utf-8"))) == found
