"""A daemon on llama.cpp: the same text with drafts, beside others and over a killed worker; never another file's."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from tests.daemon.test_replaced_models import (
    ALIKE,
    MODEL,
    TOKENS,
    ask,
    configure,
    find_worker,
    open_stream,
    read,
    reload,
    write_over,
)
from tests.support import tiny_gguf
from tests.support.daemon import running
from tests.support.tiny_gguf import Tiny
from tests.support.waiting import until

ON_LLAMA = ", adapter: llama_cpp"


def reshape(model: Tiny) -> Tiny:
    """Return a model whose heads are the hidden size together, as llama.cpp wants them."""
    return replace(model, hidden=128, heads=2, kv_heads=1, head_dim=64)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, reshape(MODEL))
    return path


def test_drafts_company_and_a_killed_worker_change_no_token(tmp_path, source):
    threads, store = "devices: {threads: 1}", tmp_path / "store"
    tail = f"{threads}\ndrafts: []"
    with running(configure(tmp_path, str(source), store, model=ON_LLAMA, tail=tail)) as plain:
        expected = ask(plain, TOKENS)
        assert plain.status()["ready"]["adapter"] == "llama_cpp"
        assert plain.stop() == 0
    draft = f"{{method: model, source: {source}, adapter: llama_cpp, kv_cache: 8 MiB}}"
    tail = f"{threads}\ndrafts: [{{method: suffix}}, {draft}]"
    with running(configure(tmp_path, str(source), store, model=ON_LLAMA, tail=tail)) as daemon:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: ask(daemon, TOKENS), range(4))) == [expected] * 4
        accepted = daemon.status()["totals"]["accepted"]
        assert accepted > 0
        stream = open_stream(daemon)
        text, prints = read(stream, 3)
        before = find_worker(daemon)
        os.kill(before, signal.SIGKILL)
        rest, later = read(stream)
        assert text + rest == expected
        assert len(prints | later) == 1
        until(lambda: find_worker(daemon) != before)
        assert daemon.stop() == 0


def test_another_file_at_the_models_place_is_never_served_as_the_model(tmp_path, source):
    """The store has no copy of it, so a worker that starts again has nothing to load."""
    with running(configure(tmp_path, str(source), tmp_path / "store", model=ON_LLAMA)) as daemon:
        expected = ask(daemon)
        write_over(source, reshape(ALIKE))
        assert ask(daemon) == expected  # it is in memory
        os.kill(find_worker(daemon), signal.SIGKILL)
        until(lambda: daemon.status()["phase"] == "failed")
        assert "Put the first model back, or serve what is there now" in daemon.status()["detail"]
        with pytest.raises(openai.APIStatusError, match="Put the first model back"):
            ask(daemon)
        write_over(source, reshape(MODEL))
        reload(daemon)
        until(lambda: daemon.status()["phase"] == "ready")
        assert ask(daemon) == expected
        assert daemon.stop() == 0


def test_auto_serves_the_file_at_once_and_says_what_it_tries_later(tmp_path, source):
    tail = "placement: {improve: false}\ndrafts: []"
    config = configure(tmp_path, str(source), tmp_path / "store", model=", adapter: auto, device: auto", tail=tail)
    with running(config) as daemon:
        assert ask(daemon)
        assert daemon.status()["ready"]["adapter"] == "llama_cpp"
        until(lambda: bool(daemon.status()["plan"]["to_measure"]))
        plan = daemon.status()["plan"]
        assert "has no profile, and is planned by an estimate" in plan["doubts"][0]
        assert plan["to_measure"] == ["llama_cpp CPU, target"], "to convert the model for others is not allowed"
        config.write_text(config.read_text().replace("improve: false", "improve: true"))
        reload(daemon)
        until(lambda: len(daemon.status()["plan"]["to_measure"]) > 1)
        assert daemon.status()["ready"]["adapter"] == "llama_cpp"
        assert daemon.stop() == 0
    log = config.with_suffix(".log").read_text()
    assert "measuring what has no profile takes" not in log
    assert "openvino_rt" in log, "another runtime is known to the plan by now, and what it waits for"
