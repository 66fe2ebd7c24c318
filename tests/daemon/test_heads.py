"""A target with a head, from cluster.yaml to answers through the `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.daemon import running
from tests.support.tiny_heads import write_head

MESSAGES: list[Any] = [{"role": "user", "content": "hello the hello"}]


def test_a_head_drafts_and_the_answer_is_the_targets(tmp_path: Path) -> None:
    tiny_models.write_model(tmp_path / "tiny", "llama")
    write_head(tmp_path / "head", range(4, 260))
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model: {source: ./tiny, adapter: torch_device, activations: fp32}\n"
        "drafts: [{method: head, source: ./head}]\nspeculation: {method: fixed, num_speculative_tokens: 3}\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 4}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{tmp_path}/store'}}\n"
    )

    with running(config) as daemon:
        answers = [
            daemon.client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=24,
                temperature=0.7,
                seed=5,
                extra_body={"speculative_config": {"method": method}},
            )
            .choices[0]
            .message.content
            for method in ("off", "auto")
        ]
        assert answers[0] == answers[1]
        (drafter,) = daemon.status()["gauges"]["drafters"]
        assert (drafter["name"], drafter["method"], drafter["state"]) == ("head", "head", "ok")
        assert drafter["drafted"] > 0
        assert daemon.stop() == 0
