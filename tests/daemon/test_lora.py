"""LoRA adapters by request: each one's text whatever drafts, company, lost workers and shared beginnings there are."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from tests.daemon.test_replaced_models import MODEL, configure, find_worker, read
from tests.support import tiny_gguf
from tests.support.cut_streams import Client
from tests.support.daemon import Daemon, running
from tests.support.tiny_lora import draw_pairs, write_lora, write_peft
from tests.support.waiting import until

TINY = replace(MODEL, hidden=128, heads=2, kv_heads=1, head_dim=64, context=4096)
PROMPT = "hello-the-hello-" * 10
NAMES = ("tiny", "tiny:pirate", "tiny:poet")
FEW, MANY = 60, 1500


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Write a model and two adapters; return what `model` says of them in cluster.yaml."""
    arrays = tiny_gguf.write(tmp_path / "tiny.gguf", TINY)
    write_lora(tmp_path / "pirate.gguf", draw_pairs(arrays, 1))
    write_peft(tmp_path / "poet", TINY, draw_pairs(arrays, 2))
    adapters = "[{name: pirate, source: pirate.gguf}, {name: poet, source: poet}]"
    return f", adapter: llama_cpp, adapters: {adapters}"


def ask(daemon: Daemon, name: str, tokens: int = FEW, prompt: str = PROMPT) -> tuple[str, str, str]:
    """Return an answer's text, its fingerprint, and the model that it names."""
    answer = daemon.client.completions.create(
        model=name, prompt=prompt, max_tokens=tokens, temperature=0.0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text, str(answer.system_fingerprint), answer.model


def count_prefix(daemon: Daemon, what: str) -> int:
    return int((daemon.status()["gauges"] or {})[f"prefix_{what}"])


def answer_batch(daemon: Daemon, name: str) -> tuple[str, str, str]:
    """Return what `ask` does, of a batch of one line."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": FEW, "temperature": 0.0, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batches = daemon.client.batches
    file = daemon.client.files.create(file=("in.jsonl", json.dumps(line).encode() + b"\n"), purpose="batch")
    batch = batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until(lambda: batches.retrieve(batch.id).status == "completed", 60)
    output = daemon.client.files.content(str(batches.retrieve(batch.id).output_file_id)).text
    answer = json.loads(output)["response"]["body"]
    return answer["choices"][0]["text"], answer["system_fingerprint"], answer["model"]


def test_each_adapter_says_its_own_whatever_is_drafted_shared_moved_or_lost(tmp_path, model):
    store, source = tmp_path / "store", str(tmp_path / "tiny.gguf")
    limits = "devices: {threads: 1}"
    plain = configure(tmp_path, source, store, model=model, tail=f"{limits}\ndrafts: []")
    with running(plain) as daemon:
        # One after another, each with a beginning that nobody had: by the model alone.
        expected = {name: ask(daemon, name) for name in NAMES}
        whole = {name: ask(daemon, name, MANY)[0] for name in NAMES[1:]}
        assert daemon.stop() == 0
    assert [answer[2] for answer in expected.values()] == list(NAMES)
    assert len({answer[0] for answer in expected.values()}) == len({answer[1] for answer in expected.values()}) == 3
    draft = f"{{method: model, source: {source}, adapter: llama_cpp, kv_cache: 8 MiB}}"
    tail = f"{limits}\ndrafts: [{{method: suffix}}, {draft}]"
    config = configure(tmp_path, source, store, model=model, tail=tail)
    config.write_text(config.read_text().replace("max_running: 4", "max_running: 4, kv_disk: 16 MiB"))
    with running(config) as daemon:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda name: ask(daemon, name), NAMES * 3)) == [*expected.values()] * 3
        assert daemon.status()["totals"]["accepted"] > 0
        assert count_prefix(daemon, "hits") > 0
        listed = daemon.client.models.list().data
        assert [entry.id for entry in listed] == list(NAMES)
        assert daemon.client.models.retrieve("tiny:poet").model_dump()["parent"] == "tiny"
        with pytest.raises(openai.NotFoundError, match="there are 'tiny' and 'tiny:pirate' and 'tiny:poet'") as refused:
            ask(daemon, "tiny:sailor")
        assert refused.value.code == "model_not_found"
        stream = iter(
            daemon.client.completions.create(
                model="tiny:pirate", prompt=PROMPT, max_tokens=MANY, temperature=0.0, stream=True
            )
        )
        text, prints = read(stream, 3)
        before = find_worker(daemon)
        os.kill(before, signal.SIGKILL)
        rest, later = read(stream)
        assert whole["tiny:pirate"].startswith(text + rest)
        assert len(text + rest) > 200
        assert prints | later == {expected["tiny:pirate"][1]}
        until(lambda: find_worker(daemon) != before)
        until(lambda: list((store / "kv").glob("*/*.kv")), 30.0)
        assert [ask(daemon, name) for name in NAMES] == [*expected.values()]
        until(lambda: count_prefix(daemon, "loaded") > 0, 30.0)
        assert answer_batch(daemon, "tiny:pirate") == expected["tiny:pirate"]
        body = {"prompt": PROMPT, "max_tokens": MANY, "temperature": 0.0, "ignore_eos": True}
        cut = Client("/v1/completions", body | {"model": "tiny:poet"}, key="cut")
        cut.read(daemon.url, events=3)
        daemon.kill()
    with running(config) as daemon:
        cut.read(daemon.url)
        assert cut.texts == {0: whole["tiny:poet"]}
        assert daemon.stop() == 0
