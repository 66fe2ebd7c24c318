"""A target with a head, from cluster.yaml to answers through the `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.support import tiny_models
from tests.support.daemon import running
from tests.support.tiny_heads import write_head

MESSAGES: list[Any] = [{"role": "user", "content": "hello the hello"}]


def test_an_answer_is_the_targets_whether_its_head_drafts_or_rests(tmp_path: Path) -> None:
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
        answers = {ask(daemon.client, "off")}
        for _ in range(10):  # how long a forward takes says when it is trusted; the engine's tests see it draft
            answers.add(ask(daemon.client, "auto"))
            (drafter,) = daemon.status()["gauges"]["drafters"]
            if drafter["drafted"]:
                break
        assert len(answers) == 1
        assert (drafter["name"], drafter["method"], drafter["state"]) == ("head", "head", "ok")
        assert daemon.stop() == 0


def ask(client: OpenAI, method: str) -> str | None:
    """Return the answer to a seeded request, with and without drafts."""
    settings: dict[str, Any] = {"temperature": 0.7, "seed": 5, "extra_body": {"speculative_config": {"method": method}}}
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, **settings)
    return done.choices[0].message.content
