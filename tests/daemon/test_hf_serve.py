"""A model of the hub, from its id in cluster.yaml to answers through the real `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.hf_directory import open_weights
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from tests.support import reference_decoder, tiny_models
from tests.support.daemon import running
from tests.support.hub_server import Hub, serving

MESSAGES: list[Any] = [{"role": "user", "content": "hello the hello"}]
TOKENS = 12


def decode_expected_text(directory: Path, scratch: Path) -> str:
    """Greedy decoding by the formulas."""
    scratch.mkdir()
    TokenizerRecipe().prepare(directory, scratch, lambda *_: None)
    tokenizer, weights = Tokenizer.load(scratch), open_weights(directory)
    ids = tokenizer.encode_chat(MESSAGES)
    prompt = len(ids)
    while len(ids) < prompt + TOKENS:
        row = reference_decoder.logits(weights, ids)[-1]
        second, first = np.sort(row)[-2:]
        assert first - second > 0.02, "two tokens are as good as equal: choose another seed"
        ids.append(int(row.argmax()))
        assert ids[-1] not in tokenizer.eos_ids
    return tokenizer.decode(ids[prompt:])


@pytest.mark.slow
def test_a_model_of_the_hub_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_models.write_model(tmp_path / "model", "qwen3", kind="BF16", shards=2)
    hub = Hub({"org/Tiny-0.1B": {path.name: path.read_bytes() for path in directory.iterdir()}})
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model: {source: 'hf:org/Tiny-0.1B', activations: fp32}\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 4}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{tmp_path}/store'}}\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with running(config) as daemon:
            ready = daemon.status()["ready"]
            assert ready["source"] == f"hf:org/Tiny-0.1B@{hub.commit('org/Tiny-0.1B')}"
            assert (ready["model"], ready["weights"], ready["row_invariant"]) == ("tiny-0.1b", "bf16", True)
            answers = []
            for method in ("auto", "off"):
                stream = daemon.client.chat.completions.create(
                    model="tiny-0.1b",
                    messages=MESSAGES,
                    max_tokens=TOKENS,
                    temperature=0.0,
                    stream=True,
                    extra_body={"speculative_config": {"method": method}},
                )
                answers.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
            assert answers == [decode_expected_text(directory, tmp_path / "scratch")] * 2
            assert "download org/Tiny-0.1B" in daemon.log.read_text()
            assert daemon.stop() == 0
