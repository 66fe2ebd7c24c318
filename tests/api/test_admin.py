"""The admin status: effective state, and rates that are null before there is anything to divide by."""

from __future__ import annotations

from typing import Any

import httpx

from orchestrator.daemon.api.acceptance import AcceptanceBounds
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.control.port import Totals
from orchestrator.protocol.messages import Gauges
from tests.api.support import READY, ScriptedControl


async def status(control: ScriptedControl) -> dict[str, Any]:
    target = AdminTarget(control, bounds=lambda: AcceptanceBounds("rejection"))
    app = create_admin_app([target], "http://127.0.0.1:8000/v1", "1.2.3")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        answer = await client.get("/admin/status")
        assert (await client.get("/v1/models")).status_code == 404
    return answer.json()


async def test_status_before_the_first_worker():
    found = await status(ScriptedControl(phase="starting", ready=None))
    assert (found["phase"], found["version"], found["api"]) == ("starting", "1.2.3", "http://127.0.0.1:8000/v1")
    assert found["ready"] is found["gauges"] is None
    assert found["acceptance"] == {"default": "rejection", "tolerance_allowed": False}
    assert found["totals"]["acceptance_rate"] is found["totals"]["mean_acceptance_length"] is None
    assert found["speculation"] == {"bounds": None, "canary_bounds": None, "engines": [], "sessions": []}


async def test_status_of_a_running_worker():
    totals = Totals(drafts=4, drafted=10, accepted=6, accepted_per_position=(4, 2), generated=20, rounds=9, restarts=1)
    found = await status(ScriptedControl(gauges=Gauges(1, 2, 3, 8, 0, 0, 9, 0), totals=totals))
    assert found["ready"]["model"] == READY.model
    assert found["gauges"]["waiting"] == 2
    assert found["totals"]["acceptance_rate"] == 0.6
    assert found["totals"]["mean_acceptance_length"] == 2.5
    assert found["totals"]["accepted_per_position"] == [4, 2]
