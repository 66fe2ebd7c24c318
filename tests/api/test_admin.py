"""The admin status: effective state, and rates that are null before there is anything to divide by."""

from __future__ import annotations

from typing import Any

import httpx

from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.translate import AcceptanceBounds
from orchestrator.daemon.control.port import Totals
from orchestrator.protocol.rounds import Gauges
from tests.api.support import READY, ScriptedControl
from tests.support.ready import change_ready

READY_NAMES = """
    model vocabulary_size vocabulary_fingerprint context_tokens adapter device device_name weights activations kv_cache
    exactness row_invariant slots kv_blocks block_tokens drafters max_depth pid load_s model_digest source static_widths
    precision_reason precision_rejected planned_memory_bytes planned_memory cores costs_from starting_depth fixed_depth
    canary_drafters canary_depth canary_fixed numerical_class class_fingerprint class_reason classes_rejected kv_format
    kv_page_bytes device_layers device_memory memory_reduced host shards split part_pids part_planned_bytes
    predicted_depth expected_rounds identities no_drafts branches cannot loras
"""
OTHER = {
    "model": "m",
    "model_digest": "d",
    "device": "GPU.0",
    "device_name": "a GPU",
    "device_layers": "2 of 4",
    "device_memory": {"weights": 7},
    "precision_reason": "measured",
    "precision_rejected": ["int8: not measured"],
    "kv_blocks": 9,
    "kv_format": "pages",
    "kv_page_bytes": 8,
    "shards": ["layers 0 to 1 on SIM"],
    "part_pids": [3],
    "part_planned_bytes": [4],
    "drafters": ["suffix"],
}


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
    control = ScriptedControl(gauges=Gauges(1, 2, 3, 8, 0, 0, 9, 0), totals=totals, ready=change_ready(READY, **OTHER))
    found = await status(control)
    assert set(found["ready"]) == {"type", *READY_NAMES.split()}
    assert found["ready"] == found["ready"] | OTHER
    assert found["replicas"][0]["ready"] == found["ready"]
    assert found["gauges"]["waiting"] == 2
    assert found["totals"]["acceptance_rate"] == 0.6
    assert found["totals"]["mean_acceptance_length"] == 2.5
    assert found["totals"]["accepted_per_position"] == [4, 2]
