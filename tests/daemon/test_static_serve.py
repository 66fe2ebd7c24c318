"""Static shapes from cluster.yaml to status: a target and a draft in graphs of fixed shape, in a real daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.cli.status import drafter_line
from tests.support import tiny_models
from tests.support.daemon import outrider_process, running

ASK: dict[str, Any] = {"model": "tiny", "prompt": "hello the hello the hello", "max_tokens": 24, "temperature": 0.0}
STATIC = "static_shapes: 'on', static_context_tokens: 128, static_prefill_rows: 16"


def write_config(directory: Path, model: str) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: tiny, name: tiny, {model}}}\n"
        f"drafts: [{{method: model, source: tiny, {STATIC}, static_verify_rows: [1]}}]\n"
        "speculation: {method: fixed, num_speculative_tokens: 3}\n"  # on a busy machine drafts may not pay
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 2}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{directory}/store'}}\n"
    )
    return path


def test_a_target_and_a_draft_of_fixed_shape_serve_and_status_says_so(tmp_path, outrider):
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    with running(write_config(tmp_path, f"{STATIC}, static_verify_rows: [1, 4]")) as daemon:
        ready = daemon.status()["ready"]
        assert (ready["static_widths"], ready["context_tokens"], ready["row_invariant"]) == ([1, 4, 16], 128, True)
        answers = [
            daemon.client.completions.create(**ASK, extra_body={"speculative_config": wanted})
            for wanted in ({"method": "off"}, {"num_speculative_tokens": 3})
        ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        daemon.wait_for("gauges", running=0)
        (draft,) = daemon.status()["gauges"]["drafters"]
        assert (draft["static_widths"], draft["state"]) == ([1, 16], "ok")
        assert draft["accepted"] > 0  # it is the target's own twin
        shown = outrider("status", "--socket", str(daemon.admin))[1]
        assert "static: forwards of 1, 4, 16 rows over 128" in shown
        assert "static forwards of 1, 16 rows" in drafter_line(draft)


def test_a_device_that_is_not_there_is_named_beside_those_that_are(tmp_path):
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    found = outrider_process("serve", "--config", str(write_config(tmp_path, "device: NPU")))
    assert found.returncode == 1
    assert "no device 'NPU' here; there is CPU" in found.stderr
