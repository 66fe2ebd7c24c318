"""A family that no graph here is made of, from its directory in cluster.yaml to answers through the `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from tests.adapters.test_any_decoder import generate
from tests.support.daemon import running
from tests.support.tiny_decoders import write_decoder

MESSAGES: list[Any] = [{"role": "user", "content": "hello the hello"}]
TOKENS = 16


def expect_text(directory: Path, scratch: Path) -> str:
    """What transformers' own `generate` answers."""
    scratch.mkdir()
    TokenizerRecipe().prepare(directory, scratch, lambda *_: None)
    tokenizer = Tokenizer.load(scratch)
    tokens = generate(directory, tokenizer.encode_chat(MESSAGES), TOKENS)
    assert not set(tokens) & set(tokenizer.eos_ids), "the answer ends: choose another seed"
    return tokenizer.decode(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_family_of_transformers_is_served(tmp_path: Path, name: str) -> None:
    directory = write_decoder(tmp_path / "tiny", name)
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model: {source: ./tiny, adapter: torch_device, activations: fp32}\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 4}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{tmp_path}/store'}}\n"
    )
    expected = expect_text(directory, tmp_path / "scratch")
    with running(config) as daemon:
        ready = daemon.status()["ready"]
        assert (ready["model"], ready["weights"], ready["row_invariant"]) == ("tiny", "fp32", True)
        answers = [
            daemon.client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=TOKENS,
                temperature=0.0,
                extra_body={"speculative_config": {"method": method}},
            )
            .choices[0]
            .message.content
            for method in ("auto", "off", "auto")
        ]
        assert answers == [expected] * 3
        assert daemon.stop() == 0
